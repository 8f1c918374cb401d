"""What went wrong, in the characters that people see."""

import errno
import os
from pathlib import Path

import pytest
from jobs import job_of

from launcher.result import failure
from launcher.result.causes import (
    LIMIT,
    Aside,
    Cause,
    Exit,
    Link,
    expanded,
    headline,
    of_rank,
    of_torchrun,
)
from launcher.result.failure import output_dir, prepare_failure, write_failure
from launcher.run.torchrun import _words_of

TERM, KILL, SEGV, ABRT = -15, -9, -11, -6
RANK = "algo-1, rank 5 (local rank 5)"


def raised(exception, message="", frames="", code=1, **more):
    return Exit(code, expanded([Link(exception, message, frames)]), **more)


def failed(end, *pin):
    """Return the failure of a rank that ended so; `pin` is what a thread of it raised, and when."""
    return of_rank(RANK, 5, end, 10.0, Aside("pin", *pin) if pin else None)


CLOSED = "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
BAD_FILE = raised("ValueError", "bad file", '  File "pin.py", line 3, in pin\n')
GAVE_UP = "[/b/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
REACHED = f"Rank 2 successfully reached monitoredBarrier, but received errors: {GAVE_UP}"
KILLED_BY_SEGV = "was killed by SIGSEGV (signal 11)"
KILLED_BY_ABRT = "was killed by SIGABRT (signal 6)"
SEE = "; see that rank's last lines on stderr, at 12:34:56 UTC"
PEER = f"failed with RuntimeError: {CLOSED}"
WAITS, MEMORY, AT = ("rank 1 waits",), "out of memory", "12:34:56 UTC"
PLACE = "load, data.py:12"
BAD_THREAD = ' (thread "pin" raised ValueError: bad file, 3.0 s earlier)'
OF_THREAD, OTHER = raised("F", facts=WAITS), ' (thread "pin" raised F, 0.2 s earlier)'
OF_MEMORY, LATE_ABORT = Exit(4, recorded=MEMORY), Exit(ABRT, at=AT, after_script=True)
OWN, ABORTED, SECONDARY = Cause.OWN, Cause.ABORTED, Cause.SECONDARY
TIMED_OUT = Cause.TIMED_OUT
LACKS, SMDDP = "failed with ModuleNotFoundError: No module named", "smdistributed.dataparallel"


def of_import(name):
    return 1, OWN, raised("ModuleNotFoundError", f"No module named {name!r}")


ENDS = [
    # The first line, the exit code, the cause; how a rank ended; what a thread of it raised before.
    ("failed with ValueError: no batch at 17", 1, OWN, raised("ValueError", "no batch\nat 17")),
    ("exited: no data", 1, OWN, raised("", "no data")),
    ("ended with exit code 3", 3, OWN, Exit(3)),
    ("ended with exit code 3", 3, OWN, raised("", code=3)),
    ("ended with exit code 0", 1, OWN, Exit(0)),  # a failure is never a success
    ('ended with exit code 3; its last line: "no license"', 3, OWN, Exit(3, words="no license")),
    (f'ended with exit code 1; its last line: "{CLOSED}"', 1, ABORTED, Exit(1, words=CLOSED)),
    ("was killed by SIGKILL (signal 9)", 137, OWN, Exit(KILL)),
    ("was killed by SIGTERM (signal 15)", 143, ABORTED, Exit(TERM)),
    (PEER, 1, SECONDARY, raised("RuntimeError", CLOSED)),
    # It says more of the job than what follows on other ranks: their connections break.
    (f"failed with RuntimeError: {GAVE_UP}", 1, TIMED_OUT, raised("RuntimeError", GAVE_UP)),
    (f"failed with RuntimeError: {REACHED}", 1, SECONDARY, raised("RuntimeError", REACHED)),
    (f"{PEER}; its process", 1, OWN, raised("RuntimeError", CLOSED, facts=("its process",))),
    (PEER, 1, OWN, raised("RuntimeError", CLOSED, broken="a lost GPU")),
    (f"{KILLED_BY_SEGV} in {PLACE}", 139, OWN, Exit(SEGV, place=PLACE)),
    (f"{KILLED_BY_ABRT} in {PLACE}{SEE}", 134, ABORTED, Exit(ABRT, place=PLACE, at=AT)),
    (f"{KILLED_BY_ABRT}{SEE}", 134, ABORTED, Exit(ABRT, at=AT)),
    (f"{KILLED_BY_ABRT} after its script had ended{SEE}", 134, ABORTED, LATE_ABORT),
    (f"{KILLED_BY_ABRT}: no memory", 134, ABORTED, Exit(ABRT, words="no memory")),
    (f"{LACKS} 'smdistributed' (see --launcher-smddp-compat)", *of_import("smdistributed")),
    (f"{LACKS} '{SMDDP}' (see --launcher-smddp-compat)", *of_import(SMDDP)),
    (f"{LACKS} 'smdistributed.modelparallel'", *of_import("smdistributed.modelparallel")),
    # What the main thread did not raise stands behind it.
    (f"failed with E; x was; {MEMORY}", 1, OWN, raised("E", facts=("x was",), recorded=MEMORY)),
    ("failed with E: (1.2, 9); rank 1 waits", 1, OWN, raised("E", "(1.2, 9).", facts=WAITS)),
    ("failed with E: It failed...; rank 1 waits", 1, OWN, raised("E", "It failed...", facts=WAITS)),
    ("failed with E: It failed.", 1, OWN, raised("E", "It failed.")),
    ("failed with E: x" + BAD_THREAD, 1, OWN, raised("E", "x"), BAD_FILE, 3.0),
    (f"ended with exit code 4; rank 1 waits; {MEMORY}{OTHER}", 4, OWN, OF_MEMORY, OF_THREAD, 0.2),
    # It is raised again in the main thread.
    ("failed with ValueError: bad file", 1, OWN, BAD_FILE, BAD_FILE, 0.2),
]


@pytest.mark.parametrize("row", ENDS, ids=range(len(ENDS)))
def test_the_first_line_is_what_a_person_needs(row):
    line, code, cause, *ends = row
    failure = failed(*ends)
    assert (failure.exit_code, failure.cause) == (code, cause)
    lines = [f"{RANK} {line}", f"exit code {code}, 10 s after start"]
    assert failure.text.splitlines()[:2] == lines


def test_long_texts_leave_room_for_what_stands_behind_them():
    long = expanded([Link("E", "x" * 5000), Link("E", "y" * 5000, how="cause")])
    aside = Aside("n" * 100, raised("F", "z" * 5000), 3.0)
    first = of_rank(RANK, 5, Exit(1, long, recorded="out of memory: a"), 10.0, aside).headline
    assert len(first) <= 500 and first.endswith(", 3.0 s earlier)")
    assert "failed with E: xxx" in first and "; out of memory: a (thread" in first
    line = headline(long)
    assert len(line) < 500 and line.startswith("failed with E: xxx") and " (from E: yyy" in line


def test_the_frames_below_are_those_of_what_is_named():
    frames = '  File "data.py", line 12, in decode'
    head = "Traceback (most recent call last):\n"
    assert failed(Exit(SEGV, frames=frames)).text.endswith(f"\n{head}{frames}\n")
    assert failed(Exit(4), BAD_FILE, 3.0).text.endswith(f"\n{head}{BAD_FILE.chain[0].frames}")


def test_a_long_text_keeps_its_lines_and_the_innermost_frames():
    frames = "".join(f'  File "a.py", line {n}, in f{n}\n    deeper()\n' for n in range(200))
    end = raised("ValueError", "x" * 900 + "the end", frames, broken="a lost GPU")
    failure = failed(end)
    assert failure.broken == f"{RANK} reports a lost GPU"
    text = failure._replace(failures=2, no_restart=failure.obstacle).text
    assert LIMIT - 100 < len(text) <= LIMIT
    head, no_restart, details, *shown = text.splitlines()
    assert "xxx ... xxx" in head and head.endswith("the end")
    hosts = "SageMaker checks and replaces the hosts of a failed job"
    assert no_restart == f"no restart: {RANK} reports a lost GPU; {hosts}"
    assert details == "exit code 1, 10 s after start; 1 more rank failed independently"
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[-2] == '  File "a.py", line 199, in f199'


OF_STORE = """Traceback (most recent call last):
  File "/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 156, in _create
    store = TCPStore(
torch.distributed.DistNetworkError: The server socket has failed: EADDRINUSE

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/torch/distributed/run.py", line 1028, in main
    run(args)
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: See inner exception.
"""
CHILDREN = """ChildFailedError:
================
stub.py FAILED
----------------
Failures:
[1]:
  exitcode  : -15 (pid: 813)
  traceback : Signal 15 (SIGTERM) received by PID 813
----------------
Root Cause (first observed failure):
[0]:
  exitcode  : {} (pid: 812)
  traceback : {} received by PID 812
"""
KILLED, TOLD, ENDED = (
    CHILDREN.format(*end)
    for end in ((-9, "Signal 9 (SIGKILL)"), (-15, "Signal 15 (SIGTERM)"), (1, "nothing was"))
)


@pytest.mark.parametrize(
    ("message", "calls", "words"),
    [
        (
            *("RendezvousConnectionError: See inner exception.", OF_STORE),
            "RendezvousConnectionError: See inner exception. "
            "(torch.distributed.DistNetworkError: The server socket has failed: EADDRINUSE)",
        ),
        (KILLED, "", "Signal 9 (SIGKILL) received by PID 812, which it had started"),
        (TOLD, "", ""),
        (ENDED, "", ""),
        ("R: one\n two", "Traceback (most recent call last):\nR: one\n two", "R: one two"),
        ("AnError: ", "Traceback (most recent call last):\nAnError", "AnError"),
        (
            "ValueError: bad",
            "Traceback (most recent call last):\nValueError: bad",
            "ValueError: bad",
        ),
    ],
)
def test_torchruns_own_exception_has_its_origin(message, calls, words):
    """As in its error file (torch.distributed.elastic.multiprocessing.errors.record)."""
    assert _words_of({"message": message, "extraInfo": {"py_callstack": calls}}) == words


TAKEN = "already in use on this host; choose another with --launcher-rdzv-port, the same one on "
TAKEN += "every host\nexit code 2, "
LATE = "RendezvousTimeoutError: late"
SIGNALLED = "SignalException: Process 7 got signal"
SEE_OTHERS = (
    "or a host was lost (see the other hosts' logs, and --launcher-start-timeout); expected"
)
REFUSED = [
    (-9, "", 69, "torchrun was killed by SIGKILL (signal 9)"),
    (1, "R: x (EADDRINUSE, in use)", 2, f"the rendezvous port of algo-1:29400 is {TAKEN}"),
    (
        *(1, f"{LATE}:", 69),
        f"the rendezvous at algo-1:29400 was not completed, {SEE_OTHERS} algo-1, algo-2: {LATE}\n",
    ),
    (1, "ValueError: bad", 2, "torchrun failed: ValueError: bad"),  # its settings
    (1, "RuntimeError: bad", 69, "torchrun failed: RuntimeError: bad"),
    (2, "", 2, "torchrun failed\nexit code 2, 12 s"),  # it refused its arguments
    (0, "", 2, "torchrun failed: it has started no rank, and ended with exit code 0"),
    (1, f"{SIGNALLED}: 2", 69, "torchrun was ended by SIGINT (signal 2)\n"),
]


@pytest.mark.parametrize(("returncode", "error", "code", "says"), REFUSED)
def test_failures_of_torchrun_itself(returncode, error, code, says):
    job = job_of("algo-1", ("algo-1", "algo-2"))
    failure = of_torchrun(job, returncode, error, 12.0)
    # Without words its end may follow from that of another host's.
    cause = Cause.TORCHRUN_ENDS if (returncode, error) == (2, "") else Cause.TORCHRUN
    assert (failure.cause, failure.exit_code) == (cause, code)
    assert failure.text.startswith(f"algo-1: {says}") and len(failure.text) <= LIMIT


def test_a_torchrun_that_was_told_to_end_is_named_not_the_program_that_runs_it():
    job = job_of("algo-1", ("algo-1",), runner="neuron_parallel_compile")
    failure = of_torchrun(job, 1, f"{SIGNALLED}: 15", 12.0, had_ranks=True)
    says = "algo-1: torchrun was ended by SIGTERM (signal 15), below neuron_parallel_compile\n"
    assert failure.exit_code == 69 and failure.text.startswith(says)
    assert of_torchrun(job, 3, "", 12.0, had_ranks=True).exit_code == 3


def test_where_the_failure_file_goes():
    assert output_dir({}) == "/opt/ml/output"
    assert output_dir({"SAGEMAKER_BASE_DIR": "/b"}) == "/b/output"
    assert output_dir({"SM_OUTPUT_DIR": "/o", "SAGEMAKER_BASE_DIR": "/b"}) == "/o"


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, logged):
    environ = {"SM_OUTPUT_DIR": str(tmp_path / "missing")}
    write_failure("text", environ)
    assert f"warning: cannot write {tmp_path}/missing/failure" in logged()
    write_failure("text", environ, quiet=True)
    assert logged() == ""


def test_space_is_reserved_and_a_file_without_text_does_not_stay(tmp_path, logged, monkeypatch):
    reserve, folder = [], tmp_path / "output"
    environ = {"SM_OUTPUT_DIR": str(folder)}
    monkeypatch.setattr(failure, "_reserve", reserve)
    prepare_failure(environ)
    assert os.fstat(reserve[0]).st_blocks * 512 >= 8192 and list(folder.iterdir()) == []

    def full(path, *_, **__):
        assert reserve == []
        Path(path).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(failure, "open", full, raising=False)
    write_failure("text", environ)
    assert "failure (No space left on device)" in logged()
    assert list(folder.iterdir()) == []


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
    write_failure("of this job \ud800", environ)
    assert logged() == f"launcher: {path} was left by an earlier run; it has been replaced.\n"
    write_failure("again", environ)
    assert path.read_text() == "of this job ?" and "kept as it is" in logged()


def test_a_scripts_own_file_of_this_run_stays_though_there_was_one_before(earlier, logged):
    path, environ = earlier
    before = os.stat(path)
    path.write_text("of the other job")  # which is as long
    os.utime(path, (before.st_atime, before.st_mtime + 1))
    write_failure("of the launcher", environ)
    assert path.read_text() == "of the other job" and "kept as it is" in logged()


def test_what_is_no_file_is_none_of_an_earlier_run(earlier):
    path, environ = earlier
    elsewhere = path.rename(path.with_name("elsewhere"))
    path.symlink_to(elsewhere)
    prepare_failure(environ)
    write_failure("text", environ)
    assert elsewhere.read_text() == "of the first job"
