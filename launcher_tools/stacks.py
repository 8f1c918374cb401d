"""`sm-launch stacks`: the stacks of all ranks, on all hosts, of the jobs on this host.

Each launcher has a Unix socket in its job's folder, which only its user can reach. The kernel lists
it (/proc/net/unix), unless it is in another network namespace; a rank's environment names it, too,
unless the rank was forked (--launcher-start warm).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.errors import LaunchError
from launcher.host.run_dir import PREFIX, SOCKET
from launcher.host.signals import Signals
from launcher.job import arguments
from launcher.job.options import RUN_DIR
from launcher.result.causes import SUCCESS, Result, of_error, stopped
from launcher.text.log import log, show
from launcher.text.protocol import Lines, decoded, encoded
from launcher.text.words import printable

_TO_CONNECT, _TO_ANSWER = 2, 8  # s; hosts answer within 3
_LIMIT = 1 << 20  # bytes of an answer
_HELP = """\
usage: sm-launch stacks

Print the Python stacks of all ranks of the job that runs here, on all its hosts; identical stacks
are printed once. Run it next to the job, as the job's user or root (with `docker exec`, if the job
runs in a container). A rank answers within a second, even while it waits in a collective. A rank
that holds Python's lock (the GIL) is sent a signal to make it write its stack, which may end a
sleep() or poll() in its C code early.

Exit codes: 0; 2 if no job that this user may see runs here."""


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Print the stacks, or why there are none; do not touch the job's failure file."""
    if arguments.wants_help(argv):
        show(_HELP)
        return SUCCESS
    try:
        return _show(argv, signals)
    except LaunchError as error:
        log(str(error))
        return of_error(error).result


def _show(argv: Sequence[str], signals: Signals) -> Result:
    if argv:
        raise LaunchError(f"sm-launch stacks takes no argument, but got {argv[0]!r}.")
    answers: dict[Any, Sequence[str]] = {}
    is_silent = False
    for folder in sorted(set(_folders())):
        answer = _answer(folder, signals)
        is_silent = is_silent or answer == {}
        if signals.stop():
            return stopped(signals.stop())
        if answer:  # on one machine, launchers of one job give the same answer
            key = answer["uid"], str(answer.get("job")), str(answer.get("key"))
            answers.setdefault(key, answer["lines"])
    if not answers and is_silent:
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


def _folders() -> Iterator[str]:
    """Yield the folders of the launchers whose sockets or processes this user may see."""
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        for line in file:
            folder, name = os.path.split(os.fsdecode(line.split(maxsplit=7)[-1].strip()))
            if name == SOCKET and os.path.basename(folder).startswith(PREFIX):
                yield folder
    prefix = f"{RUN_DIR}=".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                for entry in file.read().split(b"\0"):
                    if entry.startswith(prefix):
                        yield os.fsdecode(entry[len(prefix) :])


def _answer(folder: str, signals: Signals) -> dict[str, Any] | None:
    """Return the answer of a folder's launcher: {} if none, None if it has gone."""
    lines = Lines(_LIMIT)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TO_CONNECT)
        try:
            connection.connect(os.path.join(folder, SOCKET))
        except OSError:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError):
            connection.sendall(encoded({"want_stacks": True}))
            by = time.monotonic() + _TO_ANSWER
            while _can_read(connection, signals, by) and (data := connection.recv(1 << 16)):
                for line in lines.feed(data):
                    answer = decoded(line)
                    if isinstance(answer["lines"], list):
                        return {**answer, "uid": os.stat(folder).st_uid}
    return {}


def _can_read(connection: socket.socket, signals: Signals, by: float) -> bool:
    """Wait for data on a connection, until a deadline or a stop."""
    while not signals.stop():
        ready, _, _ = select.select([connection, signals], [], [], max(0, by - time.monotonic()))
        if signals not in ready:
            return bool(ready)
    return False
