"""What only the first host can say: which rank ended first, what all of them did not do. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from launcher.peers.messages import Cleared, Succeeded
from launcher.result.causes import SUCCESS, Result
from launcher.text.words import all_ranks, lasted, plural, signal_name

CHECKPOINTS = "/opt/ml/checkpoints"
NOTHING = (
    "SageMaker will upload nothing: /opt/ml/model, /opt/ml/output/data and /opt/ml/checkpoints are "
    "empty on all hosts; a model is saved in SM_MODEL_DIR."
)


def first_to_end(ended: Collection[tuple[float, str, Succeeded]], at: float, rank: int) -> str:
    """Return which rank had ended first when a rank failed, and how many more had; "" if unknown.

    `at` is when it failed; `ended` has when each rank ended, and its host. If none had ended by
    then, name those that were ending: when a rank departs, its connections break before its process
    ends.
    """
    if not ended:
        return ""
    since, host, report = min(ended)
    had_ended = since < at
    count = sum(time < at or not had_ended for time, _, _ in ended)
    who = f"{host}, rank {report.rank}" + (f" and {count - 1} more" if count > 1 else "")
    if had_ended:
        ago = f"{'the first ' if count > 1 else ''}{lasted(at - since)} before"
        return f"{who} had ended with exit code 0, {ago} rank {rank} failed"
    return f"{who} {'were' if count > 1 else 'was'} ending with exit code 0 when rank {rank} failed"


def nothing_exchanged(count: int) -> str:
    """Return the line about ranks that did not work together, as far as torch knows.

    They may have by other ways: a store of the script's, files, sockets.
    """
    return (
        f"{count} ranks ran, and none exchanged anything with another in a process group. If they "
        "were to work together: torchrun passes no --local_rank; RANK, WORLD_SIZE and LOCAL_RANK "
        "are in the environment (--launcher-notes false turns this line off)."
    )


def last_lines(result: Result, hosts: Collection[Cleared]) -> list[str]:
    """Return how ranks ended at a stop, and what was saved: only what all hosts know."""
    files = -1 if any(host.files < 0 for host in hosts) else sum(host.files for host in hosts)
    if result == SUCCESS:
        return [] if files else [NOTHING]
    if not result.stop_signal:
        return []
    exits, saved = "", _saved(files)
    ranks = sum(host.handled for host in hosts)
    if ranks and all(host.handled >= 0 for host in hosts):
        seconds = math.ceil(max(host.seconds for host in hosts))
        who = all_ranks(ranks) if ranks > 1 else "the rank"
        name = signal_name(result.stop_signal).partition(" ")[0]
        exits = f"{who} exited by themselves within {seconds} s of {name}"
        exits = exits if ranks > 1 else exits.replace("themselves", "itself")
    return [f"{'; '.join(filter(None, (exits, saved)))}."] if exits or saved else []


def _saved(files: int) -> str:
    if files < 0:
        return ""
    if not files:
        return f"nothing was saved below {CHECKPOINTS} (checkpoint_s3_uri not set?)"
    return f"{plural(files, 'file')} {'is' if files == 1 else 'are'} new below {CHECKPOINTS}"
