"""events.jsonl: what launchers note of their job, in simulated jobs and on real disks."""

import json
import os
import random
import re
from unittest.mock import Mock

import pytest
from pages import EVENTS, FIELDS
from simulation.job import Job
from simulation.plan import AtStop, Fault, Plan, Script, What
from simulation.strategies import drawn
from timelines import adds_up

from launcher.host.journal import Journal
from launcher.run import supervisor
from launcher.text import background
from launcher.text.words import Note
from launcher_tools import timeline as tool


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Have lines written as they are noted, as where a container allows no more threads."""
    monkeypatch.setattr(background, "start", Mock(side_effect=RuntimeError))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Have all simulated hosts write below a folder."""
    monkeypatch.setattr(supervisor, "events_folder", lambda *_: str(tmp_path / "events"))
    return tmp_path / "events"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def noted_by(folder, host):
    """Return what a simulated host of a job has noted: all lines; rank, event and exit code."""
    found = lines(folder / host / "events.jsonl")
    return found, [(one["rank"], one["event"], one.get("exit_code")) for one in found]


def run(plan):
    job = Job(plan, trace=True)
    job.run()
    return job


def test_a_restart_and_a_failure_from_begin_to_end(folder):
    run(Plan(hosts=1, nproc=2, max_restarts=1, faults=(Fault(What.RAISES, 3.0, local_rank=1),)))
    found, noted = noted_by(folder, "algo-0001")
    assert noted[:3] == [(None, "began", None), (None, "joined", None), (None, "attempt", None)]
    assert sorted(noted[3:7]) == [(r, e, None) for r in (0, 1) for e in ("runs", "started")]
    assert noted[7][:2] == (1, "failed")
    names = [event for _, event, _ in noted]
    assert names.index("restart") < names.index("attempt", 8) and noted[-1] == (None, "ended", 0)
    restart = found[names.index("restart")]
    assert restart["cause"].startswith("attempt 1 of 2 failed after") and restart["attempt"] == 1


@pytest.mark.parametrize(
    ("at_stop", "saves"), [(AtStop.SAVES, True), (AtStop.DIES, False), (AtStop.IGNORES, False)]
)
def test_a_stop_is_noted_and_only_who_handled_it_has_saved(folder, at_stop, saves):
    run(Plan(hosts=2, script=Script(at_stop=at_stop), faults=(Fault(What.STOP, 3.0),)))
    for host, rank in (("algo-0001", 0), ("algo-0002", 1)):
        _, noted = noted_by(folder, host)
        assert (None, "stop", None) in noted
        assert ((rank, "saved", None) in noted) is saves
        assert noted[-1] == (None, "ended", 143)


def test_the_first_host_notes_a_lost_one(folder):
    run(Plan(hosts=2, faults=(Fault(What.LAUNCHER_KILLED, 3.0, host=1),)))
    found, _ = noted_by(folder, "algo-0001")
    (lost,) = (one for one in found if one["event"] == "lost")
    assert (lost["host"], lost["cause"]) == ("algo-0002", "its launcher died")


def test_whatever_happens_lines_are_in_order_and_say_how_the_job_ended(tmp_path):
    """And the bars that the timeline draws of them add up."""
    by = random.Random(0)
    for number in range(100):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "events_folder", lambda *_, at=folder: str(at))
            job = run(drawn(by))
        assert not folder.exists() or adds_up(tool.read(str(folder)))
        for machine in (one for one in job.machines if one.launcher):
            check(lines(folder / machine.name / "events.jsonl"), machine.launcher, job)


def check(noted, launcher, job):
    names = [one["event"] for one in noted]
    assert names[0] == "began" and names.count("began") == 1 and {*names} <= EVENTS
    assert all({*one} <= FIELDS for one in noted)
    assert [one["seconds"] for one in noted] == sorted(one["seconds"] for one in noted)
    assert not [line for line in job.watch.trace if "the job continues without it" in line]
    attempts = [one["attempt"] for one in noted if one["event"] == "attempt"]
    assert attempts == list(range(1, len(attempts) + 1)) and ("joined" in names) == bool(attempts)
    ends = [one for one in noted if one["event"] == "ended" and one["rank"] is None]
    if launcher.result is None:  # it was killed, or still runs
        assert not ends
    elif ends:  # not where the launcher has failed
        assert noted[-1] == ends[0] and len(ends) == 1
        assert ends[0]["exit_code"] == launcher.result.exit_code


def test_a_stall_its_end_and_a_hang(folder):
    """As the coordinator alone knows them: a rank stands still in the kernel, and another later."""
    stuck = Fault(What.STUCK, 4.0, host=1, local_rank=1, amount=30.0)
    faults, watch = (stuck, Fault(What.HANGS, 60.0, host=1)), {"watch": 5.0, "hang_timeout": 40.0}
    run(Plan(nproc=2, script=Script(seconds=100.0), faults=faults, **watch))
    kinds = ("stalled", "continued", "failed")
    found, _ = noted_by(folder, "algo-0001")
    noted = stalled, continued, again, hang = [one for one in found if one["event"] in kinds]
    assert [one["event"] for one in noted] == ["stalled", "continued", "stalled", "failed"]
    assert [one["host"] for one in noted] == ["algo-0002", "algo-0001", "algo-0002", "algo-0002"]
    assert [one["rank"] for one in noted] == [3, None, 2, 2] and hang["exit_code"] == 75
    assert (stalled["ranks"], continued["ranks"], again["ranks"]) == ([0, 1, 2],) * 2 + ([0, 1, 3],)
    # Not at once: a time-out of torch's may have ended it.
    assert (continued["seconds"], continued["since"]) == pytest.approx((48.2, 38.2), abs=1)
    assert stalled["since"] == pytest.approx(3.6, abs=1) and again["since"] > 50
    for one, seconds in ((stalled, r"\d\.\d"), (hang, "5\\d")):
        assert re.match(
            f"ranks have made no progress for {seconds} s: algo-0002, rank ", one["cause"]
        )


# The file.


NOTE = Note("failed", 3, "launcher: a\nb", 1, since=12.5)


def journal_in(folder, log=pytest.fail):
    return Journal(str(folder), "algo-1", 10.0, log)


def test_a_line_has_its_fields_and_no_empty_ones(tmp_path):
    journal = journal_in(tmp_path / "new")
    journal.note(NOTE, 1, 11.5)
    journal.flush()
    (line,) = lines(tmp_path / "new" / "algo-1" / "events.jsonl")
    utc = line.pop("utc")
    assert len(utc) == len("2026-11-22T16:56:12.345Z") and utc[10] + utc[-1] == "TZ"
    assert line == {
        "seconds": 1.5, "host": "algo-1", "attempt": 1, "rank": 3, "event": "failed",
        "cause": "a", "exit_code": 1, "since": 2.5,
    }  # fmt: skip
    assert {"utc", "seconds", "attempt", *Note._fields} == FIELDS


def test_a_line_that_was_cut_off_costs_the_next_job_none(tmp_path):
    path = tmp_path / "algo-1" / "events.jsonl"
    path.parent.mkdir()
    path.write_text('{"event": "beg')
    journal = journal_in(tmp_path)
    journal.note(NOTE, 1, 11.5)
    journal.flush()
    assert [line[:8] for line in path.read_text().splitlines()] == ['{"event"', '{"utc": ']


def full(folder):
    folder.mkdir()
    (folder / "events.jsonl").symlink_to("/dev/full")


def pipe(folder):
    folder.mkdir()
    os.mkfifo(folder / "events.jsonl")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (full, "No space left on device"),
        (pipe, "UnsupportedOperation: File or stream is not seekable."),
    ],
)
def test_what_cannot_be_written_is_one_line_of_the_log(tmp_path, make, why):
    make(tmp_path / "algo-1")
    log = []
    journal = journal_in(tmp_path, log.append)
    for _ in range(1000):
        journal.note(NOTE, 1, 11.5)
    journal.flush()
    where = f"{tmp_path}/algo-1/events.jsonl"
    assert log == [f"cannot write {where} ({why}); the job continues without it."]


def test_where_they_are_written_if_there_is_a_folder():
    journal_in("").note(NOTE, 1, 11.5)
    assert not os.path.exists("algo-1")
    given = {"LAUNCHER_EVENTS_DIR": "/run"}
    assert supervisor.events_folder({}, "logs") == "logs"
    assert supervisor.events_folder(given, "logs") == "/run"
    # Below another launcher, whose lines these would follow.
    assert supervisor.events_folder({**given, "LAUNCHER_JOB_MARK": "x"}, "logs") == ""
