"""The last lines of a host's log."""

import math
import os
import re
import signal
import threading

import pytest
from jobs import job_of

from launcher.errors import Disposition
from launcher.host.folders import files_below
from launcher.result.causes import SUCCESS, Result, stopped
from launcher.run import machine, summary
from launcher.run.ranks import Rank
from launcher.run.state import Times

FAILED = Result(1, "algo-1, rank 0 failed\nexit code 1, 7 s after start\nTraceback ...\n")
TIMES = Times(100.0, started=101.0, attempt_began=101.0, trains=104.0, closes=110.0)
HANDLES, IGNORES, DEFAULT = Disposition.HANDLES, Disposition.IGNORES, Disposition.DEFAULT


def state(result=SUCCESS, hosts=("algo-1", "algo-2"), ranks=(), **known):
    """Return the last state; ranks are (what they do at the stop, exit code)."""
    made = {
        number: Rank(number, number, pid=71 + number, response=response, exit_code=code)
        for number, (response, code) in enumerate(ranks)
    }
    known = {"times": TIMES, "attempt": 1, **known}
    first = machine.begin(job_of("algo-1", hosts), 100.0)
    return first._replace(decided=result, ranks=made, **known)


def test_a_success():
    times = TIMES._replace(closes=130.2)
    (line,) = summary.lines(state(times=times), 130.5)
    assert line == "algo-1: every rank succeeded; 30 s in total: " + (
        "joining 1.0 s, starting 3.0 s, training 26 s."
    )
    (line,) = summary.lines(state(times=times), 230.2)  # torchrun did not end
    assert line.endswith(": joining 1.0 s, starting 3.0 s, training 26 s, ending 100 s.")


def test_after_a_restart_what_failed_is_lost():
    times = TIMES._replace(attempt_began=161.0, trains=163.0, closes=math.inf)
    (line,) = summary.lines(state(times=times, attempt=2), 170.0)
    assert line == "algo-1: every rank succeeded after 1 restart; 70 s in total: " + (
        "joining 1.0 s, lost to failed attempts 60 s, starting 2.0 s, training 7.0 s."
    )
    times = times._replace(closes=169.0)
    *_, line = summary.lines(state(FAILED, times=times, attempt=3, hosts=("algo-1",)), 170.0)
    assert line == "algo-1: exit code 1; after 2 restarts; 70 s in total: " + (
        "lost to failed attempts 61 s, starting 2.0 s, training 6.0 s, ending 1.0 s."
    )


def test_a_job_that_starts_nothing():
    times, stop = Times(100.0), stopped(signal.SIGTERM)
    (line,) = summary.lines(state(stop, times=times, attempt=0), 103.0)
    how = "algo-1: stopped by SIGTERM (signal 15); 3.0 s in total: "
    assert line == f"{how}joining 3.0 s, nothing was started."
    (line,) = summary.lines(state(stop, times=times, attempt=0, hosts=("algo-1",)), 103.0)
    assert line == f"{how}nothing was started."


INF = math.inf


@pytest.mark.parametrize("result", [SUCCESS, FAILED, stopped(15)])
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize(
    ("trains", "closes"), [(104, 110), (104, INF), (INF, 110), (INF, INF), (110, 104), (101, 101)]
)
def test_the_parts_add_up(trains, closes, attempt, result):
    """Whatever is known of them: ranks may end before they train, or before that is seen."""
    times = TIMES._replace(trains=float(trains), closes=float(closes))
    for hosts in (("algo-1",), ("algo-1", "algo-2")):
        last = state(result, hosts, times=times, attempt=attempt)
        parts = [seconds for _, seconds in summary.where_time_went(last, 110.5)]
        assert sum(parts) == pytest.approx(10.5) and min(parts) >= 0


UNSAVED = [
    # the signal, ranks, what is said of them, and what the ranks did
    (15, [(DEFAULT, -15)], "1 of 1 rank had no SIGTERM handler yet", "stopping"),
    (15, [(HANDLES, 143), (DEFAULT, -15)], "1 of 2 ranks had no SIGTERM handler yet", "saving"),
    (1, [(DEFAULT, -1), (HANDLES, 0)], "1 of 2 ranks had no SIGHUP handler yet", "saving"),
    # The first one's end is not of the stop.
    (15, [(None, -15), (DEFAULT, -15)], "1 of 1 rank had no SIGTERM handler yet", "stopping"),
    (15, [(HANDLES, -15)], "", "saving"),  # what has saved may end itself so
    (15, [(DEFAULT, -9), (IGNORES, -9), (HANDLES, 0)], "2 of 3 ranks did not exit", "saving"),
    (15, [(DEFAULT, None)], "", "saving"),
    (1, [(DEFAULT, -15)], "", "saving"),  # by another signal
    (15, [(None, 0), (None, 1)], "", "stopping"),
]


@pytest.mark.parametrize(("number", "ranks", "said", "did"), UNSAVED)
def test_ranks_that_a_stop_ended_unsaved_are_counted(number, ranks, said, did):
    *unsaved, last = summary.lines(state(stopped(number), ranks=ranks), 113.0)
    assert len(unsaved) == bool(said)
    for line in unsaved:
        assert line.startswith(f"algo-1: {said}")
        ends = r"within 100 s: killed\.|: killed without saving; install one at .*script\."
        assert re.search(f"(?:{ends})$", line)
    assert last.endswith(f"training 6.0 s, {did} 3.0 s.")
    for result in (FAILED, SUCCESS):
        lines = summary.lines(state(result, ranks=ranks), 113.0)
        assert not re.search(r"\d of \d rank", "".join(lines))


def test_a_rank_that_somebody_killed_before_its_grace_ended_did_not_exit_late():
    killed = Rank(0, 0, pid=71, response=HANDLES, exit_code=-9, ended_at=12.0)
    (last,) = summary.lines(state(stopped(15))._replace(ranks={0: killed}), 113.0)
    assert last.endswith("saving 3.0 s.")


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("", []),
        ("Traceback of a collective that broke for it\n", []),
        ("no restart: port 1 is taken\n", ["no restart: port 1 is taken."]),
    ],
)
def test_a_cause_that_the_log_has_is_not_said_again(line, more):
    failed = state(FAILED._replace(text=FAILED.text.replace("\nexit", f"\n{line}exit")))
    *said, last = summary.lines(failed, 113.0)
    assert said == ["algo-1, rank 0 failed", *more]
    assert last.startswith("algo-1: exit code 1; 13 s in total: ")
    assert summary.lines(failed._replace(cause=said[0]), 113.0) == [*more, last]


# What SageMaker would upload.


def test_files_are_counted_that_are_new(tmp_path):
    deep = tmp_path / "checkpoints" / "step-1"
    folders = [str(tmp_path / "model"), str(tmp_path / "checkpoints")]
    assert files_below(folders) == files_below(folders, 60.0) == 0
    deep.mkdir(parents=True)
    assert files_below(folders) == files_below(folders, 60.0) == 0
    for name in ("model.pt", "optimizer.pt"):
        (deep / name).write_text("x")
        os.utime(deep / name, (0, 0))  # as who copies a file leaves it
    assert files_below(folders) == files_below(folders, 60.0) == 2
    assert files_below(folders, -60.0) == 0


def test_a_folder_of_many_entries_or_that_hangs_is_not_known(tmp_path, monkeypatch):
    for number in range(2001):
        (tmp_path / str(number)).mkdir()
    assert files_below([str(tmp_path)]) == -1
    is_over = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(os, "walk", lambda _: is_over.wait() and [])
        assert files_below([str(tmp_path)]) == -1
        is_over.set()
