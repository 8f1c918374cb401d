"""Keeps one rank: starts, signals and reaps its script at the launcher's command.

It is a fork of the stub, which torchrun has started (stub.py), or of warm.py, in a session of its
own. It is the parent of the script's process, and nothing else signals or reaps that. It is a
subreaper: orphans of the script stay below it, and "nothing is left" is waitpid's ECHILD.

The launcher and the keeper talk in lines of JSON, in order:

    to the launcher                               from the launcher
    hello: rank, local_rank, group_rank,          run: environ, ignored, grace, log, shows,
        nproc                                         prefix, merges, bars
    runs: pid                                     end: number, signal_number, grace, waits,
    words: its last output, when it says              at_once
        why it ends, as its end may take long     ask: a request for the script's process,
    ended: exit_code, response, and what              or a signal for it
        clues.py says                             leave: an exit code
    cleared: number, survivors
    stub: number, of a signal that it got
    log: a line
    hangs_up: true, of the script's process

Lines of the script's process go to the launcher as they are, behind a colon; if the launcher is
slow, any of them but the reason of its end may be dropped. They, and all of its output, come before
`ended`. If the launcher is gone, the keeper ends the script, and leaves.

A keeper waits for nobody: its sockets do not block; it queues what the launcher does not read, and
bounds the queue of replies. Only at its script's end it waits for the console, for 1 s. It needs no
torch, no psutil, and none of our files except those next to it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # see lines.py
import _socket
import os
import select
import sys
import time

# Without importlib, which takes longer.
from _frozen_importlib_external import SourceFileLoader

from lines import PDEATHSIG, Lines, decoded, prctl, suppress  # type: ignore[import-not-found]
from output import NEVER, Console, Stream, open_file  # type: ignore[import-not-found]

TYPE_CHECKING = False  # typing takes 2 ms
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))

# As in errors.py, which is not to be imported here.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_STUCK_SECONDS = 5.0  # after the first SIGKILL, processes that still run are stuck in the kernel
_AGAIN_SECONDS = 0.2  # between two looks at leftovers, which may have forked
_LEFTOVERS_SECONDS = 5.0  # before a stop's deadline, leftovers of the script get SIGTERM
_CHILD_SUBREAPER = 36  # PR_SET_ of linux/prctl.h
_CONSOLE_SECONDS = 1.0  # for the console to take the last output at the script's end
# os.system() ignores these while it waits for its program.
_IGNORED_BY_SYSTEM = (signal.SIGINT, signal.SIGQUIT)


class Forked(BaseException):
    """Ends the keeper's loop in the fork that is to be the script.

    Its arguments are the script's environment, and the descriptor of its socket.
    """


class Script:
    """The script of one attempt: its process, its connection to us, and its output."""

    pid = group = 0  # of its process, while it runs; its process group, even later
    code = 126  # its exit code, once it has ended; 126: it could not be started
    signal, response = 0, ""  # that it got from us, and what it does at that
    has_said_end = False
    says: Lines | None = None
    file = -1

    def __init__(self, grace: float = 30.0, log: str = "") -> None:
        self.grace, self.log = grace, log
        self.streams: list[Stream] = []
        # Descriptors to close: ours at the end, its own once its process has been started.
        self.ours, self.its = list[int](), list[int]()

    def open(
        self, consoles: list[Console], *, shows: bool, prefix: str, merges: bool, bars: str
    ) -> tuple[int, int]:
        """Return its own stdout and stderr. Raises OSError.

        Its streams are pipes that we read, or a terminal. `shows`: the console shows them.
        `merges`: both are stdout. `bars`: the numbers of streams whose progress bars are shown
        unchanged, as on a terminal.
        """
        ours, its = _socket.socketpair()
        self.says = Lines(ours)
        self.its.append(its.detach())
        # One stream keeps the order of output to both.
        is_same = merges or os.path.samestat(os.fstat(1), os.fstat(2))
        writers: list[int] = []
        for number in (1,) if is_same else (1, 2):
            is_terminal = os.isatty(number)
            if is_terminal and shows and self.file < 0:
                writers.append(number)
                continue
            reader, writer = os.pipe()
            self.ours.append(reader)
            self.its.append(writer)
            writers.append(writer)
            console, has_bars = consoles[number - 1], is_terminal or str(number) in bars
            stream = Stream(reader, console, self.file, prefix.encode(), shows, has_bars)
            self.streams.append(stream)
        return writers[0], writers[-1]

    @property
    def died_of_a_stop(self) -> bool:
        """Whether a stop has ended it before it could save: a child of it may be able to.

        Python's own handler of SIGINT saves nothing.
        """
        saves = self.response == "handles" and self.signal != signal.SIGINT
        return not (self.pid or saves) and self.code in (-self.signal, -signal.SIGTERM)

    def clues(self, code: int) -> dict[str, Any]:
        """Return what explains an end with this code, once all of its output is read."""
        latest = sorted(self.streams, key=lambda stream: stream.read_at)
        tail = "".join(stream.tail.decode(errors="replace") for stream in latest)
        return {} if self.signal or not code else _clues(code, tail)

    def ended(self) -> dict[str, Any]:
        """Return the message about its end."""
        return {"exit_code": self.code, "response": self.response, **self.clues(self.code)}

    def close(self) -> None:
        """Close all of its files."""
        if self.says:
            self.says.close()
        close(self.ours)
        close(self.its)


class Keeper:
    """One rank's keeper. `stub` is a socket to its stub, which reads an exit code there.

    `environ` is torchrun's for the rank. Raises OSError if the launcher is gone.
    """

    def __init__(self, environ: dict[str, str], stub: int) -> None:
        self._environ, self._stub = environ, stub
        self._name = f"rank {environ['RANK']}"
        self._torchruns_stderr = environ.pop("LAUNCHER_STDERR", "")
        connection = _socket.socket(_socket.AF_UNIX)
        self._run_dir = environ.pop("LAUNCHER_RUN_DIR")
        connection.connect(f"{self._run_dir}/socket")
        self._launcher = Lines(connection)
        self._script = Script()
        self._consoles: list[Console] = []  # of stdout and stderr, once this has the launcher's
        self._has_children = False  # until waitpid says that nothing is left
        # The current end; when its next step, and its SIGKILL, are due.
        self._steps: Iterator[float] | None = None
        self._due = self._deadline = NEVER
        self._prepare()
        hello = {
            "rank": int(environ["RANK"]),
            "local_rank": int(environ["LOCAL_RANK"]),
            "group_rank": int(environ["GROUP_RANK"]),
            "nproc": int(environ["LOCAL_WORLD_SIZE"]),
        }
        self._launcher.send({"hello": hello})

    def _prepare(self) -> None:
        """Become a subreaper that no signal ends, and that wakes when a child ends.

        All signals but SIGCHLD are blocked, not ignored: so a fork has the default dispositions
        from its beginning.
        """
        prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
        blocked = signal.valid_signals() - {signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        self._woken, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def loop(self) -> None:
        """Obey the launcher until it says to leave, or until it is gone and nothing is left."""
        while True:
            ready = self._wait()
            now = time.monotonic()
            if self._woken in ready:
                os.read(self._woken, 4096)
            for stream in self._script.streams:
                if stream.reader in ready:
                    stream.read(now)
                if now >= stream.due:
                    stream.show_due(now)
                stream.console.write()
            self._relay()
            if self._stub in ready:
                self._hear_stub()
            self._take()
            if self._launcher.is_gone and not self._steps:
                self._end(0, signal.SIGTERM, self._script.grace, waits=False, at_once=False)
            if (self._reap() or time.monotonic() >= self._due) and self._steps:
                self._due = next(self._steps, NEVER)

    def _wait(self) -> set[int]:
        """Wait until something happens or is due; return the ready descriptors."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._stub >= 0:
            poll.register(self._stub, select.POLLIN)
        for link in (self._launcher, self._script.says):
            if link and not link.is_gone:
                poll.register(link, select.POLLIN | (select.POLLOUT if link.queue else 0))
        due = self._due
        for stream in self._script.streams:
            due = min(due, stream.due)
            if stream.is_read:
                poll.register(stream.reader, select.POLLIN)
            if stream.console.waiting:
                poll.register(stream.console.descriptor, select.POLLOUT)
        seconds = max(0.0, due - time.monotonic())
        return {found for found, _ in poll.poll(None if due == NEVER else seconds * 1000 + 1)}

    def _hear_stub(self) -> None:
        """Report a signal to the stub, or that it was killed."""
        number = b""
        with suppress(OSError):  # it had not read all
            number = os.read(self._stub, 1)
        if not number:
            os.close(self._stub)
            self._stub = -1
        self._launcher.send({"stub": {"number": number[0] if number else int(signal.SIGKILL)}})

    # The launcher's commands.

    def _take(self) -> None:
        """Read and obey the launcher's commands."""
        lines, stderr = self._launcher.read()
        for message in map(decoded, lines):
            if "run" in message:
                self._use(stderr)
                self._run(**message["run"])
            elif "end" in message:
                self._end(**message["end"])
            elif "leave" in message:
                self._leave(message["leave"])
            elif self._script.says:
                self._ask(self._script.says, message["ask"])

    def _use(self, stderr: int) -> None:
        """Use the launcher's stderr instead of torchrun's, unless the user has redirected that."""
        if stderr >= 0:
            seen = os.fstat(2)
            if f"{seen.st_dev}:{seen.st_ino}" == self._torchruns_stderr:
                os.dup2(stderr, 2)
            os.close(stderr)

    def _run(
        self, environ: dict[str, str | None], ignored: list[int], grace: float, log: str, **how: Any
    ) -> None:
        """Start the script for an attempt; it ignores some of WARNINGS. See Script.open."""
        self._script.close()
        script = self._script = Script(grace, log)
        self._consoles = self._consoles or [Console(1), Console(2)]
        try:
            script.file = open_file(log) if log else -1
            script.ours += [script.file] * bool(log)
        except OSError as error:
            self._log(f"cannot write {log} ({error.strerror}); the job continues without it.")
        try:
            stdout, stderr = script.open(self._consoles, **how)
            script.pid = script.group = self._fork(stdout, stderr, ignored)
        except OSError as error:  # too many processes or open files
            why = f"({error.strerror}); raise ulimit -u, or ulimit -n"
            self._log(f"{self._name} cannot be started {why}.")
            script.close()  # nobody is there who could say anything
            self._script = Script(grace)
            self._launcher.send({"ended": script.ended()})
            return
        if not script.pid:
            says = script.its.pop(0)
            merged = {**self._environ, **environ, "LAUNCHER_KEEPER": str(says)}
            raise Forked({name: text for name, text in merged.items() if text is not None}, says)
        close(script.its)
        self._has_children = True
        self._launcher.send({"runs": {"pid": script.pid}})

    def _fork(self, stdout: int, stderr: int, ignored: list[int]) -> int:
        """Fork; the fork is like a child of torchrun's in its session, streams and signals.

        The kernel sends it SIGTERM if the keeper is killed. Raises OSError.
        """
        keeper = os.getpid()
        if pid := os.fork():
            return pid
        os.setsid()
        prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(128 + signal.SIGTERM)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, *WARNINGS):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return 0

    def _ask(self, says: Lines, request: dict[str, Any]) -> None:
        """Forward a request; or, at a signal that it handles, have the script write where it is."""
        number, script = request.get("signal", 0), self._script
        if not number:
            says.send(request, is_droppable=True)
        elif script.pid and response(script.pid, number) == "handles":
            send(script.pid, number)

    def _end(
        self, number: int, signal_number: int, grace: float, waits: bool, at_once: bool
    ) -> None:
        """End all: the script gets the signal, once, and its leftovers get SIGTERM later.

        `waits`: a stop, which gives leftovers until near the deadline. The deadline of an end that
        is under way can only become later, except for an end that is `at_once`.
        """
        now = time.monotonic()
        deadline = now if at_once else now + grace
        if self._steps and not at_once:
            deadline = max(deadline, self._deadline)
        # If it is no stop, a moment later: multiprocessing's helpers end by themselves.
        before = min(_LEFTOVERS_SECONDS, grace / 4)
        leftovers_at = deadline - before if waits else now + _AGAIN_SECONDS
        self._deadline = deadline
        self._steps = self._ending(number, signal_number, waits, leftovers_at)
        self._due = next(self._steps, NEVER)

    def _ending(self, number: int, stop: int, waits: bool, leftovers_at: float) -> Iterator[float]:
        """End the rank in steps; yield when the next one is due, if no process ends before.

        While the script runs, only its end is waited for. Then, from `leftovers_at` on, each of its
        leftovers is logged, and gets SIGTERM. At the deadline all are killed, repeatedly.
        """
        script, deadline, signalled = self._script, self._deadline, set[int]()
        did_run = script.pid
        # A script that has reported its end gets no signal, except at a stop: it is ending.
        if script.pid and not script.signal and (waits or not script.has_said_end):
            script.signal, script.response = stop, response(script.pid, stop)
            send(script.pid, stop)
            if waits and script.response == "ignores" and stop in _IGNORED_BY_SYSTEM:
                self._signal_group()
        while script.pid and time.monotonic() < deadline:
            yield deadline
        if did_run and waits and script.died_of_a_stop:
            signalled = self._signal_group()
        while self._has_children and (now := time.monotonic()) < deadline:
            pids = [pid for pid in below(os.getpid()) if pid not in signalled]
            if now >= leftovers_at:
                signalled.update(pids)
                for pid in pids:
                    self._log(f"stopping process {pid}, which {self._name} left running.")
                    send(pid, signal.SIGTERM)
            yield leftovers_at if now < leftovers_at else min(now + _AGAIN_SECONDS, deadline)
        stuck_at = time.monotonic() + _STUCK_SECONDS
        while self._has_children and (now := time.monotonic()) < stuck_at:
            for pid in below(os.getpid()):
                send(pid, signal.SIGKILL)
            yield now + _AGAIN_SECONDS
        # A debugger may hold a process that has ended.
        survivors = (len(below(os.getpid())) or 1) if self._has_children else 0
        self._finish_streams()
        self._steps = None
        self._launcher.send({"cleared": {"number": number, "survivors": survivors}})
        if self._launcher.is_gone:
            import shutil  # takes long

            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._leave(1)

    def _signal_group(self) -> set[int]:
        """Send the stop to the script's children in its group; return who has had SIGTERM."""
        script, found = self._script, set[int]()
        for pid in below(os.getpid()):
            with suppress(OSError):
                if pid != script.pid and os.getpgid(pid) == script.group:
                    os.kill(pid, script.signal)
                    found.add(pid)
        return found if script.signal == signal.SIGTERM else set()

    def _leave(self, code: int) -> NoReturn:
        """Exit, and have the stub exit with a code."""
        for pid in below(os.getpid()):
            send(pid, signal.SIGKILL)
        with suppress(OSError):  # torchrun has killed it
            os.write(self._stub, bytes([code]))
        os._exit(0)

    # Events of the script.

    def _relay(self, *, to_the_end: bool = False) -> None:
        """Pass on the lines of the script's process."""
        says, script = self._script.says, self._script
        if not says:
            return
        for line in says.read()[0]:
            if is_end := line.startswith(b'{"end"'):
                script.has_said_end = True
                for stream in script.streams:  # its last output came before, perhaps just now
                    stream.read(time.monotonic())
                self._launcher.send({"words": script.clues(1).get("words", "")})
            self._launcher.pass_on(b":" + line, is_droppable=not is_end)
        if says.is_gone or to_the_end:
            says.close()
            script.says = None
            self._launcher.send({"hangs_up": True})

    def _reap(self) -> bool:
        """Reap all ended processes, and report the script's end; return whether there were any."""
        has_reaped = False
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                has_reaped = True
                if ended[0] == self._script.pid:
                    self._script_ended(os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            self._has_children = False
        return has_reaped

    def _script_ended(self, code: int) -> None:
        """Report how the script's process has ended, after its messages and output."""
        self._relay(to_the_end=True)
        self._script.pid, self._script.code = 0, code
        self._finish_streams()
        self._launcher.send({"ended": self._script.ended()})

    def _finish_streams(self) -> None:
        """Write the last output to the console, for a moment; log how much it did not take."""
        deadline = time.monotonic() + _CONSOLE_SECONDS
        count = sum(stream.finish(deadline) for stream in self._script.streams)
        if count:
            whose = f"{count} bytes of {self._name}'s output"
            where = f"; {self._script.log} has them" if self._script.file >= 0 else ""
            self._log(f"{whose} are not shown here, because the console is slow{where}.")

    def _log(self, line: str) -> None:
        """Have the launcher log a line."""
        self._launcher.send({"log": line})

    def close(self) -> None:
        """Close its ends of all connections, in a fork that becomes the script."""
        self._launcher.close()
        self._script.close()


def _clues(code: int, output: str) -> dict[str, Any]:
    """Return what may explain a process's end.

    clues.py needs modules that no keeper needs at its start, and that no script may find.
    """
    clues: Any = type(sys)("clues")
    try:
        SourceFileLoader("clues", os.path.join(HERE, "clues.py")).exec_module(clues)
        return dict(clues.of_process(code, output))
    except Exception:  # report nothing that could not be read
        return {}


def close(descriptors: list[int]) -> None:
    """Close descriptors, and forget them."""
    while descriptors:
        os.close(descriptors.pop())


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
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            # The state is the main thread's, which may end before others; 17: how many there are.
            has_ended = fields[0] in (b"Z", b"X") and int(fields[17]) < 2
            children.setdefault(int(fields[1]), []).append((int(name), has_ended))
    found, parents = [], [top]
    while parents:
        of = children.pop(parents.pop(), [])
        parents += [pid for pid, _ in of]
        found += [pid for pid, has_ended in of if not has_ended]
    return found


def keep(environ: dict[str, str], stub: int) -> tuple[dict[str, str], int]:
    """Keep a stub's rank; return, in each fork that is to be the script, what Forked has."""
    os.setsid()
    try:
        keeper = Keeper(environ, stub)
    except OSError as error:  # the launcher is gone, or this rank's limits are reached
        os.write(2, f"launcher: a rank cannot reach its launcher ({error}).\n".encode())
        os._exit(1)
    try:
        keeper.loop()
    except Forked as forked:
        environ, says = forked.args
    keeper.close()
    return environ, says


def execute(words: list[str], environ: dict[str, str], says: int) -> NoReturn:
    """Become the script in a new Python."""
    python = environ.get("PYTHON_EXEC", sys.executable)
    try:
        os.set_inheritable(says, True)
        os.execvpe(python, [python, "-u", os.path.join(HERE, "rank.py"), *words], environ)
    except OSError as error:
        os.write(2, f"launcher: cannot execute {python} ({error.strerror}).\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
