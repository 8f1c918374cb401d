"""Why a job ends: the failures, which of them is the cause, and every exit code. Pure.

The launcher's exit code is that of the process that is the cause, 128 + the number of a signal, or
one of errors.py (docs/options.md, "Exit codes").
"""

from __future__ import annotations

import enum
import math
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from launcher.errors import (
    EXIT_CANNOT_EXECUTE,
    EXIT_HOST_LOST,
    EXIT_HUNG,
    EXIT_NOT_FOUND,
    EXIT_SOFTWARE,
    EXIT_USAGE,
    CannotExecuteError,
    CommandFailedError,
    LaunchError,
    NotFoundError,
)
from launcher.result import raised
from launcher.text.words import (
    flag,
    lasted,
    named_rank,
    port_is_taken,
    printable,
    shortened,
    signal_name,
)

LIMIT = 1024  # characters of the failure file that SageMaker shows as FailureReason
# How the second line of a failure text begins if something keeps the job from a restart.
NO_RESTART = "no restart: "
# In characters: the first line, of a rank and of others, and of what is cut the least that stays.
_OF_RANK, _OF_OTHERS, _LEAST = 500, 900, 150
_SAID = 300  # and of what a rank has written last
_TIMES = re.compile(r", (at \d\d:\d\d:\d\d UTC|[\d.]+ s earlier)")  # of a crash, a thread's end
_FRAMES = "Traceback (most recent call last):\n"
_FRAME = re.compile(r"^(?=  File )", re.MULTILINE)
# What torchrun raises for a setting that it cannot use.
_OF_SETTINGS: tuple[str, ...] = (
    "ValueError",
    "KeyError",
    "OSError",
    "FileNotFoundError",
    "FileExistsError",
)
_OF_SETTINGS += ("NotADirectoryError", "PermissionError")
# What a script misses that was written for AWS's data parallel library.
_SMDDP = ("smdistributed", "smdistributed.dataparallel")


class Cause(enum.IntEnum):
    """What a failure says of why the job ends, the best explanation first."""

    OWN = 0  # a rank failed for a reason of its own, or a host cannot start
    HOST_LOST = 1
    TORCHRUN = 2  # it failed, or was killed
    ABORTED = 3  # a rank was aborted, or ended by SIGTERM: perhaps because another one had died
    SECONDARY = 4  # a rank said that it heard of another's death

    @property
    def patience(self) -> float:
        """Seconds that the coordinator waits for a better cause than this one."""
        return _PATIENCE[self]


_PATIENCE = (0.0, 0.5, 1.0, 3.0, 3.0)


class Result(NamedTuple):
    """How the job ends, the same on every host; `text` is that of the failure file, "" for none."""

    exit_code: int
    text: str = ""
    stop_signal: int = 0  # with which a person or the platform stopped the job


SUCCESS = Result(0)
PROBLEMS = Result(EXIT_USAGE)  # that `sm-launch doctor` has found


def failure_text(text: str) -> str:
    """Return a text as in the failure file: printable, cut, and never blank."""
    text = printable(text[:LIMIT], keep="\n").strip("\n")[: LIMIT - 1]
    return f"{text if text.strip() else 'the reason is not known'}\n"


def as_received(result: Result) -> Result:
    """Return a result that the coordinator has sent; that of a success, or a stop, has no text."""
    if result.exit_code == 0:
        return SUCCESS
    if result.stop_signal:
        return stopped(result.stop_signal)
    return Result(failure_code(result.exit_code), failure_text(result.text))


class Failure(NamedTuple):
    """One reason for the job to fail: what its host knows, and what the coordinator adds.

    `exit_code` is a process's, 1 to 255. A restart can fix only one that `may_restart`,
    unless hardware is `broken`, in words; `rank` is that which failed, -1 if none did. `text` has
    what becomes of the words.
    """

    cause: Cause
    exit_code: int
    what: str  # who failed and how, which is cut if it is too long
    more: str = ""  # what is known besides, which is not
    details: str = ""  # `exit code 3, 12 s after start`
    frames: str = ""  # as a traceback has them, the innermost last
    may_restart: bool = False
    rank: int = -1
    broken: str = ""
    # Of the coordinator.
    wait: str = ""  # who waited for whom
    departed: str = ""  # which ranks had ended with 0
    failures: int = 1  # that were known
    no_restart: str = ""  # why the job does not restart, though it could
    restart: str = ""  # the failure before, whose restart this one is of

    @property
    def text(self) -> str:
        """The failure file's text, the cause first: made here alone, and changed by nobody."""
        limit = _OF_RANK if self.rank >= 0 else _OF_OTHERS
        first = shortened(self.what, max(_LEAST, limit - len(self.more))) + self.more
        first = shortened(first, limit)
        if self.departed:
            first += f"; {shortened(self.departed, 400)}"
        lines = [shortened(self.wait, 500), first] if self.wait else [first]
        if self.no_restart:
            lines.insert(1, f"{NO_RESTART}{shortened(self.no_restart, 350)}")
        if self.details:
            more = f"; first of {self.failures} failures (not counting ranks that were stopped)"
            lines.append(self.details + (more if self.failures > 1 else ""))
        if self.restart:
            lines.append(shortened(f"reason for the restart: {self.restart}", 300))
        text = "".join(f"{printable(line)}\n" for line in lines)
        frames = _FRAME.split(printable(self.frames, keep="\n").rstrip("\n"))[1:]
        # The innermost are the ones to keep.
        while frames and len(text) + len(_FRAMES) + sum(map(len, frames)) >= LIMIT:
            del frames[0]
        return failure_text(text + _FRAMES * bool(frames) + "".join(frames))

    @property
    def result(self) -> Result:
        """How the job ends if this is the cause."""
        return Result(failure_code(self.exit_code), self.text)

    @property
    def headline(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0]

    @property
    def kind(self) -> str:
        """The first line without times, which are never the same again."""
        return _TIMES.sub("", self.headline)


class Aside(NamedTuple):
    """What another thread of a rank raised, in seconds before the rank's own end."""

    thread: str
    chain: Sequence[raised.Link]
    before: float
    notes: Sequence[str] = ()


class RankFailure(NamedTuple):
    """How one rank of this host ended; `exit_code` is negative for a signal.

    `time` is in seconds since its torchrun's start. A rank that `said` why it ended raised, or
    called sys.exit; one that did not was killed, or called os._exit. `chain` is what it raised, as
    raised.read gives it.
    """

    rank: int
    local_rank: int
    exit_code: int
    chain: Sequence[raised.Link] = ()
    time: float = math.inf
    said: bool = False
    notes: Sequence[str] = ()  # what else it knows of its end, in words
    recorded: str = ""  # and what the kernel has, by its counters
    place: str = ""  # where it crashed: `load, data.py:88`
    frames: str = ""  # and the calls there, as a traceback has them
    at: str = ""  # the time of day of a crash
    last_words: str = ""  # why it was aborted, as it has written
    aside: Aside | None = None
    after_script: bool = False  # its script had ended: an exit handler failed, or a thread

    @property
    def cause(self) -> Cause:
        """What this says of why the job ends: OWN, ABORTED or SECONDARY."""
        if not self.is_secondary:
            return Cause.OWN
        return Cause.SECONDARY if self.said else Cause.ABORTED

    @property
    def is_secondary(self) -> bool:
        """Whether this reads like the consequence of something that failed before.

        NCCL's watchdog aborts a process whose peer has died, and SIGTERM is how others end one.
        """
        if self.exit_code in (-signal.SIGABRT, -signal.SIGTERM) and not self.said:
            return True
        return not self.notes and raised.is_secondary(self.chain)


def exit_code_of(returncode: int) -> int:
    """Return the exit code by which a process is known that has ended; negative: by a signal."""
    return returncode if returncode >= 0 else 128 - returncode


def failure_code(code: int) -> int:
    """Return an exit code as a failure's, which is never a success."""
    return code if 0 < code < 256 else 1


def stopped(number: int) -> Result:
    """Return the result of a job that was stopped by a signal."""
    return Result(exit_code_of(-number), "", number)


def of_container(
    returncode: int,
    reported: Result | None,
    stop_signal: int,
    *,
    hides_failure: bool = False,
    keeps_code: bool = False,
) -> Result:
    """Return how a container ends whose command has ended, below an init.

    `returncode` is the command's, negative for a signal; `reported` is the last launcher's result;
    `hides_failure`: the command is the toolkit's, which has not said that the job succeeded;
    `keeps_code`: the command's code counts, whatever the launcher's was.
    """
    code = exit_code_of(returncode)
    reported = reported or SUCCESS
    if code == 0 and hides_failure and not stop_signal:
        code = 1
    # The toolkit ends with 1 after every failure, and with 0 after a Ctrl-C that it handled, too;
    # a shell script may end with that of `| tee`. A stop that came to another host is no failure.
    is_hidden = code == 1 or (code == 0 and (stop_signal or not reported.stop_signal))
    if reported.exit_code and is_hidden and not keeps_code:
        code = reported.exit_code
    elif code == exit_code_of(-signal.SIGTERM) and stop_signal:
        code = exit_code_of(-stop_signal)  # the toolkit's `train` gets SIGTERM for any stop
    return Result(code, stop_signal=reported.stop_signal)


def of_rank(failure: RankFailure, host: str) -> Failure:
    """Return why the job fails if a rank of a host is the cause."""
    code = failure_code(exit_code_of(failure.exit_code))
    who = named_rank(host, failure.rank, failure.local_rank)
    how, see = raised.headline(failure.chain), ""
    if any(f"No module named {name!r}" in how for name in _SMDDP):
        how += f" (see {flag('smddp_compat')})"
    if not how and failure.exit_code < 0:
        how = f"was killed by {signal_name(-failure.exit_code)}"
        how += f" in {failure.place}" if failure.place else ""
        if failure.last_words:
            how += f": {shortened(failure.last_words, _SAID)}"
        elif failure.exit_code == -signal.SIGABRT:  # C++ says there alone what it has not caught
            see = f"; see that rank's last lines on stderr, at {failure.at}"
    how = how or f"ended with exit code {failure.exit_code}"
    more = f" after its script had ended{see}" if failure.after_script else see
    of_thread = failure.aside.notes if failure.aside else ()
    notes = dict.fromkeys((*failure.notes, *of_thread, failure.recorded))
    more += "".join(f"; {note}" for note in notes if note)
    frames = raised.frames(failure.chain) or failure.frames
    if failure.aside:
        thread, chain, before, _ = failure.aside
        frames = frames or raised.frames(chain)
        if chain[0].title() not in [link.title() for link in failure.chain]:  # raised again
            more += f' (thread "{thread}" {raised.aside(chain)}, {lasted(before)} earlier)'
    broken = raised.hardware(failure.chain)
    return Failure(
        failure.cause,
        code,
        f"{who} {how}",
        more,
        f"exit code {code}, {failure.time:.0f} s after start",
        frames[-LIMIT:],
        may_restart=True,
        rank=failure.rank,
        broken=broken and f"{who} reports {broken}",
    )


def of_torchrun(
    returncode: int,
    error: str,
    hosts: Sequence[str],
    host: str,
    endpoint: str,
    seconds: float,
    program: str = "torchrun",
    oom: str = "",
    *,
    had_ranks: bool = False,
) -> Failure:
    """Return why a host failed whose torchrun did and no rank, `seconds` after its start.

    `returncode` is negative for a signal; `error` is what torchrun raised for a reason of its own.
    `program` is torchrun, or what runs it and has failed by itself; `oom` says whether an
    out-of-memory kill was recorded, if it was killed. Before it `had_ranks` it may have failed for
    its settings.
    """
    error = printable(" ".join(error.split())).rstrip(" :")
    if not (returncode or error or had_ranks):  # --help
        returncode, error = EXIT_USAGE, "it has started no rank, and ended with exit code 0"
    lost = error.startswith("Rendezvous")
    if returncode < 0:
        what = f"{host}: {program} was killed by {signal_name(-returncode)}"
    elif "EADDRINUSE" in error or "address already in use" in error.lower():
        what = f"{host}: {port_is_taken(endpoint)}"
    elif lost:
        what = (
            f"{host}: the rendezvous at {endpoint} was not completed, or a host was lost (see "
            "the other hosts' logs, and --launcher-start-timeout); expected "
            f"{shortened(', '.join(hosts), 300)}"
        )
    else:
        what = f"{host}: {program} failed"
    if error:
        what += f": {error}"
    if oom:
        what += f"; {oom}"
    code = EXIT_HOST_LOST
    if not had_ranks and (returncode == EXIT_USAGE or error.startswith(_OF_SETTINGS)):
        code = EXIT_USAGE
    elif program != "torchrun" and returncode >= 0:
        code = returncode or 1
    return _with_code(Cause.TORCHRUN, code, what, f", {seconds:.0f} s after start")


def of_lost_keeper(host: str, rank: int, local_rank: int, what: str) -> Failure:
    """Return the failure of a host on which a process that stands for a rank was killed."""
    who = named_rank(host, rank, local_rank)
    return _with_code(Cause.TORCHRUN, EXIT_HOST_LOST, f"{who}: {what} was killed")


def of_group_rank(host: str) -> Failure:
    """Return the failure of a first host whose ranks are not the first, whose address all need."""
    why = "torchrun has not given the first host group rank 0; expected its hosts in order"
    return _with_code(Cause.TORCHRUN, EXIT_HOST_LOST, f"{host}: {why}")


def of_lost_host(host: str, how: str) -> Failure:
    """Return the failure of a host that is lost, in the same words whoever has to find it."""
    return _with_code(Cause.HOST_LOST, EXIT_HOST_LOST, f"{host} {how}")


def of_hang(what: str, *, may_restart: bool = True) -> Failure:
    """Return the failure of a job in which ranks wait for one that does not come, or run on."""
    failure = _with_code(Cause.OWN, EXIT_HUNG, what, f" ({flag('hang_timeout')})")
    return failure._replace(may_restart=may_restart)


def _with_code(cause: Cause, code: int, what: str, more: str = "") -> Failure:
    return Failure(cause, code, what, details=f"exit code {code}{more}")


def of_host(text: str, exit_code: int = EXIT_USAGE, cause: Cause = Cause.OWN) -> Failure:
    """Return the failure of a host that cannot start, or does not agree with the others."""
    return Failure(cause, exit_code, text)


def of_error(error: LaunchError, host: str = "") -> Failure:
    """Return the failure of a launcher that meets an error that a person can fix.

    It names the `host` where others are told, too.
    """
    exit_code = EXIT_USAGE
    if isinstance(error, NotFoundError):
        exit_code = EXIT_NOT_FOUND
    elif isinstance(error, CannotExecuteError):
        exit_code = EXIT_CANNOT_EXECUTE
    elif isinstance(error, CommandFailedError):
        exit_code = error.exit_code
    return of_host(f"launcher: {host}: {error}" if host else f"launcher: {error}", exit_code)


def of_launcher(host: str, error: Exception) -> Failure:
    """Return the failure of a host whose launcher itself has failed: `error` is what it raised."""
    raised = f"{type(error).__name__}: {error}".removesuffix(": ")
    what = f"launcher: {host}: the launcher itself failed with {raised}"
    return _with_code(Cause.OWN, EXIT_SOFTWARE, what, f"; see the traceback in the log of {host}")


def change_port(seen: str) -> str:
    """Return what is wrong with the port of the launchers, and what to do about it."""
    return f"{seen}; choose another with {flag('peer_port')}, the same one on every host."


def broken_hosts(broken: str) -> str:
    """Return why a job does not restart whose hardware is broken."""
    return f"{shortened(broken, 250)}; SageMaker checks and replaces the hosts of a failed job"
