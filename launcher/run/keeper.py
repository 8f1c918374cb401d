"""Keeps one rank: starts, signals and reaps its script at the launcher's command.

It is a fork of the stub, which torchrun has started (stub.py), in a session of its own. It is the
parent of the script's process, and nothing else signals or reaps that. It is a subreaper: orphans
of the script stay below it, and "nothing is left" is waitpid's ECHILD.

The launcher and the keeper talk in lines of JSON, in order:

    to the launcher                               from the launcher
    hello: rank, local_rank, group_rank,          run: attempt, environ, grace, ignored, log,
        nproc, pid                                    output: shows, prefix, merges, bars
    runs: attempt, pid                            end: number, signal, grace, waits, at_once
    said: what the script's process says          ask: passed on to the script's process
    wrote: a line of faulthandler's               leave: an exit code
    left: pids, seconds; ending: pids
    ended: attempt, code, response, crash, and what clues.py says
    cleared: number, survivors
    lost: what was killed
    log: a line

If the launcher is gone, the keeper ends the script, and then leaves with 1. The script's messages
go through the keeper, which reads all of them before it reports the end of the process.

A keeper never blocks: its sockets do not; it queues what the launcher does not read, and bounds the
queue of replies. It needs no torch, no psutil, and none of our files except those next to it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket
import ctypes
import os
import select
import sys
import time

from lines import Link, decoded, suppress  # type: ignore[import-not-found]  # beside this file
from output import (  # type: ignore[import-not-found]  # beside this file
    NEVER,
    READ,
    Console,
    Stream,
    open_file,
)

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from typing import Any, Callable, NoReturn

    # start(words, environ, descriptors, ignored): the pid of the script's process. The descriptors
    # are its stdout, stderr, socket and crash file; ignored are the numbers of WARNINGS that it
    # ignores.
    Start = Callable[[list[str], dict[str, str], list[int], list[int]], int]

HERE = os.path.dirname(os.path.abspath(__file__))

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_STUCK_SECONDS = 5.0  # after the first SIGKILL, processes that still run are stuck in the kernel
_AGAIN_SECONDS = 0.2  # between two kills of leftovers, which may have forked
_LEFTOVERS_SECONDS = 5.0  # before a stop's deadline, leftovers of the script get SIGTERM
_CONSOLE_SECONDS = 1.0  # for the console to take the last output at the script's end
_PRCTL = ctypes.CDLL(None).prctl
NO_CLUES = {"words": "", "notes": [], "counted": [], "broken": ""}
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # PR_SET_ of linux/prctl.h


class Keeper:
    """One rank's keeper; its stub reads an exit code from the other end of `stub`.

    `environ` is torchrun's for the rank. Raises OSError if the launcher is gone.
    """

    def __init__(self, start: Start, words: list[str], environ: dict[str, str], stub: int) -> None:
        self._start, self._words, self._environ, self._stub = start, words, environ, stub
        connection = _socket.socket(_socket.AF_UNIX)
        self._run_dir = environ.pop("LAUNCHER_RUN_DIR")
        run_dir = os.open(self._run_dir, os.O_PATH)
        connection.connect(f"/proc/self/fd/{run_dir}/socket")  # the folder's path may be too long
        os.close(run_dir)
        self._launcher = Link(connection)
        self._torchruns_stderr = environ.pop("LAUNCHER_STDERR", "")
        # Of this attempt.
        self._attempt, self._grace, self._log = 0, 30.0, ""
        self._script = self._group = 0  # the script's process; its group, even after its end
        self._says: Link | None = None
        self._streams: list[Stream] = []
        self._file = self._crash = -1
        self._has_said_end = False
        self._signal, self._response = 0, ""  # sent to the script; what the script does at that
        # Of the current end.
        self._number, self._is_ending, self._waits = 0, False, False
        self._deadline = self._leftovers_at = self._kill_at = self._stuck_at = NEVER
        self._signalled: set[int] = set()
        self._has_told_left = False
        self._woken = self._prepare()
        # With --virtual-local-rank LOCAL_RANK is 0 in all; this file's folder has the true one.
        folder = os.path.basename(os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", "")))
        names = {"rank": "RANK", "nproc": "LOCAL_WORLD_SIZE"}
        hello = {name: int(environ[variable]) for name, variable in names.items()}
        local_rank = int(folder if folder.isdecimal() else environ["LOCAL_RANK"])
        hello |= {"local_rank": local_rank, "group_rank": int(environ["GROUP_RANK"])}
        self._launcher.send({"hello": {**hello, "pid": os.getpid()}})

    def _prepare(self) -> int:
        """Become a subreaper that no signal ends; return a descriptor that shows ended children."""
        adopt_orphans()
        woken, writer = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (*STOPS, *WARNINGS, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        return woken

    def loop(self) -> NoReturn:
        """Obey the launcher until it says to leave, or until it is gone and nothing is left."""
        while True:
            ready = self._wait()
            now = time.monotonic()
            if self._woken in ready:
                os.read(self._woken, 4096)
            for stream in self._streams:
                if stream.reader in ready:
                    stream.read(now)
                if now >= stream.due:
                    stream.show_due(now)
                stream.console.write()
            if self._says and self._says.socket.fileno() in ready:
                self._relay()
            if self._stub in ready:
                self._lose_stub()
            if self._launcher.socket.fileno() in ready:
                self._launcher.flush()
                self._take()
            self._reap()
            if self._launcher.is_gone and not self._is_ending:
                self._end(0, signal.SIGTERM, self._grace)
            if self._is_ending:
                self._do_what_is_due(time.monotonic())

    def _wait(self) -> set[int]:
        """Wait until something happens or is due; return the ready descriptors."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._stub >= 0:
            poll.register(self._stub, 0)  # POLLERR: it has no reader any more
        for link in (self._launcher, self._says):
            if link and not link.is_gone:
                poll.register(link.socket, select.POLLIN | (select.POLLOUT if link.queue else 0))
        dues = [self._kill_at, NEVER if self._script else self._leftovers_at]
        for stream in self._streams:
            dues.append(stream.due)
            if stream.is_read:
                poll.register(stream.reader, select.POLLIN)
            if stream.console.waiting:
                poll.register(stream.console.descriptor, select.POLLOUT)
        seconds = max(0.0, min(dues) - time.monotonic())
        return {found for found, _ in poll.poll(None if seconds == NEVER else seconds * 1000 + 1)}

    def hang_up(self) -> None:
        """Close its sockets, in a fork that becomes the script."""
        self._launcher.socket.close()
        if self._says:
            self._says.socket.close()
        for stream in self._streams:
            stream.console.close()

    def _lose_stub(self) -> None:
        os.close(self._stub)
        self._stub = -1
        self._launcher.send({"lost": "its process below torchrun"})

    # The launcher's commands.

    def _take(self) -> None:
        """Read and obey the launcher's commands."""
        lines, stderr = self._launcher.read()
        for message in map(decoded, lines):
            if "run" in message:
                self._run(message["run"], stderr)
            elif "end" in message:
                self._end(**message["end"])
            elif "leave" in message:
                self._leave(message["leave"])
            elif self._says:
                self._ask(self._says, message["ask"])

    def _run(self, start: dict[str, Any], stderr: int) -> None:
        """Start the script for an attempt."""
        self._attempt, self._grace, self._log = start["attempt"], start["grace"], start["log"]
        self._has_said_end, self._is_ending = False, False
        self._signal, self._response = 0, ""
        self._close()
        self._use(stderr)
        try:
            self._script = self._group = self._start_script(start)
        except OSError as error:  # too many processes or open files
            self._cannot_start(error)
        else:
            self._launcher.send({"runs": {"attempt": self._attempt, "pid": self._script}})

    def _start_script(self, start: dict[str, Any]) -> int:
        """Return the pid of the script's process. Raises OSError."""
        ours, its = _socket.socketpair()
        self._says = Link(ours)
        stdout, stderr = self._open_streams(**start["output"])
        self._crash = _file_in_memory(self._run_dir)
        environ = {**self._environ, **start["environ"]}
        environ = {name: value for name, value in environ.items() if value is not None}
        descriptors = [stdout, stderr, its.detach(), self._crash]
        environ["LAUNCHER_KEEPER"] = f"{descriptors[2]},{self._crash}"
        try:
            pid = self._start(self._words, environ, descriptors, start["ignored"])
        except OSError:
            self._hand_over(descriptors[2])
            raise
        self._hand_over(descriptors[2])
        return pid

    def _hand_over(self, its: int) -> None:
        """Close the descriptors that only the script uses."""
        os.close(its)
        for stream in self._streams:
            os.close(stream.writer)

    def _cannot_start(self, error: OSError) -> None:
        """Log it, and report that the rank has failed."""
        if self._says:  # nobody is there who could say anything
            self._says.socket.close()
            self._says = None
        rank = self._environ["RANK"]
        line = f"rank {rank} cannot be started ({error.strerror}); raise ulimit -u, or ulimit -n."
        self._launcher.send({"log": line})
        ended = {"attempt": self._attempt, "code": 126, "response": "", "crash": ""}
        self._launcher.send({"ended": {**ended, **NO_CLUES}})

    def _use(self, stderr: int) -> None:
        """Use the launcher's stderr instead of torchrun's, unless the user has redirected that."""
        if stderr >= 0:
            seen = os.fstat(2)
            if f"{seen.st_dev}:{seen.st_ino}" == self._torchruns_stderr:
                os.dup2(stderr, 2)
            os.close(stderr)

    def _open_streams(
        self, *, shows: bool, prefix: str, merges: bool, bars: str
    ) -> tuple[int, int]:
        """Return the script's stdout and stderr: pipes that we read, or a terminal.

        `shows`: the console shows them. `merges`: both are stdout. `bars`: the numbers of streams
        whose progress bars are shown unchanged, as on a terminal.
        """
        if self._log:
            try:
                self._file = open_file(self._log)
            except OSError as error:
                why = f"cannot write {self._log} ({error.strerror})"
                self._launcher.send({"log": f"{why}; the job continues without it."})
        writers: list[int] = []
        for number in (1, 2):
            is_terminal = os.isatty(number)
            is_same = merges or os.path.samestat(os.fstat(1), os.fstat(2))
            if is_terminal and shows and self._file < 0:
                writers.append(number)
            elif writers and is_same:  # keep the order of output to both
                writers.append(writers[0])
            else:
                stream = Stream(Console(number), self._file, prefix.encode())
                stream.shows, stream.has_bars = shows, is_terminal or str(number) in bars
                self._streams.append(stream)
                writers.append(stream.writer)
        return writers[0], writers[1]

    def _close(self) -> None:
        """Close the previous attempt's files."""
        for stream in self._streams:
            stream.close()
            stream.console.close()
        self._streams = []
        for descriptor in (self._file, self._crash):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._crash = -1

    def _ask(self, says: Link, request: dict[str, Any]) -> None:
        """Forward a request; or, at a signal that it handles, have the script write where it is."""
        number = request.get("signal", 0)
        if not number:
            says.send(request, is_droppable=True)
        elif self._script and response(self._script, number) == "handles":
            send(self._script, number)

    def _end(
        self, number: int, signal: int, grace: float, waits: bool = False, at_once: bool = False
    ) -> None:
        """End all: the script gets the signal, once, and its leftovers get SIGTERM later.

        `waits`: a stop, which gives leftovers until near the deadline. The deadline of an end that
        is under way can only become later, except for an end that is `at_once`.
        """
        now = time.monotonic()
        deadline = now if at_once else now + grace
        if self._is_ending and not at_once:
            deadline = max(deadline, self._deadline)
        self._number, self._is_ending, self._waits = number, True, waits
        self._deadline = self._kill_at = deadline
        self._stuck_at = NEVER
        # Otherwise a moment later: multiprocessing's helpers end by themselves.
        before = min(_LEFTOVERS_SECONDS, grace / 4)
        self._leftovers_at = deadline - before if waits else now + _AGAIN_SECONDS
        self._signalled, self._has_told_left = set(), False
        # A script that has reported its end may finish it, except at a stop.
        if self._script and not self._signal and (waits or not self._has_said_end):
            self._signal, self._response = signal, response(self._script, signal)
            send(self._script, signal)
            if waits and self._response == "ignores" and signal in (2, 3):
                self._signal_group()  # os.system() ignores stops while it waits for its program

    def _signal_group(self) -> None:
        """Send the stop to the script's children in its process group."""
        for pid in below(os.getpid()):
            with suppress(OSError):
                if pid != self._script and os.getpgid(pid) == self._group:
                    os.kill(pid, self._signal)
                    if self._signal == signal.SIGTERM:  # SIGTERM is sent once
                        self._signalled.add(pid)

    def _leave(self, code: int) -> NoReturn:
        """Exit, and have the stub exit with a code."""
        for pid in below(os.getpid()):
            send(pid, signal.SIGKILL)
        with suppress(OSError):  # torchrun has killed it
            os.write(self._stub, bytes([code]))
        os._exit(0)

    # Events of the script.

    def _relay(self, *, to_the_end: bool = False) -> None:
        """Forward the messages of the script's process."""
        says = self._says
        if says is None:
            return
        says.flush()
        for line in says.read()[0]:
            if not line.startswith(b"{"):
                text = line.decode("utf-8", "backslashreplace")
                self._launcher.send({"wrote": text}, is_droppable=True)
                continue
            with suppress(ValueError, RecursionError):  # no launcher code writes such lines
                message = decoded(line)
                is_end = "end" in message
                self._has_said_end |= is_end
                self._launcher.send({"said": message}, is_droppable=not is_end)
        if says.is_gone or to_the_end:
            says.socket.close()
            self._says = None
            self._launcher.send({"said": {"hangs_up": True}})

    def _reap(self) -> None:
        """Reap all ended processes; send the script's messages and output before its end."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._script:
                    self._script_ended(os.waitstatus_to_exitcode(status))
        except ChildProcessError:  # nothing is left
            if self._is_ending:
                self._clear(0)

    def _script_ended(self, code: int) -> None:
        """Report how the script's process has ended, after its messages and output."""
        self._relay(to_the_end=True)
        self._script = 0
        self._finish_streams()
        latest = sorted(self._streams, key=lambda stream: stream.read_at)
        tail = "".join(stream.tail.decode(errors="replace") for stream in latest)
        size = os.fstat(self._crash).st_size
        crash = os.pread(self._crash, READ, max(0, size - READ)).decode(errors="replace")
        ended = {"attempt": self._attempt, "code": code, "response": self._response}
        ended["crash"] = crash if code < 0 else ""
        ended |= NO_CLUES if self._signal or not code else _clues(code, tail)
        self._launcher.send({"ended": ended})
        # It died without saving, and may have started a process that can save. Python's own handler
        # of SIGINT saves nothing.
        has_died = code in (-self._signal, -signal.SIGTERM) and self._waits and self._is_ending
        if has_died and (self._response != "handles" or self._signal == signal.SIGINT):
            self._signal_group()

    def _finish_streams(self) -> None:
        """Write the last output to the console, for a moment; log how much it did not take."""
        deadline = time.monotonic() + _CONSOLE_SECONDS
        count = sum(stream.finish(deadline) for stream in self._streams)
        if count:
            whose = f"{count} bytes of rank {self._environ['RANK']}'s output"
            where = f"; {self._log} has them" if self._file >= 0 else ""
            line = f"{whose} are not shown here, because the console is slow{where}."
            self._launcher.send({"log": line})

    # What is due.

    def _do_what_is_due(self, now: float) -> None:
        """End the script's leftovers; at the deadline kill everything, repeatedly."""
        is_due = now >= self._leftovers_at or not self._has_told_left
        if not self._script and now < self._deadline and is_due:
            self._end_leftovers(now)
        if now < self._kill_at:
            return
        left = below(os.getpid())
        self._stuck_at = min(self._stuck_at, now + _STUCK_SECONDS)
        self._kill_at, self._leftovers_at = now + _AGAIN_SECONDS, NEVER
        for pid in left:
            send(pid, signal.SIGKILL)
        if now >= self._stuck_at:
            self._clear(len(left) or 1)  # a debugger holds an ended process

    def _end_leftovers(self, now: float) -> None:
        """Report the script's leftovers; when it is time, send each of them SIGTERM."""
        pids = [pid for pid in below(os.getpid()) if pid not in self._signalled]
        is_time, self._has_told_left = now >= self._leftovers_at, True
        if is_time:
            self._leftovers_at = now + _AGAIN_SECONDS
            self._signalled.update(pids)
        if pids and is_time:
            self._launcher.send({"ending": {"pids": pids}})
            for pid in pids:
                send(pid, signal.SIGTERM)
        elif pids and self._waits:
            self._launcher.send({"left": {"pids": pids, "seconds": self._deadline - now}})

    def _clear(self, survivors: int) -> None:
        """Report that nothing is left, except processes stuck in the kernel."""
        self._finish_streams()
        self._is_ending = False
        self._deadline = self._leftovers_at = self._kill_at = self._stuck_at = NEVER
        self._launcher.send({"cleared": {"number": self._number, "survivors": survivors}})
        if self._launcher.is_gone:
            self._leave(1)


def _clues(code: int, output: str) -> dict[str, Any]:
    """Return what may explain a process's end (clues.py).

    Import that only here: it needs modules that no keeper needs at its start.
    """
    sys.path.insert(0, HERE)
    try:
        import clues  # type: ignore[import-not-found]  # beside this file

        found: dict[str, Any] = clues.of_process(code, output)
        return found
    except Exception:  # report nothing that could not be read
        return NO_CLUES
    finally:
        sys.path.remove(HERE)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, which may be gone, or another user's."""
    with suppress(OSError):
        os.kill(pid, number)


def response(pid: int, number: int) -> str:
    """Return what a process does at a signal, by proc(5): ignores, handles, or default."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            for field, text in ((b"SigIgn:", "ignores"), (b"SigCgt:", "handles")):
                if line.startswith(field) and int(line.split()[1], 16) >> (number - 1) & 1:
                    return text
    return "default"


def below(top: int) -> list[int]:
    """Return the pids of all processes below a process that have not ended."""
    children: dict[int, list[tuple[int, bytes]]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append((int(name), state))
    found, parents = [], [top]
    while parents:
        of = children.pop(parents.pop(), [])
        parents += [pid for pid, _ in of]
        found += [pid for pid, state in of if state not in (b"Z", b"X")]
    return found


def fork(descriptors: list[int], ignored: list[int]) -> int:
    """Fork; the fork is like a child of torchrun's in its session, streams and signals.

    A stop that arrives before then stays blocked until its dispositions are set. Raises OSError.
    """
    keeper, pid = os.getpid(), -1
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    for number in STOPS:  # the disposition may be read at once
        signal.signal(number, signal.SIG_DFL)
    try:
        pid = os.fork()
    finally:
        if pid == 0:
            _be_child(keeper, descriptors, ignored)
        else:
            for number in STOPS:  # this drops stops that arrived meanwhile
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _be_child(keeper: int, descriptors: list[int], ignored: list[int]) -> None:
    """Become such a fork. The kernel sends it SIGTERM if the keeper is killed."""
    os.setsid()
    _PRCTL(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(128 + signal.SIGTERM)
    signal.set_wakeup_fd(-1)
    for number in (*STOPS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    os.dup2(descriptors[0], 1)
    os.dup2(descriptors[1], 2)


def execute(
    words: list[str], environ: dict[str, str], descriptors: list[int], ignored: list[int]
) -> int:
    """Start the script in a new Python, as Start has it."""
    if pid := fork(descriptors, ignored):
        return pid
    python = environ.get("PYTHON_EXEC", sys.executable)
    try:
        for descriptor in descriptors[2:]:
            os.set_inheritable(descriptor, True)
        os.execvpe(python, [python, "-u", os.path.join(HERE, "rank.py"), *words], environ)
    except OSError as error:
        os.write(2, f"launcher: cannot execute {python} ({error.strerror}).\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _file_in_memory(folder: str) -> int:
    """Return a descriptor for faulthandler to write to; conda's Python needs a file for that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("crash")
    path = os.path.join(folder, f"crash-{os.getpid()}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(path)
    return descriptor


def adopt_orphans() -> None:
    """Become the parent of the orphans of this process's children (a subreaper)."""
    _PRCTL(_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(grace: float) -> NoReturn:
    """In the stub of a killed keeper: end the keeper's leftovers.

    The kernel has sent the script SIGTERM; processes that outlive the grace are killed.
    """
    deadline = time.monotonic() + grace
    with suppress(ChildProcessError):
        while (now := time.monotonic()) < deadline + _STUCK_SECONDS:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in below(os.getpid()) if now >= deadline else ():
                send(pid, signal.SIGKILL)
            time.sleep(0.05)
    os._exit(1)


def main(stub: int) -> NoReturn:
    """Run the keeper of a stub's rank."""
    os.setsid()
    try:
        keeper = Keeper(execute, sys.argv[1:], dict(os.environ), stub)
    except OSError as error:  # the launcher is gone, or this rank's limits are reached
        os.write(2, f"launcher: a rank cannot reach its launcher ({error}).\n".encode())
        os._exit(1)
    keeper.loop()
