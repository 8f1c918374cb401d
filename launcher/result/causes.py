"""Why a job ends: the failures, how well each explains the end, and every exit code. Pure.

The launcher's exit code is that of the process that caused the end, 128 + the number of a signal,
or one of errors.py (docs/options.md, "Exit codes").
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from launcher.errors import EXIT_HOST_LOST, EXIT_HUNG, EXIT_SOFTWARE, EXIT_USAGE, LaunchError
from launcher.job.job import Job
from launcher.text.words import Note, flag, lasted, plural, printable, shortened, signal_name

LIMIT = 1024  # characters of the failure file that SageMaker shows as FailureReason
# The start of a failure text's second line if something prevents a restart.
NO_RESTART = "no restart: "
# In characters: the first line of a rank's failure and of others, and the least that cuts leave.
_OF_RANK, _OF_OTHERS, _LEAST = 500, 900, 150
_SAID = 300  # characters of a rank's last output
_HEADER = "Traceback (most recent call last):\n"
_FRAME = re.compile(r"^(?=  File )", re.MULTILINE)
# Exceptions of torchrun for a setting that it cannot use.
_OF_SETTINGS = re.compile("(Value|Key|OS|FileNotFound|FileExists|NotADirectory|Permission)Error")
# Its words when it was told to end; the launcher's own signals to it come only after the job.
_TOLD = re.compile(r"SignalException: .* got signal: (\d+)")
# A script for AWS's data parallel library misses it.
_SMDDP = re.compile(r"No module named 'smdistributed(\.dataparallel)?'")


# How a rank ended, as it reports it itself.


class Link(NamedTuple):
    """One exception of a chain; `frames` are innermost last.

    `how` is its relation to the one before it, in Python's words: its "cause", its "context" (which
    was being handled), or "hidden" (which Python would not print, such as the context of a `raise
    ... from None`, or the origin of a group whose first member has its own origin, which stands for
    the group's); "" is the outermost.
    """

    exception: str = ""
    message: str = ""
    frames: str = ""
    how: str = ""

    def title(self, limit: int = 10**9) -> str:
        """Return the exception with its message, as one line."""
        name = self.exception or "SystemExit"
        message = shortened(_one_line(self.message), limit)
        return f"{name}: {message}" if message else name


class Exit(NamedTuple):
    """How a rank, or a thread of it, has ended, and what else its host knows of that.

    `exit_code` is negative for a signal. A rank that raised has a chain of exceptions
    (run/rank.py); a rank that was killed, or called os._exit, has none. `facts` are sentences that
    explain the end: a killed child (rank.py), a shortage (clues.py), a wrong rendezvous
    (watch/in_rank.py).
    """

    exit_code: int
    chain: tuple[Link, ...] = ()
    facts: tuple[str, ...] = ()
    recorded: str = ""  # what the kernel's counters show
    broken: str = ""  # hardware
    words: str = ""  # its last output: why it was aborted, or the last line if it exited
    place: str = ""  # where it crashed: `load, data.py:88`
    frames: str = ""  # the calls there, as a traceback shows them
    at: str = ""  # the time of day of a crash
    after_script: bool = False  # an exit handler or a thread has ended it


# How the job ends.


class Cause(enum.IntEnum):
    """How well a failure explains why the job ends, the best explanation first."""

    OWN = 0  # of a rank itself, a hang, a launcher that failed, or a host that cannot start
    HOST_LOST = 1
    TORCHRUN = 2  # torchrun failed, or was killed, or a keeper was
    # torchrun ends its ranks, or has ended, without words: perhaps because another host's has, or
    # because all processes of its host are stopped.
    TORCHRUN_ENDS = 3
    TIMED_OUT = 4  # a rank gave up waiting for others
    ABORTED = 5  # a rank was aborted, or ended by SIGTERM: perhaps because another one had died
    SECONDARY = 6  # a rank reported another rank's death

    @property
    def patience(self) -> float:
        """Seconds that the coordinator waits for a better cause than this one."""
        return _PATIENCE[self]


_PATIENCE = (0.0, 0.5, 1.0, 1.0, 3.0, 3.0, 3.0)


class Result(NamedTuple):
    """How the job, or a host's share, ends; `text` is for the failure file, "" for none."""

    exit_code: int
    text: str = ""
    stop_signal: int = 0  # of a person or the platform
    is_hang: bool = False  # ranks had made no progress for too long

    @property
    def cause(self) -> str:
        """The text's first line, as the log has it."""
        return self.text.partition("\n")[0].removeprefix("launcher: ")

    @property
    def note(self) -> Note:
        """The end of a host's share of the job for events.jsonl."""
        stop = f"stopped by {signal_name(self.stop_signal)}" if self.stop_signal else ""
        return Note("ended", cause=stop or self.text, exit_code=self.exit_code)


SUCCESS = Result(0)
PROBLEMS = Result(EXIT_USAGE)  # found by `sm-launch doctor`


def failure_text(text: str) -> str:
    """Return a text for the failure file: printable, cut, and never blank."""
    text = printable(text[:LIMIT], keep="\n").strip("\n")[: LIMIT - 1]
    return f"{text if text.strip() else 'the reason is not known'}\n"


def as_received(result: Result) -> Result:
    """Return a result from the coordinator; without text after a success or a stop."""
    if result.exit_code == 0:
        return SUCCESS
    if result.stop_signal:
        return stopped(result.stop_signal)
    code = failure_code(result.exit_code)
    return result._replace(exit_code=code, text=failure_text(result.text))


class Failure(NamedTuple):
    """One reason for the job to fail: its host's facts, and those that the coordinator adds.

    `exit_code` is as a shell has it, 1 to 255. A restart can fix it only if it `may_restart` and no
    hardware is `broken` (in words); `rank` is the failed rank, -1 if none failed.
    """

    cause: Cause
    exit_code: int
    what: str  # who failed and how, equal in equal failures; cut if it is too long
    more: str = ""  # further facts, cut after it
    details: str = ""  # `exit code 3, 12 s after start`
    frames: str = ""  # of a traceback, the innermost last
    may_restart: bool = False
    is_hang: bool = False
    rank: int = -1
    broken: str = ""
    age: float = 0.0  # seconds from the failure to its report
    # Added by the coordinator.
    reason: str = ""  # who waited for whom, or which rank had ended before: it comes first
    failures: int = 1  # how many have the cause OWN
    no_restart: str = ""  # why the job does not restart, although restarts remain
    restart: str = ""  # the earlier failure, whose restart this one prevents

    @property
    def text(self) -> str:
        """The failure file's text, the cause first; who receives it does not change it."""
        limit = _OF_RANK if self.rank >= 0 else _OF_OTHERS
        first = shortened(self.what, max(_LEAST, limit - len(self.more)))
        if self.more and not first.endswith(".."):
            first = first.removesuffix(".")  # the sentence goes on
        lines = [shortened(self.reason, 500)] if self.reason else []
        lines.append(shortened(first + self.more, limit))
        if self.no_restart:
            lines.insert(1, f"{NO_RESTART}{shortened(self.no_restart, 350)}")
        if self.details:
            more = f"; {plural(self.failures - 1, 'more rank')} failed independently"
            lines.append(self.details + (more if self.failures > 1 else ""))
        if self.restart:
            lines.append(shortened(f"reason for the restart: {self.restart}", 300))
        text = "".join(f"{printable(line)}\n" for line in lines)
        frames = _FRAME.split(printable(self.frames, keep="\n").rstrip("\n"))[1:]
        # Drop the outermost frames first.
        while frames and len(text) + len(_HEADER) + sum(map(len, frames)) >= LIMIT:
            del frames[0]
        return failure_text(text + _HEADER * bool(frames) + "".join(frames))

    @property
    def note(self) -> Note:
        """This failure for events.jsonl."""
        cause, _, text = self.text.partition("\n")
        rank = self.rank if self.rank >= 0 else None
        return Note("failed", rank, cause, self.exit_code, text=text.strip("\n"))

    @property
    def result(self) -> Result:
        """How the job ends if this is the cause."""
        return Result(failure_code(self.exit_code), self.text, is_hang=self.is_hang)

    @property
    def obstacle(self) -> str:
        """Why no restart can follow, "" if one may."""
        if self.broken:
            broken = shortened(self.broken, 250)
            return f"{broken}; SageMaker checks and replaces the hosts of a failed job"
        return "" if self.may_restart else self.headline

    @property
    def headline(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0]


class Aside(NamedTuple):
    """An exception in another thread of a rank, `before` seconds before the rank's own end."""

    thread: str
    end: Exit
    before: float


def exit_code_of(returncode: int) -> int:
    """Return the shell's exit code for an ended process; negative `returncode`: a signal."""
    return returncode if returncode >= 0 else 128 - returncode


def failure_code(code: int) -> int:
    """Return an exit code for a failure: 1 instead of 0, or of an invalid one."""
    return code if 0 < code < 256 else 1


def stopped(stop_signal: int) -> Result:
    """Return the result of a job that a signal has stopped."""
    return Result(exit_code_of(-stop_signal), "", stop_signal)


def of_container(
    returncode: int,
    reported: Result | None,
    stop_signal: int,
    *,
    hides_failure: bool = False,
    keeps_code: bool = False,
) -> Result:
    """Return the result of a container whose command, below an init, has ended.

    `returncode` is the command's, negative for a signal; `reported` is the last launcher's result;
    `hides_failure`: the command is the toolkit's, and has not recorded a success; `keeps_code`: the
    command's code counts, whatever the launcher's was.
    """
    code = exit_code_of(returncode)
    reported = reported or SUCCESS
    if code == 0 and hides_failure and not stop_signal:
        code = 1
    # The toolkit ends with 1 after every failure, and with 0 even after a Ctrl-C; a shell script
    # may end with the code of `| tee`. If only another host was stopped, a 0 stays 0.
    is_hidden = code == 1 or (code == 0 and (stop_signal or not reported.stop_signal))
    if reported.exit_code and is_hidden and not keeps_code:
        code = reported.exit_code
    elif code == exit_code_of(-signal.SIGTERM) and stop_signal:
        code = exit_code_of(-stop_signal)  # the toolkit's `train` gets SIGTERM for any stop
    return Result(code, stop_signal=reported.stop_signal)


def cause_of(end: Exit) -> Cause:
    """Return how well a rank's end explains why the job ends.

    NCCL's watchdog aborts a process whose peer has died; another program may end it by SIGTERM.
    """
    if end.exit_code in (-signal.SIGABRT, -signal.SIGTERM):
        return Cause.ABORTED
    links = end.chain or (Link(message=end.words),)
    if end.facts or end.broken or not any(map(is_secondary, links)):
        return Cause.OWN
    if any(map(has_timed_out, links)):
        return Cause.TIMED_OUT
    return Cause.SECONDARY if end.chain else Cause.ABORTED


def of_rank(who: str, rank: int, end: Exit, seconds: float, aside: Aside | None = None) -> Failure:
    """Return why the job fails if a rank is the cause, which `who` names.

    It failed `seconds` after torchrun's start on its host.
    """
    code = failure_code(exit_code_of(end.exit_code))
    how, see = headline(end.chain), ""
    if _SMDDP.search(how):
        how += f" (see {flag('smddp_compat')})"
    words = shortened(end.words, _SAID)
    if not how and end.exit_code < 0:
        how = f"was killed by {signal_name(-end.exit_code)}"
        how += f" in {end.place}" if end.place else ""
        how += f": {words}" if words else ""
        if end.exit_code == -signal.SIGABRT and not words:
            see = f"; see that rank's last lines on stderr, at {end.at}"  # C++ says why only there
    if not how:
        how = f"ended with exit code {end.exit_code}"
        how += f'; its last line: "{words}"' if words else ""
    more = f" after its script had ended{see}" if end.after_script else see
    of_thread = aside.end if aside else Exit(0)
    facts = (*end.facts, *of_thread.facts, end.recorded or of_thread.recorded)
    more += "".join(f"; {fact}" for fact in dict.fromkeys(facts) if fact)
    frames = frames_of(end.chain) or end.frames or frames_of(of_thread.chain)
    # The rank may have raised the thread's exception again.
    if aside and of_thread.chain[0].title() not in [link.title() for link in end.chain]:
        ago = f"{lasted(aside.before)} earlier"
        more += f' (thread "{aside.thread}" {aside_of(of_thread.chain)}, {ago})'
    return Failure(
        cause_of(end),
        code,
        f"{who} {how}",
        more,
        f"exit code {code}, {seconds:.0f} s after start",
        frames[-LIMIT:],
        may_restart=True,
        rank=rank,
        broken=end.broken and f"{who} reports {end.broken}",
    )


def of_torchrun(
    job: Job, returncode: int, error: str, seconds: float, oom: str = "", *, had_ranks: bool = False
) -> Failure:
    """Return the failure of a host whose torchrun failed, but no rank, `seconds` after its start.

    Or of the program that runs torchrun and failed itself. `returncode` is negative for a signal;
    `error` is torchrun's own exception; `oom` says whether an out-of-memory kill was recorded, if
    it was killed. A torchrun that never `had_ranks` may have failed because of its settings.
    """
    error = printable(" ".join(error.split())).rstrip(" :")
    if not (returncode or error or had_ranks):  # as with --launcher-torchrun-args --help
        returncode, error = EXIT_USAGE, "it has started no rank, and ended with exit code 0"
    runner = job.plan.runner
    is_taken = "EADDRINUSE" in error or "address already in use" in error.lower()
    is_taken &= not (runner or had_ranks)  # else it may be another port
    what = f"{runner or 'torchrun'} failed"
    if told := _TOLD.match(error):
        what, error = f"torchrun was ended by {signal_name(int(told[1]))}", ""
        what += f", below {runner}" if runner else ""
    elif returncode < 0:
        what = f"{runner or 'torchrun'} was killed by {signal_name(-returncode)}"
    elif is_taken:
        what, error = job.taken_port(), ""
    elif error.startswith("Rendezvous"):
        expected = shortened(", ".join(job.cluster.hosts), 300)
        what = (
            f"the rendezvous at {job.endpoint} was not completed, or a host was lost (see the "
            f"other hosts' logs, and --launcher-start-timeout); expected {expected}"
        )
    what += (f": {error}" if error else "") + (f"; {oom}" if oom else "")
    code = EXIT_HOST_LOST
    if is_taken or (not had_ranks and (returncode == EXIT_USAGE or _OF_SETTINGS.match(error))):
        code = EXIT_USAGE
    elif runner and returncode >= 0 and not told:
        code = returncode or 1
    what = f"{job.current_host}: {what}"
    cause = Cause.TORCHRUN if error or returncode <= 0 or told or is_taken else Cause.TORCHRUN_ENDS
    return _with_code(cause, code, what, f", {seconds:.0f} s after start")


def of_killed(who: str, what: str) -> Failure:
    """Return the failure of a host on which `what`, a process of the rank `who`, was killed."""
    return _with_code(Cause.TORCHRUN, EXIT_HOST_LOST, f"{who}: {what} was killed")


def of_group_rank(host: str) -> Failure:
    """Return the failure of a first host that lacks rank 0, whose address all ranks need."""
    why = "torchrun has not given the first host group rank 0; expected its hosts in order"
    return _with_code(Cause.TORCHRUN, EXIT_HOST_LOST, f"{host}: {why}")


def of_lost_host(host: str, how: str) -> Failure:
    """Return the failure of a host that never joined, was lost, or is too late for a restart.

    It is in the same words whoever detects it.
    """
    return _with_code(Cause.HOST_LOST, EXIT_HOST_LOST, f"{host} {how}")


def of_hang(what: str, *, may_restart: bool = True) -> Failure:
    """Return the failure of a job whose ranks wait without end, or do not exit."""
    failure = _with_code(Cause.OWN, EXIT_HUNG, what, f" ({flag('hang_timeout')})")
    return failure._replace(may_restart=may_restart, is_hang=True)


def _with_code(cause: Cause, code: int, what: str, more: str = "") -> Failure:
    return Failure(cause, code, what, details=f"exit code {code}{more}")


def of_host(text: str, exit_code: int = EXIT_USAGE, cause: Cause = Cause.OWN) -> Failure:
    """Return the failure of a host that cannot start, or disagrees with the others."""
    return Failure(cause, exit_code, text)


def of_error(error: LaunchError, host: str = "") -> Failure:
    """Return the failure of a launcher with an error that a person can fix.

    It names the `host` if other hosts are told, too.
    """
    where = f"launcher: {host}" if host else "launcher"
    return of_host(f"{where}: {error}", error.exit_code)


def of_launcher(host: str, error: Exception) -> Failure:
    """Return the failure of a host whose launcher itself has failed with `error`."""
    seen = f"{type(error).__name__}: {error}".removesuffix(": ")
    what = f"launcher: {host}: the launcher itself failed with {seen}"
    return _with_code(Cause.OWN, EXIT_SOFTWARE, what, f"; see the traceback in the log of {host}")


# A chain of exceptions in words. Programs seldom end with the original exception: they raise
# another from it, call sys.exit in an `except` (hydra, click, argparse), or pass it on from another
# process as text (torch's data loader and spawn, multiprocessing, joblib).

# Only collectives report a connection to another rank in these words, wherever they are raised: C++
# methods, such as work.wait(), have no frame of their own. From torch 2.13; gloo's as in
# "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer"; NCCL's are DistBackendErrors.
_OF_COLLECTIVES = re.compile(
    r"torch\.distributed\.Dist(Backend|Network|Store)Error|tensorpipe/"
    r"|gloo/(transport|rendezvous)/|Gloo connectFullMesh failed"
)
# But with this, gloo complains about the call itself (an unknown interface).
_OF_THE_CALL = "enforce fail at"
# Generic connection errors; they point at another rank only if raised in these places.
_BROKEN = re.compile(
    "^(BrokenPipe|EOF|Connection(Aborted|Refused|Reset))Error: "
    "|Broken pipe|Connection closed by peer|Connection reset by peer|Socket Timeout"
)
# A rank has waited as long as torch lets it: the others follow when its connections break. But of
# monitored_barrier() only rank 0 knows for whom all have waited.
_GAVE_UP = re.compile(r"[Tt]imed out (?:waiting|after) \d|wait timeout after|operation timeout")
_REACHED = "successfully reached monitoredBarrier"
_BETWEEN_RANKS = re.compile(
    r"/torch/(autograd|distributed(?!/checkpoint/)|multiprocessing|nn/parallel)/|/multiprocessing/"
)
_FILE = re.compile(r'^ *File "([^"\n]*)', re.MULTILINE)
# Exceptions that only carry an exit code; rank.py leaves the name of a SystemExit empty.
_EXITS = ("", "click.exceptions.Exit")
_BETWEEN = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_HEADERS = re.compile(f"(?:^({'|'.join(_BETWEEN)})\n+)?^{re.escape(_HEADER)}", re.MULTILINE)
# torch.distributed.checkpoint lists the failed ranks' tracebacks; the last is cut least.
_OF_CHECKPOINT = re.compile(
    rf"CheckpointException ranks:(?s:.*)^{re.escape(_HEADER[:-1])} \(RANK (\d+)\)\n", re.MULTILINE
)
_PARTS = re.compile(r"((?: .*\n?|\n)*)(?s:(.*))")  # the frames, then the exception's own lines
# In characters: an exception alone; with its origin; the origin.
_ALONE, _SHOWN, _ORIGIN = 500, 250, 150


def expanded(chain: Sequence[Link]) -> tuple[Link, ...]:
    """Return the exceptions of a chain, with tracebacks in their messages expanded."""
    links: list[Link] = []
    for link in chain:
        before, inner = _printed(link.message)
        if not inner or link.how == "hidden":
            links.append(link)
        elif link.exception.endswith("RemoteTraceback"):
            # multiprocessing's: the exception before it is the same, without frames.
            if links and inner[0].exception.endswith(links[-1].exception.rpartition(".")[2]):
                links[-1] = links[-1]._replace(frames=inner[0].frames)
                del inner[0]
            links += inner
        elif _where(before):
            # torch's: the exception is a copy, or ProcessRaisedException.
            message = inner[0].message.partition("\n\nAt:\n")[0]  # pybind11 appends its place
            message = f"{message} ({_where(before)})".lstrip()
            links += [inner[0]._replace(message=message, how=link.how), *inner[1:]]
        else:
            links += [link._replace(message=before), *inner]
    return tuple(links)


def headline(links: Sequence[Link]) -> str:
    """Return how a rank with these exceptions ended, in a line without its name; "" if unknown.

    "failed with RuntimeError: no model (from ValueError: loss is nan)", "exited: no data".
    """
    text, links = _exit(links)
    if text:
        return _with_origin(f"exited: {text}", links[0] if links else None)
    return _with_origin(f"failed with {links[0].title()}", _origin(links)) if links else ""


def aside_of(links: Sequence[Link]) -> str:
    """Return another thread's exception, in few characters: "raised ValueError: bad file"."""
    return shortened(_with_origin(f"raised {links[0].title(_ORIGIN)}", _origin(links)), _SHOWN)


def _with_origin(shown: str, origin: Link | None) -> str:
    if origin is None:
        return shortened(shown, _ALONE)
    message = _one_line(origin.message)
    word = "while handling" if origin.how == "context" else "from"
    # Do not repeat a message: RuntimeError(f"no model: {error}").
    named = origin.exception if message and message in shown else origin.title(_ORIGIN)
    return f"{shortened(shown, _SHOWN)} ({word} {named})"


def frames_of(links: Sequence[Link]) -> str:
    """Return the frames of the exception that the headline names."""
    return next((link.frames for link in _exit(links)[1]), "")


def has_timed_out(link: Link) -> bool:
    """Tell whether a rank has given up waiting for others."""
    return bool(_GAVE_UP.search(link.message)) and _REACHED not in link.message


def is_secondary(link: Link) -> bool:
    """Tell whether an exception may be the consequence of another rank's end.

    Such are errors that only collectives raise, and connections that broke where ranks talk to each
    other: in torch or multiprocessing. In a download or a database driver it is the rank's own
    failure.
    """
    said = f"{link.exception}: {link.message}"
    if _OF_COLLECTIVES.search(said):
        return _OF_THE_CALL not in said
    return bool(_BROKEN.search(said) and _BETWEEN_RANKS.search(_raised_in(link.frames)))


def _raised_in(frames: str) -> str:
    """Return the file of the innermost frame outside socket.py, "" if there is none."""
    files = _FILE.findall(frames)
    return next((file for file in reversed(files) if not file.endswith("/socket.py")), "")


def _exit(links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Return the message of an exit ("" if none), and the exceptions that led to it."""
    links = [link for link in links if link.how != "hidden"]
    text = ""
    while links and links[0].exception in _EXITS:
        exit_ = links.pop(0)
        text = text or ("" if exit_.exception else _one_line(exit_.message))
    return text, links


def _origin(links: Sequence[Link]) -> Link | None:
    """Return the origin of the first of these: the last of the same kind; None if it is alone."""
    origin = None
    for link in links[1:]:
        if origin and link.how != origin.how:
            break
        if link.exception not in _EXITS:
            origin = link
    return origin


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _where(before: str) -> str:
    """Return where an exception that torch has wrapped was raised, "" if torch has not."""
    if before.startswith("Caught ") and before.endswith("Original"):
        return before.partition("\n")[0].partition(" ")[2].partition(" ")[2].rstrip(".")
    if before.startswith("-- Process ") and before.endswith("terminated with the following error:"):
        return f"in spawned process {before.split()[2]}"
    if before.startswith("CheckpointException: "):  # torch.distributed.checkpoint
        return f"on rank {before.split()[-1]}, in a checkpoint"
    if "On WorkerInfo(" in before:  # torch.distributed.rpc
        return f"on {before.partition('name=')[2].partition(')')[0]}"
    return ""


def _printed(message: str) -> tuple[str, list[Link]]:
    """Return the text before a traceback in a message, and that traceback's exceptions."""
    message = _OF_CHECKPOINT.sub(rf"CheckpointException: \1\n{_HEADER}", message)
    before, header, printed = message.partition(_HEADER)
    if not header or not (before[-1:] in ("", "\n") or before.endswith("Original ")):
        return message, []
    links: list[Link] = []
    # multiprocessing and concurrent.futures quote it like a long string of Python.
    pieces = _HEADERS.split(printed.rstrip().removesuffix('"""').removesuffix("'''"))
    # Each exception, and the line between it and the next one.
    for text, how in zip(pieces[::2], [*pieces[1::2], None]):
        frames, said = _PARTS.findall(text)[0]
        name, _, words = said.strip().partition(": ")
        if name:
            name, how = name.removeprefix("__mp_main__."), _BETWEEN.get(how or "", "cause")
            links.insert(0, Link(name, words, frames.rstrip("\n"), how))
    return before.strip(), links
