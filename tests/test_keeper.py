"""The stub and the keeper of a rank as torchrun starts them, without torchrun or torch."""

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import threading

import psutil
import pytest
from conftest import REPO, has_ended, poll

with pytest.MonkeyPatch.context() as patch:  # as a keeper imports it
    patch.syspath_prepend(str(REPO / "launcher" / "run"))
    lines = importlib.import_module("lines")

STUB = str(REPO / "launcher" / "run" / "stub.py")
RUN = {"environ": {}, "grace": 30.0, "ignored": [], "log": ""}
RUN |= {"shows": True, "prefix": "", "merges": False, "bars": ""}
SECONDS = 60.0  # for anything to happen
LONG = 3600.0  # a grace that never ends
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Kept:
    """A stub with its keeper, and the launcher's end of its connection."""

    def __init__(self, process, connection):
        self.process, self.connection = process, connection
        connection.settimeout(SECONDS)
        self.lines = connection.makefile("rb")
        self.told = []  # all messages
        self.wait("hello")
        (keeper,) = psutil.Process(process.pid).children()
        self.pid = keeper.pid

    def send(self, **message):
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def run(self, **options):
        """Have the script run; return the pid of its process."""
        self.send(run={**RUN, **options})
        return self.wait("runs")["pid"]

    def end(self, number=1, signal=TERM, grace=LONG, **how):
        how = {"waits": False, "at_once": False, **how}
        self.send(end={"number": number, "signal_number": signal, "grace": grace, **how})

    def clears(self, number=1, **how):
        """Have it end; see that nothing is left."""
        self.end(number, **how)
        assert self.wait("cleared") == {"number": number, "survivors": 0}

    def kill(self, number):
        self.clears(number, at_once=True, grace=0)

    def wait(self, name):
        """Return what the next message of this name says."""
        while True:
            line = self.lines.readline()
            assert line, self.told
            said = line.startswith(b":")  # by the script's process
            self.told.append({"said": line[1:]} if said else json.loads(line))
            if name in self.told[-1]:
                return self.told[-1][name]

    @property
    def left(self):
        """The pids of what the script has left, daemons included."""
        return [one.pid for one in psutil.Process(self.pid).children(recursive=True)]

    def close(self):
        self.lines.close()
        self.connection.close()

    def leave(self, code=0):
        """Have both leave; return the stub's exit code."""
        self.send(leave=code)
        return self.process.wait(SECONDS)


def ignore_warnings():
    """As torchrun does, by the launcher's will, and all that it starts."""
    for number in (USR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture
def start(script, tmp_path):
    """Start a script's stub: start(text) -> Kept; its output is in the files out and err."""
    folder = os.path.join(os.environ["TMPDIR"], "job")
    os.mkdir(folder)
    started = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.path.join(folder, "socket"))
        listener.listen()
        listener.settimeout(SECONDS)

        def start(text, rank=0, stdout=None, stderr=None, **environ):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
            names |= {"GROUP_RANK": 0, "LAUNCHER_RUN_DIR": folder, "KEPT_IN": folder, **environ}
            out = stdout or stack.enter_context(open(tmp_path / "out", "ab"))
            err = stderr or stack.enter_context(open(tmp_path / "err", "ab"))
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", STUB, "script", str(script(text))],
                env={**os.environ, **{name: str(value) for name, value in names.items()}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=ignore_warnings,
            )
            started.append(process)
            connection, _ = listener.accept()
            started.append(Kept(process, connection))
            return started[-1]

        yield start
        for one in processes(folder):
            with contextlib.suppress(psutil.Error):
                one.kill()
        for one in started:
            one.close() if isinstance(one, Kept) else one.wait(SECONDS)


def processes(folder):
    """Return all processes that a stub of this test has started, and that run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("KEPT_IN") == folder
            found += [process] * (is_ours and process.status() != psutil.STATUS_ZOMBIE)
    return found


def nothing_is_left():
    return not processes(os.path.join(os.environ["TMPDIR"], "job"))


def printed(line, file="out", count=1):
    """Wait until the scripts have printed a line so often."""

    def is_there():
        with open(file) as text:
            return text.read().splitlines().count(line) >= count

    poll(is_there, SECONDS, every=0.02)


# Runs, and ends.


def test_a_script_runs_for_each_attempt_and_the_stub_ends_as_the_launcher_says(start):
    kept = start(
        "import os, sys\n"
        "print([os.environ.get(name) for name in ('ATTEMPT', 'GONE', 'STAYS')])\n"
        "print('own', os.getpid(), os.getpgrp(), os.getsid(0))\n"
        "sys.exit(int(os.environ['ATTEMPT']))\n",
        **{"GONE": "1", "STAYS": "1"},
    )
    for attempt in (1, 2):
        environ = {"ATTEMPT": str(attempt), "GONE": None}
        pid = kept.run(environ=environ)
        ended = kept.wait("ended")
        assert ended == {**ended, "exit_code": attempt, "response": ""}
        kept.clears(attempt)
        printed(f"['{attempt}', None, '1']")
        printed(f"own {pid} {pid} {pid}")
    names = [next(iter(one)) for one in kept.told]
    assert names == ["hello", *["runs", "words", "said", "hangs_up", "ended", "cleared"] * 2]
    assert kept.leave(42) == 42
    poll(nothing_is_left)


def test_a_script_that_cannot_be_started_is_said_once_and_leaves_no_file_open(start):
    kept = start("")
    count = len(os.listdir(f"/proc/{kept.pid}/fd"))
    for more in range(6):  # two for its connection, two for each stream
        resource.prlimit(kept.pid, resource.RLIMIT_NOFILE, (count + more, count + 100))
        kept.send(run=RUN)
        assert kept.wait("ended")["exit_code"] == 126
        assert len(os.listdir(f"/proc/{kept.pid}/fd")) == count
        kept.clears(more)
    lines = [one["log"] for one in kept.told if "log" in one]
    assert {line[:46] for line in lines} == {"rank 0 cannot be started (Too many open files)"}
    assert len(lines) == 6
    # Of a process that there never was the launcher could make nothing.
    assert not [one for one in kept.told if "said" in one]


def test_a_keeper_starts_without_the_modules_that_take_long():
    """Each rank waits for them: all of these together take half of its CPU time."""
    slow = {"collections", "contextlib", "enum", "json", "re", "socket", "typing"}
    text = f"import sys; sys.path.insert(0, {os.path.dirname(STUB)!r}); import stub, keeper\n"
    text += f"sys.exit(str({slow} & {{*sys.modules}}) if {slow} & {{*sys.modules}} else 0)"
    subprocess.run([sys.executable, "-I", "-S", "-c", text], check=True, timeout=SECONDS)


def test_it_says_which_rank_it_keeps(start):
    kept = start("", rank=7, LOCAL_RANK=2, GROUP_RANK=1)
    hello = kept.told[0]["hello"]
    assert hello == {"rank": 7, "local_rank": 2, "nproc": 1, "group_rank": 1}


def test_a_python_that_is_not_there(start):
    kept = start("")
    kept.run(environ={"PYTHON_EXEC": "/nowhere/python"})
    assert kept.wait("ended")["exit_code"] == 127
    printed("launcher: cannot execute /nowhere/python (No such file or directory).", "err")


WAITS = """
import signal, sys, time
from signal import SIGTERM as TERM, SIGINT as INT
{}
print("waits", flush=True)
while True:
    time.sleep(3600)
"""
# A print may be interrupted by the next signal before its line end.
TELLS = r"""
import os
signal.signal(TERM, lambda *_: os.write(1, b"term\n"))
signal.signal(INT, lambda *_: os.write(1, b"int\n"))
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"alive\n"))
"""


def waiting(start, setup="", text=WAITS, **options):
    """Start a script that waits until it is ended; `script` is its process."""
    kept = start(text.format(setup))
    kept.script = kept.run(**options)
    printed("waits")
    return kept


@pytest.mark.parametrize(
    ("text", "code", "response"),
    [
        ("signal.signal(TERM, lambda *_: sys.exit(3))", 3, "handles"),
        ("", -TERM, "default"),
        ("signal.signal(TERM, signal.SIG_IGN)", -signal.SIGKILL, "ignores"),
    ],
)
def test_what_a_script_does_at_a_signal_and_how_it_ends(start, text, code, response):
    kept = waiting(start, text)
    kept.end(7, grace=LONG if response != "ignores" else 0.2)
    ended = kept.wait("ended")
    assert (ended["exit_code"], ended["response"]) == (code, response)
    assert kept.wait("cleared") == {"number": 7, "survivors": 0}


def test_the_deadline_can_only_become_later_but_for_an_end_at_once(start):
    kept = waiting(start, TELLS)
    kept.end(1)
    kept.end(2, grace=0)
    kept.send(ask={"signal": USR1})
    printed("alive")
    kept.end(3, INT, grace=0, at_once=True)
    assert kept.wait("ended")["exit_code"] == -signal.SIGKILL
    assert kept.wait("cleared") == {"number": 3, "survivors": 0}


def test_a_script_gets_the_signal_once(start):
    kept = waiting(start, TELLS)
    kept.end(1, INT, waits=True)
    printed("int")
    kept.end(2, TERM, waits=True)
    kept.send(ask={"signal": USR1})
    printed("alive")
    with open("out") as text:
        assert "term" not in text.read()
    kept.kill(3)


def test_what_has_said_why_it_ends_gets_the_signal_of_a_stop_alone(start):
    kept = start(
        "import atexit, os, time\nfrom signal import *\n"
        "@atexit.register\ndef wait():\n    while True: time.sleep(3600)\n"
        "signal(SIGUSR1, lambda *_: os.write(1, b'has heard nothing\\n'))\n"
        "signal(SIGTERM, lambda *_: os.write(1, b'term\\n'))\n"
        "raise ValueError('bad')"
    )
    kept.run()
    assert kept.wait("said").startswith(b'{"end"')
    kept.end(1)
    kept.send(ask={"signal": USR1})
    printed("has heard nothing")
    with open("out") as text:
        assert "term" not in text.read()
    kept.end(2, waits=True)
    printed("term")
    kept.end(3, at_once=True, grace=0)
    assert kept.wait("ended")["response"] == "handles"


# What a script leaves behind.

DAEMON = """
import os, signal, sys, time
is_there, says = os.pipe()
if os.fork() == 0:
    how = {how!r}
    if how != "child":
        os.setsid()
    if how == "daemon" and os.fork():
        os._exit(0)
    {at_term}
    os.write(says, b"1")
    while True:
        time.sleep(3600)
os.read(is_there, 1)
if {how!r} == "daemon":
    os.wait()  # for what stood between
"""
SAVES = "signal.signal(signal.SIGTERM, lambda *_: [print('saved', flush=True), os._exit(0)])"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize("how", ["child", "session", "daemon"])
def test_what_is_left_gets_sigterm_once_the_script_has_ended(start, how):
    kept = start(DAEMON.format(how=how, at_term=SAVES))
    kept.run()
    assert kept.wait("ended")["exit_code"] == 0
    (left,) = kept.left
    kept.end()
    assert kept.wait("log") == f"stopping process {left}, which rank 0 left running."
    assert kept.wait("cleared") == {"number": 1, "survivors": 0}
    printed("saved")
    assert nothing_is_left() is False  # stub and keeper
    assert kept.leave(1) == 1
    poll(nothing_is_left)


def test_what_is_left_without_its_main_thread_is_ended_too(start):
    kept = start(
        "import ctypes, os, threading\n"
        "if not os.fork():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    ctypes.CDLL(None).pthread_exit(None)\n"
    )
    kept.run()
    kept.wait("ended")
    poll(lambda: list(map(has_ended, kept.left)) == [True], SECONDS)  # as its state says
    kept.clears(grace=0)
    assert kept.leave() == 0
    poll(nothing_is_left)


def test_what_is_left_at_a_stop_has_the_grace_too(start):
    kept = start(DAEMON.format(how="daemon", at_term=SAVES))
    kept.run()
    kept.wait("ended")
    kept.end(1, grace=LONG, waits=True)
    os.kill(kept.left[0], TERM)  # it ends by itself
    assert kept.wait("cleared") == {"number": 1, "survivors": 0}
    assert not [one for one in kept.told if "log" in one]


def test_what_is_left_near_a_stops_deadline_gets_sigterm_and_is_killed_at_it(start):
    kept = start(DAEMON.format(how="daemon", at_term=IGNORES))
    kept.run()
    kept.wait("ended")
    kept.end(1, grace=8, waits=True)  # its last quarter is near
    assert kept.wait("log").startswith("stopping process ")
    assert kept.wait("cleared") == {"number": 1, "survivors": 0}
    assert kept.left == []


GROUP = DAEMON.format(how="child", at_term=SAVES) + WAITS


def test_a_stop_that_kills_a_script_goes_to_its_group(start):
    """What it has started may save: a launcher of processes that is a shell script's, say."""
    kept = waiting(start, "", GROUP)
    kept.end(waits=True)
    assert kept.wait("ended")["exit_code"] == -TERM
    kept.wait("cleared")
    printed("saved")


def test_a_stop_that_a_script_handles_is_its_own(start):
    kept = waiting(start, "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))", GROUP)
    kept.end(waits=True)
    kept.wait("ended")
    assert kept.left
    with open("out") as text:
        assert "saved" not in text.read()
    os.kill(kept.left[0], TERM)
    kept.wait("cleared")


def test_ctrl_c_goes_to_a_program_that_os_system_waits_for(start):
    kept = start(
        "import os\n"
        "os.system(\"trap 'echo saved; exit' INT; echo waits; while true; do sleep 0.1; done\")"
    )
    kept.run()
    printed("waits")
    kept.end(1, INT, waits=True)
    printed("saved")
    assert kept.wait("ended")["response"] == "ignores"
    kept.wait("cleared")


_PTRACE_SEIZE = 0x4206


def test_what_a_debugger_holds_is_given_up(start):
    kept = waiting(start)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(_PTRACE_SEIZE, kept.script, None, None):
        pytest.skip("this system lets no process trace another")
    try:
        kept.end(grace=0)
        assert kept.wait("cleared") == {"number": 1, "survivors": 1}
    finally:
        os.waitpid(kept.script, 0)  # then its parent can
    assert kept.leave(1) == 1
    poll(nothing_is_left)


# Ends of others.


@pytest.mark.parametrize("at_term", [SAVES, IGNORES])
def test_a_launcher_that_is_gone_is_the_command_to_end(start, at_term):
    kept = start(DAEMON.format(how="daemon", at_term=at_term) + WAITS.format(at_term))
    kept.run(grace=LONG if at_term == SAVES else 0.2, log=os.path.abspath("log"))
    printed("waits")
    kept.close()
    assert kept.process.wait(SECONDS) == 1
    poll(nothing_is_left)
    assert os.listdir(os.environ["TMPDIR"]) == []  # the launcher's folder
    for file in ("out", "log") if at_term == SAVES else ():
        printed("saved", file, count=2)


def test_a_launcher_that_is_gone_before_anything_runs(start):
    kept = start("")
    kept.close()
    assert kept.process.wait(SECONDS) == 1
    poll(nothing_is_left)


def test_a_launcher_that_is_gone_amid_an_end_changes_nothing(start):
    kept = waiting(start, "signal.signal(TERM, signal.SIG_IGN)", grace=0.0)
    kept.end(grace=LONG, waits=True)
    kept.close()
    assert not has_ended(kept.script)
    os.kill(kept.script, signal.SIGKILL)
    assert kept.process.wait(SECONDS) == 1


LIKE_WARM = f"""
import os, socket, sys, time
sys.path.insert(0, {os.path.dirname(STUB)!r})
import keeper

stub, tells = socket.socketpair()
if os.fork() == 0:
    stub.close()
    tells.send(b"f")
    keeper.execute(sys.argv[1:], *keeper.keep(dict(os.environ), tells.detach()))
tells.close()
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["it waits", "it has not heard that a fork is its keeper"])
def test_a_stub_that_is_killed_is_told_and_its_rank_is_kept(start, script, monkeypatch, how):
    if how != "it waits":
        monkeypatch.setitem(globals(), "STUB", str(script(LIKE_WARM, "stub.py")))
    kept = waiting(start, TELLS)
    kept.process.kill()
    assert kept.wait("stub")["number"] == signal.SIGKILL
    kept.kill(1)
    kept.leave(0)
    poll(nothing_is_left)


def test_a_stub_ends_with_its_keeper_though_that_has_not_heard_of_a_signal(start):
    kept = waiting(start, TELLS)
    psutil.Process(kept.pid).suspend()
    stub = psutil.Process(kept.process.pid)
    before = stub.num_ctx_switches().voluntary
    stub.terminate()
    poll(lambda: stub.num_ctx_switches().voluntary > before and stub.status() == "sleeping")
    os.kill(kept.pid, signal.SIGKILL)
    assert kept.process.wait(SECONDS) == 1
    poll(nothing_is_left)
    with open("err") as err:
        assert err.read() == ""


def test_no_signal_but_sigkill_ends_a_keeper_and_none_of_torchruns_a_stub(start):
    """The stub says which of torchrun's it got."""
    kept = waiting(start, TELLS)
    for number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGRTMAX):
        os.kill(kept.pid, number)
    for number in (TERM, INT, signal.SIGHUP, signal.SIGQUIT, USR1, signal.SIGUSR2, signal.SIGPIPE):
        for pid in (kept.process.pid, kept.pid):
            os.kill(pid, number)
        if number in (TERM, INT, signal.SIGHUP, signal.SIGQUIT):
            assert kept.wait("stub")["number"] == number
    kept.send(ask={"signal": USR1})
    printed("alive")
    kept.kill(1)
    assert kept.leave(7) == 7


# What a script says, and does with its descriptors.

SAYS = """
import contextlib, os, socket, stat
def is_socket(fd):
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
(fd,) = filter(is_socket, map(int, os.listdir("/proc/self/fd")))
connection = socket.socket(fileno=os.dup(fd))
with contextlib.suppress(OSError):
    for _ in range({count}):
        connection.sendall({data})
{then}
os._exit(5)
"""
BYTES = {
    "junk": "b'x' * 100 + b'\\n'",
    "no line": "b'{' * 5000",
    "nested": "b'{\"a\":' * 10_000 + b'\\n'",
    "numbers": "b'{\"end\": 1e999, \"b\": NaN, \"c\": ' + b'9' * 5000 + b'}\\n'",
    "messages": 'b\'{"thread": "x"}\\n\'',
    "replies": "b'{\"poll\": 1}\\n'",
    "none: all descriptors are closed": "b''",
}


@pytest.mark.parametrize("kind", BYTES)
def test_no_bytes_of_a_script_end_its_keeper(start, kind):
    count = {"junk": 100_000, "messages": 100_000, "replies": 200_000}.get(kind, 400)
    closes = "os.closerange(0, 5000)" if "closed" in kind else ""
    kept = start(SAYS.format(count=count, data=BYTES[kind], then=closes))
    kept.run()
    assert kept.wait("ended")["exit_code"] == 5
    kept.clears()


def test_what_a_launcher_does_not_read_is_bounded_and_the_end_is_not_lost(start):
    reply = "b'{\"poll\": 1, \"x\": \"' + b'x' * 60_000 + b'\"}\\n'"
    kept = start(SAYS.format(count=1000, data=reply, then="print('waits', flush=True)"))
    kept.run()
    printed("waits")
    assert psutil.Process(kept.pid).memory_info().rss < 40 << 20
    assert kept.wait("ended")["exit_code"] == 5
    assert sum("said" in one for one in kept.told) < 500


def test_what_was_said_is_read_though_nothing_can_be_sent_any_more():
    """A script that has just died is polled: why it died is there still."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"end": 1}\n')
    theirs.close()
    link = lines.Lines(ours)
    link.send({"poll": 1})
    assert link.read()[0] == [b'{"end": 1}'] and link.is_gone
    link.close()


DECODE = "import os, signal\ndef decode():\n    os.kill(os.getpid(), signal.SIG{})\n{}decode()"


def test_an_abort_comes_with_its_place_and_the_last_words(start):
    words = "malloc(): corrupted top size"
    kept = start(DECODE.format("ABRT", f"os.write(2, b'{words}\\n')\n"))
    kept.run()
    ended = kept.wait("ended")
    assert (ended["exit_code"], ended["words"]) == (-signal.SIGABRT, words)
    text = b"\n".join(one["said"] for one in kept.told if "said" in one).decode()
    assert "Fatal Python error: Aborted" in text and 'script.py", line 3 in decode' in text


def test_a_crash_that_the_scripts_own_faulthandler_shows_comes_with_its_place(start):
    kept = start("import faulthandler\nfaulthandler.enable()\n" + DECODE.format("SEGV", ""))
    kept.run()
    assert 'script.py", line 5 in decode' in kept.wait("ended")["crash"]


def test_the_last_output_of_an_exit_is_that_of_the_stream_that_was_written_last(start):
    kept = start(
        "import os, time\n"
        "os.write(2, b'a warning\\n')\n"
        "while not os.path.getsize('err'): time.sleep(0.01)\n"
        "os.write(1, b'no license\\n')\n"
        "os._exit(7)"
    )
    kept.run()
    assert kept.wait("ended")["words"] == "no license"


def test_the_last_output_of_a_slow_exit_is_told_though_nobody_reads_the_console(start):
    text = "import atexit, sys, time\natexit.register(time.sleep, 3600)\n"
    text += "for number in range(1700): print(number, 90 * 'x')\n"
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "wb") as console:
        kept = start(f"{text}print('error: no license')\nsys.exit(7)", stdout=console)
        kept.run()
        assert kept.wait("words") == "error: no license"


# Output.

TORN = """
import os, sys
for number in range(500):
    print("rank", os.environ["RANK"], number, "x" * 50, "end")
"""


def test_the_lines_of_ranks_that_write_at_the_same_time_are_whole(start):
    reader, writer = os.pipe()
    text = []

    def read():
        with open(reader) as file:
            text.append(file.read())

    reads = threading.Thread(target=read)
    reads.start()
    many = [start(TORN, rank=rank, stdout=writer) for rank in range(8)]
    os.close(writer)
    for kept in many:
        kept.send(run=RUN)
    for kept in many:
        kept.wait("ended")
        assert kept.leave() == 0
    reads.join(SECONDS)
    lines = text[0].splitlines()
    x = "x" * 50
    expected = {f"rank {rank} {number} {x} end" for rank in range(8) for number in range(500)}
    assert len(lines) == 4000 and set(lines) == expected


@pytest.mark.parametrize("merges", [False, True])
def test_a_file_has_every_byte_and_lines_have_their_prefix(start, tmp_path, merges):
    kept = start("import os\nos.write(1, b'one\\ntwo')\nos.write(2, b' and a half\\n\\0\\xff')")
    log = tmp_path / "logs" / "rank-0.log"
    for shows in (True, False):  # as another job of the same name
        kept.run(prefix="[rank 0] ", merges=merges, log=str(log), shows=shows)
        kept.wait("ended")
    assert log.read_bytes() == b"one\ntwo and a half\n\0\xff" * 2
    texts = (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()
    rest = b" and a half\n[rank 0] \0\xff\n"  # what other ranks write then is no part of its line
    if merges:
        assert texts == (b"[rank 0] one\n[rank 0] two" + rest, b"")
    else:
        assert texts == (b"[rank 0] one\n[rank 0] two\n", b"[rank 0]" + b" " + rest)


@pytest.mark.parametrize("kind", ["a pipe", "a pipe that is read", "below a file"])
def test_a_file_that_cannot_be_written_is_done_without(start, tmp_path, kind):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    kept = start("print('runs')")
    with contextlib.ExitStack() as stack:
        if kind == "a pipe that is read":
            stack.callback(os.close, os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK))
        kept.run(log=str(tmp_path / ("file/rank-0.log" if kind == "below a file" else "pipe")))
        kept.wait("ended")
    (line,) = [one["log"] for one in kept.told if "log" in one]
    assert line.startswith(f"cannot write {tmp_path}/") and "continues without it" in line
    printed("runs")


def test_text_without_a_line_end_is_shown_soon_even_if_there_is_always_more(start, tmp_path):
    kept = start(
        "import os, time\nos.write(1, b'loading')\n"
        "while not os.path.exists('shown'): time.sleep(0.05); os.write(1, b'.')"
    )
    kept.run()
    poll(lambda: b"loading." in (tmp_path / "out").read_bytes(), SECONDS)
    (tmp_path / "shown").touch()
    assert kept.wait("ended")["exit_code"] == 0


def waiting_in(pipe):
    """Return how many bytes can be read from a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_console_that_nobody_reads_blocks_no_command(start, tmp_path, has_file, kind):
    reader, writer = socket.socketpair() if kind == "socket" else os.pipe()
    if kind == "socket":
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    log = str(tmp_path / "rank-0.log") if has_file else ""
    kept = start(
        "import os\nfor number in range(5000):\n    os.write(1, b'x' * 999 + b'\\n')\n"
        "    if number == 99: open('writes', 'w')\nos._exit(3)",
        stdout=writer,
        stderr=writer,
    )
    kept.run(log=log)
    if not has_file:
        poll(lambda: os.path.exists("writes"), SECONDS)
        kept.end()  # it waits in write(2), or soon will
    assert kept.wait("ended")["exit_code"] == (3 if has_file else -TERM)
    (line,) = [one["log"] for one in kept.told if "log" in one]
    assert "bytes of rank 0's output are not shown here, because the console is slow" in line
    assert (f"; {log} has them" in line) is has_file
    if has_file:
        assert os.path.getsize(log) == 5_000_000
        shown = 5_000_000 - int(line.split()[0])
        assert kind == "socket" or waiting_in(reader) == shown > 0
        kept.end()
    assert kept.wait("cleared") == {"number": 1, "survivors": 0}
    for one in (reader, writer):
        one.close() if kind == "socket" else os.close(one)


def test_a_console_that_is_read_late_gets_all(start):
    reader, writer = os.pipe()
    kept = start("import os\nfor _ in range(3000): os.write(1, b'x' * 99 + b'\\n')", stdout=writer)
    kept.run()
    poll(lambda: not select.select([], [writer], [], 0)[1], SECONDS)  # it is full
    os.close(writer)
    with open(reader, "rb") as console:
        lines = [console.readline() for _ in range(3000)]
    assert lines == [b"x" * 99 + b"\n"] * 3000
    assert kept.wait("ended")["exit_code"] == 0
    count = len(os.listdir(f"/proc/{kept.pid}/fd"))
    kept.run()
    kept.wait("ended")
    assert len(os.listdir(f"/proc/{kept.pid}/fd")) == count  # nothing of the first attempt


def test_a_daemon_that_never_stops_printing_keeps_nobody_waiting(start):
    with open(os.devnull, "wb") as console:
        prints = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(says, b'1')\n"
        prints += "    while True: os.write(1, (b'x' * 99 + b'\\n') * 650)"
        kept = start(DAEMON.format(how="daemon", at_term=prints), stdout=console, stderr=console)
        kept.run()
        assert kept.wait("ended")["exit_code"] == 0
        kept.clears(grace=0.5)


def test_a_script_that_prints_100_mb_and_is_killed_loses_none_of_it(start, tmp_path):
    kept = start(
        "import os\nfor _ in range(1600): os.write(1, (b'x' * 63 + b'\\n') * 1024)\n"
        "os.kill(os.getpid(), 9)"
    )
    kept.run(log=str(tmp_path / "log"))
    assert kept.wait("ended")["exit_code"] == -signal.SIGKILL
    for name in ("out", "log"):
        assert os.path.getsize(tmp_path / name) == 1600 * 65536
        os.truncate(tmp_path / name, 0)
    cpu = psutil.Process(kept.pid).cpu_times()
    assert cpu.user + cpu.system < 20  # seconds; about 0.3
