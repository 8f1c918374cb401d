"""`sm-launch stacks`: the stacks of all ranks, on all hosts, of the jobs on this host.

Each launcher has a Unix socket in its job's folder, which only its user can reach. The environment
of its torchrun and of what that has started names the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError
from launcher.host.cgroups import read_text
from launcher.host.folders import SOCKET
from launcher.host.signals import Signals
from launcher.job.options import RUN_DIR
from launcher.result.causes import SUCCESS, Result, stopped
from launcher.text.log import show
from launcher.text.protocol import decoded, encoded
from launcher.text.words import printable

_TO_CONNECT, _TO_ANSWER = 2, 8  # s; hosts answer within 3
_LIMIT = 1 << 20  # bytes of an answer
HELP = """\
usage: sm-launch stacks

Print the Python stacks of all ranks of the job that runs here, on all its hosts; identical stacks
are printed once. Run it next to the job, as the job's user or root (with `docker exec`, if the job
runs in a container). A rank answers within a second, even while it waits in a collective. A rank
that holds Python's lock (the GIL) is sent a signal to make it write its stack, which may end a
sleep() or poll() in its C code early.

Exit codes: 0; 2 if no job that this user may see runs here."""


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Print the stacks. Raises LaunchError if there are none."""
    if argv:
        raise LaunchError(f"sm-launch stacks takes no argument, but got {argv[0]!r}.")
    found = [_answer(folder, signals) for folder in sorted(_folders())]
    if signals.stop:
        return stopped(signals.stop)
    # On one machine, launchers of one job give the same answer.
    answers = {(a["uid"], str(a.get("job")), str(a.get("key"))): a["lines"] for a in found if a}
    if not answers and {} in found:
        raise LaunchError(
            "the job's launcher has not answered: its ranks are ending or restarting, it is "
            "suspended, or the launcher of the first host does not answer it; try again."
        )
    if not answers:
        raise LaunchError(
            "no job that this user may see runs here; run this in the job's container, as "
            "the job's user or root, once its ranks are running."
        )
    for (_, job, _), lines in answers.items():
        if len(answers) > 1:
            show(f"job {printable(job)}:")
        for line in lines:
            show(printable(str(line)))
    return SUCCESS


def _folders() -> set[str]:
    """Return the folders that the environments name of the processes that this user may see."""
    environments = (read_text(f"/proc/{name}/environ") for name in os.listdir("/proc"))
    return {*re.findall(rf"(?:^|\0){RUN_DIR}=([^\0]+)", "\0".join(environments))}


def _answer(folder: str, signals: Signals) -> dict[str, Any] | None:
    """Return the answer of a folder's launcher: {} if none, also at a stop; None if it has gone."""
    line, by = b"", time.monotonic() + _TO_ANSWER
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TO_CONNECT)
        try:
            connection.connect(os.path.join(folder, SOCKET))
        except OSError:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection.sendall(encoded({"want_stacks": True}))
            while not (line.endswith(b"\n") or len(line) > _LIMIT or signals.stop):
                left = max(0.0, by - time.monotonic())
                ready, _, _ = select.select([connection, signals], [], [], left)
                data = connection.recv(1 << 16) if connection in ready else b""
                if not data and signals not in ready:  # it is late, or has gone
                    break
                line += data
            answer = decoded(line)
            if isinstance(answer["lines"], list):
                return {**answer, "uid": os.stat(folder).st_uid}
    return {}
