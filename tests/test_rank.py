"""rank.py against plain Python: a script cannot tell the difference. Needs no torch."""

import os
import py_compile
import re
import shutil
import socket
import subprocess
import sys
import zipfile

import pytest
from conftest import RANK, REPO, run_as_rank

from launcher.run import rank

LOOK = """
import json, multiprocessing, os, pickle, sys

class Thing:
    pass

def main():
    loader = type(__loader__).__name__
    print(json.dumps([
        sys.argv, __file__, sys.path, __name__, getattr(__spec__, "name", None), __package__,
        loader,
        sorted(globals()), pickle.dumps(Thing()).hex(), sys.modules["__main__"] is __main__,
        __builtins__.__name__,
        sorted(set(os.environ) - {"_", "COLUMNS", "LINES"}),  # the last two are set by readline
    ]))

import __main__
main()
"""


# The launcher's variables are not to reach the script.
WATCHER = str(REPO / "launcher" / "watch" / "in_rank.py")


def plain(*args, flags=()):
    """Run a script by Python alone, from the same folder."""
    argv = [sys.executable, *flags, *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def as_a_rank(*args, **env):
    """Run it by rank.py, with the watch in it."""
    argv = [sys.executable, RANK, "script", *args]
    return run_as_rank(argv, {**os.environ, "LAUNCHER_WATCHER": WATCHER, **env})


def both(*args, flags=()):
    """Run a script plainly and through rank.py, without a keeper; return both results."""
    runs = plain(*args, flags=flags), plain(RANK, "script", *args, flags=flags)
    return [(one.returncode, one.stdout, without_addresses(one.stderr)) for one in runs]


def without_addresses(text):
    return re.sub(r"\b0x[0-9a-f]+", "0x", text)  # of an object that is named in a traceback


def test_neither_a_link_to_the_launcher_nor_a_module_of_the_script_is_in_its_way(script, tmp_path):
    """rank.py needs no module that a script may have, but for those that torch needs, too."""
    (tmp_path / "link").symlink_to(REPO / "launcher" / "run")
    shutil.copytree(REPO / "launcher" / "run", tmp_path / "links", copy_function=os.symlink)
    script("LIMIT = 3", "resource.py")
    script("import sys, resource, store\nprint(resource.LIMIT, store.GOODS)\nraise ValueError")
    script("GOODS = 5", "store.py")
    for folder, path in (("link", ""), ("links", ""), ("link", str(tmp_path))):
        argv = [sys.executable, str(tmp_path / folder / "rank.py"), "script", "script.py"]
        ran = run_as_rank(argv, {**os.environ, "PYTHONPATH": path})
        assert ran.out == "3 5\n" and "in <module>\n    raise ValueError\n" in ran.err
        assert ran.err.count("File ") == 1 and ran.told[0]["end"]["exit_code"] == 1


def test_the_connection_has_no_default_timeout(monkeypatch):
    """A sitecustomize may set that; then the thread that replies would end at it."""
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    ours, its = socket.socketpair()
    socket.setdefaulttimeout(0.01)
    try:
        connection = rank.KeeperConnection(its.detach())
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(connection.fileno())
    connection.close()
    ours.close()


@pytest.mark.parametrize(
    "kind", ["./link.py", "folder", "folder/", "archive.zip", "script.pyc", "compiled"]
)
def test_whatever_python_executes_by_path(script, tmp_path, kind):
    """A link has neither the name nor the folder of its file."""
    path = tmp_path / kind
    (tmp_path / "other").mkdir()
    made = script(LOOK, "other/made.py")
    if kind == "./link.py":
        path.symlink_to(made)
    elif kind == "archive.zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(made, "__main__.py")
    elif kind in ("script.pyc", "compiled"):
        py_compile.compile(str(made), str(path))
    else:
        path.mkdir()
        made.rename(path / "__main__.py")
    flags = ["-P"] if kind in ("folder/", "compiled") and sys.version_info >= (3, 11) else []
    plain, ours = both(kind, "", "--", "a b", "$$", "--help", flags=flags)
    assert ours == plain
    assert plain[0] == 0


def test_what_python_cannot_execute(script):
    script("not a compiled file", "script.pyc")
    plain, ours = both("script.pyc")
    assert (ours[:2], plain[:2]) == ((1, ""), (1, ""))
    assert "magic number in" in ours[2] and "magic number in" in plain[2]


@pytest.mark.parametrize(
    "text",
    [
        "raise KeyboardInterrupt",
        "x = = 1",  # a SyntaxError, which has no frame of the script
        "import atexit; atexit.register(print, 'last'); raise ValueError",
        "import sys; sys.excepthook = lambda *_: sys.exit(7); raise ValueError",
        "import os, sys; sys.excepthook = lambda *_: os._exit(42); raise ValueError",
        "class K(KeyboardInterrupt): pass\nraise K",
        "class E(SystemExit): code = property(lambda self: 1 / 0)\nraise E",
        "class M(type): __module__ = property(lambda self: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\nraise E",
        "import signal\ndef stop(*_): raise ValueError\nsignal.signal(signal.SIGALRM, stop)\n"
        "import os; os.kill(os.getpid(), signal.SIGALRM)",
        "import atexit, sys; atexit.register(sys.exit, 3); raise ValueError",
        "import threading; threading.Timer(0.1, print, ['late']).start(); raise ValueError",
        "import os\nif os.fork() == 0: raise ValueError('of a fork')\nos.wait()",
    ],
)
def test_every_end_is_the_same(script, text):
    """The usual ends are rows of tests/equality.py."""
    script(text)
    plain, ours = both("script.py")
    assert ours == plain


@pytest.mark.parametrize("text", ["del sys.excepthook", "sys.excepthook = None"])
def test_a_hook_that_is_not_there(script, text):
    script(f"import sys; {text}; raise ValueError")
    plain, ours = both("script.py")
    assert (ours[0], ours[2].splitlines()[0]) == (plain[0], plain[2].splitlines()[0])
    assert ours[2].endswith("ValueError\n")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (LOOK, ["script_ended"]),
        ("import sys; sys.exit(256)", ["script_ended"]),
        ("import sys; sys.exit(3)", ["end"]),
        ("import os; os._exit(0)", []),
        ("import os\nif os.fork(): os.wait()", ["script_ended"]),
        (
            "import atexit, os, threading, time; atexit.register(print, threading.active_count())\n"
            "atexit.register(lambda: os.fork() and os.wait())\n"
            "threading.Thread(target=time.sleep, args=(0.1,)).start()",
            ["script_ended"],
        ),
    ],
)
def test_the_launcher_is_told_that_a_script_has_ended_and_the_script_notices_nothing(
    script, text, messages
):
    script(text)
    ours, alone = as_a_rank("script.py"), plain("script.py")
    assert ours.end == (alone.returncode, alone.stdout, alone.stderr)
    assert [next(iter(message)) for message in ours.told] == messages


DROPS_LATE = """
import _thread, ctypes, hashlib, os, sys, threading, time
def work(rounds):  # without the interpreter, as in C++
    began = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    return time.thread_time() - began
def run_loop():
    if {is_named}:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME
    begun.set()
    work(rounds)
    {then}
    os.write(1, b"dropped")
    threading.Event().wait()
begun, rounds = threading.Event(), int(20_000 * 0.05 / work(20_000))  # 0.05 s
watch = next(one for one in sys.meta_path if type(one).__name__ == "Replier")
watch.find_spec("torch.distributed.distributed_c10d")  # as if it imported that
watch.find_spec.__globals__["let_torchs_threads_finish"].__defaults__ = (60.0,)  # s, in place of 1
_thread.start_new_thread(run_loop, ())
begun.wait()
time.sleep = time.monotonic = os.listdir = None
"""


@pytest.mark.parametrize("is_named", [True, False])
def test_a_thread_of_torchs_that_is_at_work_is_waited_for_before_python_ends(script, is_named):
    script(DROPS_LATE.format(is_named=is_named, then=""))
    assert as_a_rank("script.py").end == (0, "dropped", "")


WAITED_FOR = """
import signal, sys, threading
def save(*_):
    raise {}
signal.signal(signal.SIGTERM, save)
def is_waited_for():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and frame.f_code.co_name != "let_torchs_threads_finish":
        frame = frame.f_back
    return frame
"""
STOPPED = """
    while not is_waited_for():
        work(rounds // 5)
    os.kill(os.getpid(), signal.SIGTERM)
    work(rounds)"""


@pytest.mark.parametrize("raises", ["SystemExit(143)", "KeyboardInterrupt", "OSError('disk full')"])
def test_a_stop_while_a_thread_of_torchs_is_waited_for_cuts_no_wait_short(script, raises):
    script(WAITED_FOR.format(raises) + DROPS_LATE.format(is_named=True, then=STOPPED))
    code, out, err = as_a_rank("script.py").end
    assert (code, out) == (0, "dropped")
    assert err.endswith("OSError: disk full\n") if "OSError" in raises else not err


def test_threads_that_were_there_before_the_script_are_there_in_the_rank(script, tmp_path):
    """Of a profiler's sitecustomize: a fork has none of them."""
    script("import threading; print(threading.active_count())")
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    assert as_a_rank("script.py", PYTHONPATH=str(tmp_path)).end == (0, "2\n", "")
