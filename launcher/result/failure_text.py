"""The words for what went wrong: made once, where a failure becomes known. Pure.

SageMaker shows the first 1,024 characters of /opt/ml/output/failure as FailureReason (AWS's
guide, "How Amazon SageMaker Processes Training Output"), so the cause comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.errors import EXIT_HOST_LOST, EXIT_USAGE
from launcher.result import raised
from launcher.result.causes import Cause, Failure, RankFailure
from launcher.text import flag, port_is_taken, printable, shortened, signal_name

LIMIT = 1024
# What a script misses that was written for AWS's data parallel library.
_SMDDP = ("smdistributed", "smdistributed.dataparallel")


def headline(failure: RankFailure, host: str) -> str:
    """Return one line that says which rank of a host failed, and with what."""
    how = raised.headline(failure.chain)
    if any(f"No module named {name!r}" in how for name in _SMDDP):
        how += f" (see {flag('smddp_compat')})"
    if not how and failure.exit_code < 0:
        how = f"was killed by {signal_name(-failure.exit_code)}"
        how += f"; {failure.oom}" if failure.oom else ""
    how = how or f"ended with exit code {failure.exit_code}"
    return printable(f"{host}, rank {failure.rank} (local rank {failure.local_rank}) {how}")


def of_ranks(
    failures: Sequence[RankFailure], host: str, seconds: float, cause: Cause | None = None
) -> Failure:
    """Return why a host failed whose ranks did, the first cause first, `seconds` after its start.

    `cause` is what it says of why the job ends, if that is not what the first of them says.
    """
    first = failures[0]
    code = first.exit_code if first.exit_code >= 0 else 128 - first.exit_code
    code = code if 0 < code < 256 else 1  # a failure is never a success
    after = seconds if math.isinf(first.time) else first.time
    details = f"exit code {code}, {after:.0f} s after start"
    if len(failures) > 1:
        details += f"; first of {len(failures)} failures (ranks that torchrun ended do not count)"
    text = f"{shortened(headline(first, host), 500)}\n{details}\n"
    lines = [printable(line) for line in raised.frames(first.chain).splitlines()]
    if lines:
        text += "Traceback (most recent call last):\n"
    # The innermost frames are the ones to keep.
    while lines and sum(len(line) + 1 for line in lines) > LIMIT - len(text):
        lines.pop(0)
    while lines and not lines[0].startswith("  File "):
        lines.pop(0)  # the rest of a frame
    text += "".join(line + "\n" for line in lines)
    return Failure(first.cause if cause is None else cause, code, text)


def of_torchrun(
    returncode: int,
    error: str,
    hosts: Sequence[str],
    host: str,
    endpoint: str,
    seconds: float,
    program: str = "torchrun",
) -> Failure:
    """Return why a host failed whose torchrun did and no rank, `seconds` after its start.

    `returncode` is negative for a signal; `error` is what torchrun raised for a reason of its own.
    `program` is torchrun, or what runs it and has failed by itself.
    """
    error = printable(" ".join(error.split())).rstrip(" :")
    lost = error.startswith("Rendezvous")
    if returncode < 0:
        what = f"{host}: {program} was killed by {signal_name(-returncode)}"
    elif "EADDRINUSE" in error or "address already in use" in error.lower():
        what = f"{host}: {port_is_taken(endpoint)}"
    elif lost:
        what = (
            f"{host}: the hosts did not all meet at {endpoint}, or one was lost "
            "(see the other hosts' logs, and --launcher-start-timeout); "
            f"expected {shortened(', '.join(hosts), 300)}"
        )
    else:
        what = f"{host}: {program} failed"
    if error:
        what += f": {error}"
    code = EXIT_HOST_LOST if returncode < 0 or lost else returncode
    if returncode == EXIT_USAGE:
        code = EXIT_USAGE  # torchrun did not take its arguments
    details = f"exit code {code}, {seconds:.0f} s after start"
    text = f"{shortened(what, LIMIT - len(details) - 2)}\n{details}\n"
    return Failure(Cause.TORCHRUN, code, text)


def of_lost_host(host: str, how: str) -> Failure:
    """Return the failure of a host that is lost, in the same words whoever has to find it."""
    text = f"{host[:900]} {how}\nexit code {EXIT_HOST_LOST}\n"
    return Failure(Cause.HOST_LOST, EXIT_HOST_LOST, text)
