"""What went wrong, in the characters that people see."""

import os

import pytest

from launcher.result import failure
from launcher.result.causes import (
    LIMIT,
    Aside,
    Cause,
    RankFailure,
    of_rank,
    of_torchrun,
)
from launcher.result.failure import earlier_failure, output_dir, prepare_failure, write_failure
from launcher.result.raised import Link, read

TERM, KILL, SEGV, ABRT = -15, -9, -11, -6


def noted(rank, exit_code=1, time=10.0, exception="", message="", frames=""):
    """A rank that said why; a death by signal is never said."""
    chain = read([Link(exception, message, frames)])
    return RankFailure(rank, rank, exit_code, chain, time, said=exit_code >= 0)


SECONDARY = {
    "exception": "RuntimeError",
    "message": "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
}


@pytest.mark.parametrize(
    ("exit_code", "code"),
    [(3, 3), (255, 255), (SEGV, 139), (KILL, 137), (0, 1)],  # a failure is never a success
)
def test_the_exit_code_is_that_of_the_rank(exit_code, code):
    assert of_rank(noted(0, exit_code), "algo-1").exit_code == code


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (noted(0), Cause.OWN),
        (noted(0, KILL), Cause.OWN),
        (noted(0, TERM), Cause.ABORTED),
        (noted(0, ABRT), Cause.ABORTED),
        (noted(0, **SECONDARY), Cause.SECONDARY),
        (noted(0, **SECONDARY)._replace(notes=("its process",)), Cause.OWN),
        (RankFailure(0, 0, 1, last_words=f"RuntimeError: {SECONDARY['message']}"), Cause.ABORTED),
        (RankFailure(0, 0, 1, last_words="RuntimeError: no license"), Cause.OWN),
    ],
)
def test_what_a_failure_says_of_why_the_job_ends(failure, cause):
    assert of_rank(failure, "algo-1").cause is cause


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            noted(5, exception="ValueError", message="loss is nan\nat step 17"),
            "failed with ValueError: loss is nan at step 17",
        ),
        (noted(5, message="no data"), "exited: no data"),  # sys.exit("no data")
        (noted(5, exit_code=3), "ended with exit code 3"),
        (
            RankFailure(5, 5, 3, time=10.0, last_words="no license"),
            'ended with exit code 3; its last line: "no license"',
        ),
        (noted(5, exit_code=SEGV), "was killed by SIGSEGV (signal 11)"),
    ],
)
def test_the_first_line_is_what_a_person_needs(failure, line):
    text = of_rank(failure, "algo-1").text
    assert text.splitlines()[0] == f"algo-1, rank 5 (local rank 5) {line}"
    assert text.splitlines()[1].endswith(", 10 s after start")


CRASH = {"place": "decode, data.py:12", "at": "12:34:56 UTC"}
PIN = read([Link("ValueError", "bad file", '  File "pin.py", line 3, in pin\n')])


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            noted(5, exit_code=SEGV)._replace(**CRASH),
            "was killed by SIGSEGV (signal 11) in decode, data.py:12",
        ),
        (
            noted(5, exit_code=ABRT)._replace(**CRASH),
            "was killed by SIGABRT (signal 6) in decode, data.py:12; see that rank's last lines on "
            "stderr, at 12:34:56 UTC",
        ),
        (
            noted(5, exit_code=ABRT)._replace(at="12:34:56 UTC"),
            "was killed by SIGABRT (signal 6); see that rank's last lines on stderr, at "
            "12:34:56 UTC",
        ),
        (
            noted(5, exit_code=ABRT)._replace(at="12:34:56 UTC", after_script=True),
            "was killed by SIGABRT (signal 6) after its script had ended; see that rank's last "
            "lines on stderr, at 12:34:56 UTC",
        ),
        (
            noted(5, exception="EOFError")._replace(
                notes=("its process x was",), recorded="out of memory"
            ),
            "failed with EOFError; its process x was; out of memory",
        ),
        (
            noted(5, exception="E", message="It failed (1.2.3.4, 9).")._replace(
                notes=("rank 1 waits",)
            ),
            "failed with E: It failed (1.2.3.4, 9); rank 1 waits",
        ),
        (
            noted(5, exception="E", message="It failed...")._replace(notes=("rank 1 waits",)),
            "failed with E: It failed...; rank 1 waits",
        ),
        (noted(5, exception="E", message="It failed."), "failed with E: It failed."),
        (
            noted(5, exception="E", message="x")._replace(aside=Aside("pin", PIN, 3.0)),
            'failed with E: x (thread "pin" raised ValueError: bad file, 3.0 s earlier)',
        ),
        (
            noted(5, exit_code=4)._replace(aside=Aside("pin", PIN, 0.2), recorded="out of memory"),
            "ended with exit code 4; out of memory "
            '(thread "pin" raised ValueError: bad file, 0.2 s earlier)',
        ),
        (
            noted(5, exception="ValueErrors", message="bad files")._replace(
                aside=Aside("pin", read([Link("ValueError")]), 0.2)
            ),
            'failed with ValueErrors: bad files (thread "pin" raised ValueError, 0.2 s earlier)',
        ),
        # it is raised again in the main thread
        (
            noted(5, exception="ValueError", message="bad file")._replace(
                aside=Aside("pin", PIN, 0.2)
            ),
            "failed with ValueError: bad file",
        ),
    ],
)
def test_what_the_main_thread_did_not_raise_stands_behind_it(failure, line):
    text = of_rank(failure, "algo-1").text
    assert text.splitlines()[0] == f"algo-1, rank 5 (local rank 5) {line}"


def test_long_texts_leave_room_for_what_stands_behind_them():
    long = read([Link("E", "x" * 5000), Link("E", "y" * 5000, how="cause")])
    aside = Aside("n" * 100, read([Link("F", "z" * 5000)]), 3.0)
    failure = noted(5)._replace(chain=long, aside=aside, recorded="out of memory: the machine")
    first = of_rank(failure, "algo-1").headline
    assert len(first) <= 500 and first.endswith(", 3.0 s earlier)")
    assert "failed with E: xxx" in first and "; out of memory: the machine (thread" in first


def test_the_frames_below_are_those_of_what_is_named():
    crash = noted(5, exit_code=SEGV)._replace(frames='  File "data.py", line 12, in decode')
    assert of_rank(crash, "algo-1").text.endswith(
        'Traceback (most recent call last):\n  File "data.py", line 12, in decode\n'
    )
    left = noted(5, exit_code=4)._replace(aside=Aside("pin", PIN, 3.0))
    assert of_rank(left, "algo-1").text.endswith('  File "pin.py", line 3, in pin\n')


def test_the_innermost_frames_are_kept():
    frames = "".join(f'  File "a.py", line {n}, in f{n}\n    deeper()\n' for n in range(200))
    failure = noted(0, exception="ValueError", message="x" * 900 + "the end", frames=frames)
    text = of_rank(failure, "algo-1")._replace(failures=2).text
    assert LIMIT - 100 < len(text) <= LIMIT
    head, details, *shown = text.splitlines()
    assert "xxx ... xxx" in head and head.endswith("the end")
    assert "1 more rank failed independently" in details
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-2] == '  File "a.py", line 199, in f199'


@pytest.mark.parametrize(
    ("returncode", "error", "code", "says"),
    [
        (-9, "", 69, "algo-1: torchrun was killed by SIGKILL (signal 9)"),
        (
            *(1, "RendezvousConnectionError: x (EADDRINUSE, address in use)", 69),
            "algo-1: the rendezvous port of algo-1:29400 is already in use on this host; "
            "choose another with --launcher-rdzv-port",
        ),
        (
            *(1, "RendezvousTimeoutError: late:", 69),
            "algo-1: the rendezvous at algo-1:29400 was not completed, or a host was lost (see "
            "the other "
            "hosts' logs, and --launcher-start-timeout); expected algo-1, algo-2: "
            "RendezvousTimeoutError: late\n",
        ),
        (1, "ValueError: bad", 2, "algo-1: torchrun failed: ValueError: bad"),  # its settings
        (1, "RuntimeError: bad", 69, "algo-1: torchrun failed: RuntimeError: bad"),
        (2, "", 2, "algo-1: torchrun failed\nexit code 2, 12 s"),  # it refused its arguments
        (0, "", 2, "algo-1: torchrun failed: it has started no rank, and ended with exit code 0"),
        (1, "SignalException: Process 7 got signal: 15", 69, "algo-1: torchrun failed: Signal"),
    ],
)
def test_failures_of_torchrun_itself(returncode, error, code, says):
    hosts = ("algo-1", "algo-2")
    failure = of_torchrun(returncode, error, hosts, "algo-1", "algo-1:29400", 12.0)
    assert (failure.cause, failure.exit_code) == (Cause.TORCHRUN, code)
    assert failure.text.startswith(says) and len(failure.text) <= LIMIT


def test_where_the_failure_file_goes(tmp_path):
    assert output_dir({}) == "/opt/ml/output"
    assert output_dir({"SAGEMAKER_BASE_DIR": "/b"}) == "/b/output"
    assert output_dir({"SM_OUTPUT_DIR": "/o", "SAGEMAKER_BASE_DIR": "/b"}) == "/o"


def test_never_over_an_existing_file(tmp_path, logged):
    environ = {"SM_OUTPUT_DIR": str(tmp_path)}
    assert write_failure("first \ud800", environ) == str(tmp_path / "failure")
    assert write_failure("second", environ) is None
    assert (tmp_path / "failure").read_text() == "first ?"
    assert "kept as it is" in logged()


@pytest.mark.parametrize("kind", ["missing", "a file", "read-only"])
def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, logged, kind):
    folder = tmp_path / "out"
    if kind == "a file":
        folder.write_text("")
    elif kind == "read-only":
        if os.geteuid() == 0:
            folder = "/proc/1"  # root may write to any other
        else:
            folder.mkdir(mode=0o500)
    assert write_failure("text", {"SM_OUTPUT_DIR": str(folder)}) is None
    assert f"warning: cannot write {folder}/failure" in logged()
    assert write_failure("text", {"SM_OUTPUT_DIR": str(folder)}, quiet=True) is None
    assert logged() == ""


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """Leave a failure file of an earlier run, and look at it as a launcher does at its start."""
    monkeypatch.setattr(failure, "_earlier", {})
    path = tmp_path / "failure"
    path.write_text("of the first job")
    environ = {"SM_OUTPUT_DIR": str(tmp_path)}
    prepare_failure(environ)
    return path, environ


def test_a_file_of_an_earlier_run_is_replaced_once(earlier, logged):
    path, environ = earlier
    os.utime(path, (2**31, 2**31))  # a clock that goes wrong
    prepare_failure(environ)
    assert write_failure("of this job", environ) == str(path)
    assert path.read_text() == "of this job"
    assert logged() == f"launcher: {path} was left by an earlier run; it has been replaced.\n"
    assert write_failure("again", environ) is None
    assert path.read_text() == "of this job"


@pytest.mark.parametrize("how", ["written over", "replaced", "removed and made"])
def test_a_scripts_own_file_of_this_run_stays_though_there_was_one_before(earlier, how, logged):
    path, environ = earlier
    text = "of the other job"  # which is as long
    if how == "replaced":
        other = path.with_name("other")
        other.write_text(text)
        os.replace(other, path)
    else:
        if how == "removed and made":
            path.unlink()
        before = os.stat(path.parent)
        path.write_text(text)
        os.utime(path, (before.st_atime + 1, before.st_mtime + 1))
    assert write_failure("of the launcher", environ) is None
    assert path.read_text() == text and "kept as it is" in logged()
    assert earlier_failure(environ) == ""


def test_what_is_no_file_is_none_of_an_earlier_run(tmp_path, logged, monkeypatch):
    monkeypatch.setattr(failure, "_earlier", {})
    environ = {"SM_OUTPUT_DIR": str(tmp_path)}
    (tmp_path / "elsewhere").write_text("theirs")
    (tmp_path / "failure").symlink_to(tmp_path / "elsewhere")
    prepare_failure(environ)
    assert write_failure("text", environ) is None
    assert (tmp_path / "elsewhere").read_text() == "theirs"
