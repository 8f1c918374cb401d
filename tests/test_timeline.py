"""`sm-launch timeline`: what each rank did when, from whatever hosts have left."""

import os

import pytest
from conftest import LAUNCHER, completed
from hypothesis import given
from hypothesis import strategies as st
from pages import EVENTS
from timelines import RUNNING, adds_up, large, line, write

from launcher.errors import LaunchError
from launcher_tools import timeline as tool
from launcher_tools import timeline_page
from launcher_tools.timeline_lanes import parsed, timeline

TIMELINE = [*LAUNCHER, "timeline"]


def drawn_of(*texts):
    logs = filter(None, (parsed(text)[0] for text in texts))
    return timeline({lines[0].host: lines for lines in logs})


def lane_of(found, rank):
    (lane,) = (one for one in found.lanes if one.rank == rank)
    return lane


def kinds(lane):
    return [(bar.kind, round(bar.start, 3), round(bar.seconds, 3)) for bar in lane.bars]


def marks(found, host, rank=None):
    return [found.events[number].kind for _, number in found.marks[host, rank]]


# What ranks did.


def test_a_job_of_16_hosts_with_a_stall_a_restart_and_a_stop():
    found = timeline({host: parsed(text)[0] for host, text in sorted(large().items())})
    assert (found.how, found.exit_code, found.attempts) == ("stopped", 143, 2)
    assert [*found.hosts] == [f"algo-{n}" for n in range(1, 17)]
    assert len(found.lanes) == 128 and adds_up(found)
    assert kinds(lane_of(found, 0)) == [
        ("joining", 0, 8.75), ("starting", 8.75, 6), ("training", 14.75, 115),
        ("waiting", 129.75, 90), ("training", 219.75, 181),
        ("restarting", 400.75, 9), ("starting", 409.75, 10),
        ("training", 419.75, 380), ("saving", 799.75, 10), ("ended", 809.75, 20),
    ]  # fmt: skip
    assert kinds(lane_of(found, 93))[6:8] == [("ended", 399.75, 1), ("restarting", 400.75, 9)]
    assert kinds(lane_of(found, 37))[3:5] == [("training", 15.12, 114.63), ("absent", 129.75, 90)]
    assert marks(found, "algo-5", 37) == ["stalled", "saved"]
    assert marks(found, "algo-12", 93) == ["failed", "saved"]
    assert (lane_of(found, 93).ended, found.utc % 86400) == ("exit 0", 16 * 3600)
    assert marks(found, "algo-4") == ["restart", "stop"]
    assert [(event.kind, event.where) for event in found.events] == [
        ("stalled", "algo-5, rank 37"), ("continued", "127 ranks"), ("failed", "algo-12, rank 93"),
        ("restart", "all hosts"), ("stop", "all hosts"), ("saved", "all ranks"),
        ("ended", "all hosts"),
    ]  # fmt: skip
    assert kinds(lane_of(found, 127))[0] == ("unknown", 0, 3.75)  # algo-16 began last
    assert lane_of(found, 0).bars[-2].words == "SIGTERM (signal 15)"


def test_hosts_are_aligned_where_an_attempt_begins():
    """Whatever their clocks say: algo-2 started 3 s later, and its clock is wrong."""
    one = line(0, "began", job="x") + line(5, "attempt") + line(8, "runs", rank=0)
    one += line(20, "restart") + line(25, "attempt", attempt=2) + line(40, "ended", attempt=2)
    two = line(0, "began", "algo-2", job="x") + line(2, "attempt", "algo-2")
    two += line(7, "runs", "algo-2", rank=1) + line(17.5, "restart", "algo-2")
    two += line(22, "attempt", "algo-2", attempt=2) + line(37, "ended", "algo-2", attempt=2)
    found = drawn_of(one, two.replace("T16:", "T05:"))
    assert found.seconds == 40 and adds_up(found)
    assert [bar[:3] for bar in lane_of(found, 1).bars] == [
        ("unknown", 0, 3), ("joining", 3, 2), ("starting", 5, 5), ("training", 10, 10.5),
        ("restarting", 20.5, 4.5), ("starting", 25, 15),
    ]  # fmt: skip


def test_a_line_is_not_earlier_than_those_before_it_in_its_file():
    text = line(0, "began", job="x") + line(9, "attempt") + line(7, "runs", rank=0)
    (lane,) = drawn_of(text + line(30, "ended", exit_code=0)).lanes
    assert kinds(lane) == [("joining", 0, 9), ("training", 9, 21)]


def test_the_rank_at_the_root_is_marked_and_not_those_that_failed_because_of_it():
    """They have a short line in the text: gloo's message has 35 words."""
    cause = "algo-1, rank 2 (local rank 2) failed with ValueError: x"
    also = "algo-1, rank 0 (local rank 0) failed with RuntimeError: Connection closed by peer"
    text = RUNNING + line(
        8, "failed", rank=0, cause=also + 35 * " words", text="Traceback\n  File y"
    )
    text += line(8.1, "failed", rank=2, cause=cause, exit_code=1, text="Traceback\n  File x")
    text += line(8.2, "restart", cause=f"attempt 1 of 2 failed after 8 s: {cause}; restarting")
    text += line(9, "ended", rank=0, exit_code=-15) + line(9, "ended", rank=2, exit_code=1)
    found = drawn_of(text)
    assert [marks(found, "algo-1", rank) for rank in (0, 2)] == [[], ["failed"]]
    assert [lane.ended for lane in found.lanes] == ["SIGTERM", "exit 1"]
    assert [event.kind for event in found.events] == ["also failed", "failed", "restart"]
    rows = tool.text(found, 80)
    (row,) = (row for row in rows if "also failed" in row)
    assert row.startswith(f"16:00:08Z  also failed: {also}") and len(row) < 200
    assert [row.strip() for row in rows if "  File " in row] == ["File x"]


def test_a_restart_is_listed_after_its_failure_though_another_host_notes_it_earlier():
    """Hosts are aligned but for the network's delay; and ranks may fail while they are stopped."""
    cause = "algo-2, rank 1 (local rank 0) failed with ValueError: x"
    one = line(0, "began", job="x") + line(1, "attempt") + line(7.99, "restart", cause=cause)
    two = line(0, "began", "algo-2", job="x") + line(1, "attempt", "algo-2")
    two += line(8, "failed", "algo-2", rank=1, cause=cause, exit_code=1)
    two += line(8.01, "restart", "algo-2", cause=cause)
    two += line(9.6, "failed", "algo-2", rank=2, cause="Connection closed by peer")
    found = drawn_of(one, two)
    assert [(event.kind, event.where) for event in found.events] == [
        ("failed", "algo-2, rank 1"), ("restart", "all hosts"), ("also failed", "algo-2, rank 2"),
    ]  # fmt: skip
    assert adds_up(found)


def test_events_are_listed_by_time_whatever_their_attempt():
    """algo-2 has never heard of attempt 2, nor of the failure; a rank fails during the stop."""
    cause = "algo-1, rank 0 (local rank 0) failed with ValueError: x"
    one = line(0, "began", job="x") + line(1, "attempt") + line(5, "failed", rank=0, cause=cause)
    one += line(5.1, "restart", cause=cause) + line(7, "stop")
    one += line(9, "failed", rank=1, cause="Connection closed by peer")
    one += line(10, "attempt", attempt=2) + line(20, "failed", attempt=2, rank=0, cause="z")
    two = line(0, "began", "algo-2", job="x") + line(1, "attempt", "algo-2")
    two += line(30, "ended", "algo-2", cause="algo-1 was lost", exit_code=69)
    found = drawn_of(two.replace("T16:", "T05:"), one)
    assert found.utc % 86400 == 16 * 3600  # by the host that knows of most attempts
    assert [(event.kind, event.line.seconds) for event in found.events] == [
        ("failed", 5), ("restart", 5.1), ("stop", 7), ("also failed", 9), ("failed", 20),
        ("ended", 30),
    ]  # fmt: skip


def test_a_stop_that_killed_ranks_is_no_save_and_is_listed():
    text = line(0, "began", job="x") + line(1, "attempt")
    text += "".join(line(2, "runs", rank=rank) for rank in (0, 1, 2))
    text += line(3, "ended", rank=2, exit_code=0)
    text += line(8, "stop", cause="SIGTERM (signal 15)")
    ends = line(9, "ended", rank=0, exit_code=-9) + line(9, "ended", rank=1, exit_code=-9)
    found = drawn_of(text + ends)
    for rank in (0, 1):
        assert [bar.kind for bar in lane_of(found, rank).bars][2:] == ["training", "stopping"]
    stop, unsaved = found.events
    assert (stop.kind, unsaved.kind) == ("stop", "unsaved")
    assert unsaved.summary == "algo-1, rank 0 and 1 more: SIGKILL (signal 9)"
    saved = "".join(line(8.9, "saved", rank=rank) for rank in (0, 1))
    for exit_code in ("0", "-9"):  # a rank may be killed when it has saved
        found = drawn_of(text + saved + ends.replace("-9", exit_code))
        assert [event.kind for event in found.events] == ["stop", "saved"]
        assert [bar.kind for bar in lane_of(found, 0).bars][2:] == ["training", "saving"]


def test_who_ended_before_the_stop_or_by_an_interrupt_is_not_called_unsaved():
    """A script may have saved when KeyboardInterrupt has left it, and Python ends so."""
    text = RUNNING + line(3, "restart", cause="y") + line(4, "ended", rank=0, exit_code=-15)
    text += line(5, "attempt", attempt=2) + line(6, "runs", rank=0, attempt=2)
    text += line(8, "stop", attempt=2) + line(9, "ended", rank=0, attempt=2, exit_code=-2)
    assert [event.kind for event in drawn_of(text).events] == ["restart", "stop"]


def test_a_hang_that_ends_the_job():
    """Rank 3 is absent: bars say why while it lasts, and no second time."""
    text = RUNNING + "".join(line(2, "runs", rank=rank) for rank in (1, 2, 3))
    why = "algo-1, rank 3 (local rank 3) is absent, where 3 others are waiting."
    cause = f"ranks have made no progress for 6.0 s: {why}"
    text += line(11, "stalled", rank=3, ranks=[0, 1, 2], since=5, cause=cause)
    text += line(11.1, "stacks", text="rank 3: here")
    cause = cause.replace("6.0 s", "19 s")
    text += line(24, "failed", rank=3, cause=cause, exit_code=75, text="exit code 75 (why)")
    text += line(24, "ending", cause=cause)
    text += "".join(line(25, "ended", rank=rank, exit_code=-15) for rank in range(4))
    found = drawn_of(text + line(26, "ended", cause=cause, exit_code=75))
    for rank, kind in ((0, "waiting"), (3, "absent")):
        assert [(bar.kind, bar.words) for bar in lane_of(found, rank).bars][3:] == [
            (kind, why), ("ending", ""), ("ended", "exit code -15"),
        ]  # fmt: skip

    rows = tool.text(found, 80)
    assert [row for row in rows if "stacks: all ranks" in row]
    (at,) = (number for number, row in enumerate(rows) if "  failed: " in row)
    assert "exit code" not in rows[at] and rows[at + 1].strip() == "exit code 75 (why)"  # once


def test_what_no_eye_would_find_has_no_place_in_the_legend():
    text = line(0, "began", job="x") + line(0.2, "attempt") + line(40, "ended", exit_code=0)
    assert [*drawn_of(text).means()] == ["starting"]
    assert [*drawn_of(text.replace("40", "4")).means()] == ["joining", "starting"]


@pytest.mark.parametrize(
    ("rank", "cause", "said"),
    [
        (1, "algo-1, rank 1 (local rank 1) failed", "algo-1, rank 1 (local rank 1) failed"),
        (1, "algo-1, rank 12 (local rank 4) failed", "algo-1, rank 1: algo-1, rank 12 (local rank"),
        (None, "algo-12 was lost", "algo-1: algo-12 was lost"),
        (None, "my-algo-1, rank 1 failed", "algo-1: my-algo-1, rank 1 failed"),
        (None, "attempt 1 failed: algo-1, rank 3 failed", "attempt 1 failed: algo-1, rank 3 fail"),
    ],
)
def test_where_an_event_happened_is_said_unless_its_words_say_it(rank, cause, said):
    failed = line(5, "failed", rank=rank, cause=cause)
    (event,) = drawn_of(line(0, "began", job="x") + failed).events
    assert event.summary.startswith(said)


def test_nothing_is_known_of_a_host_from_when_it_was_lost_or_its_file_ends():
    one, end = RUNNING, line(12, "ended", exit_code=69)
    two = line(0, "began", "algo-2", job="x") + line(1, "attempt", "algo-2")
    two += line(2, "runs", "algo-2", rank=1)
    running = drawn_of(two)
    assert running.how == "has not ended" and adds_up(running)
    assert lane_of(drawn_of(one + end, two), 1).bars[-1][:3] == ("unknown", 2, 10)
    one += line(9, "lost", "algo-2", cause="its launcher died") + end
    found = drawn_of(one, two)
    assert lane_of(found, 1).bars[-1] == ("unknown", 9, 3, 1, "lost: its launcher died")
    assert marks(found, "algo-2") == ["lost"] and adds_up(found)
    found = drawn_of(one, two + line(11, "ended", "algo-2", exit_code=69))  # it lived, cut off
    assert [bar.kind for bar in lane_of(found, 1).bars][-2:] == ["training", "ended"]


def test_a_stall_without_an_end_lasts_to_that_of_the_attempt():
    text = RUNNING + line(9, "stalled", ranks=[0], since=5) + line(20, "restart")
    text += line(21, "attempt", attempt=2) + line(22, "runs", rank=0, attempt=2)
    text += line(30, "ended", rank=0, attempt=2, exit_code=0)
    lane = lane_of(drawn_of(text), 0)
    assert [bar.kind for bar in lane.bars] == [
        "joining", "starting", "training", "waiting", "restarting", "starting", "training",
    ]  # fmt: skip


FIELDS = {
    "seconds": st.floats(0, 1000),
    "event": st.sampled_from(sorted(EVENTS)),
    "host": st.sampled_from(("algo-1", "algo-2")),
    "attempt": st.integers(0, 2),
    "rank": st.sampled_from((None, 0, 1, 9)),
    "ranks": st.lists(st.integers(0, 9), max_size=3),
    "since": st.floats(0, 1000),
}


@given(st.lists(st.fixed_dictionaries(FIELDS), min_size=1, max_size=30))
def test_bars_add_up_to_the_jobs_time_whatever_lines_there_are(rows):
    texts = ["", ""]
    for number, fields in enumerate(rows):
        texts[number % 2] += line(**fields, job="x")
    found = drawn_of(*texts)
    assert adds_up(found)
    assert tool.text(found, 80) and timeline_page.page(found, "t")


# What files may be.


BAD = ("", "{", "null", "[]", "7", '{"event": "runs"}', "[" * 100_000, '{"seconds": NaN}')
BAD += (line(1, "runs", rank=True), line(1e12, "runs"), line(1, "runs").replace("1,", "1e999,"))
BAD += (line(1, "runs", rank="3"), line(1, "runs", ranks=[-1]), line(1, "runs")[:-20], "\udcff")
BAD += (line(1, "runs", rank=-1), line(1, "runs", attempt=-1))


def test_lines_that_are_none_are_counted_and_cost_no_others():
    good = line(0, "began", job="x") + line(2, "runs", rank=0)
    lines, bad = parsed(good + "\n".join(text.rstrip("\n") for text in BAD) + "\n" + good[-90:])
    assert [one.event for one in lines][:2] == ["began", "runs"]
    assert bad == len([text for text in BAD if text.strip()]) + (len(lines) == 2)


def test_the_last_job_of_a_folder_is_drawn_and_what_was_not_read_is_noted(tmp_path):
    old = line(0, "began", job="old") + line(2, "runs", rank=5)
    new = line(60, "began", job="new") + line(62, "runs", rank=0)
    copy = new.replace('"rank": 0', '"rank": 7')
    files = {"algo-1": old + new + '{"cut off', "algo-1-copy": copy, "algo-2": ""}
    folder = write(tmp_path / "logs", {**files, "algo-5": old.replace("algo-1", "algo-5")})
    (folder / "algo-3").mkdir()
    (folder / "algo-3" / "events.jsonl").write_bytes(b"\xff\xfe\0")
    (folder / "algo-4" / "events.jsonl").mkdir(parents=True)
    (folder / "stdout.log").write_text("")
    found = tool.read(str(folder))
    assert (found.job, [(lane.host, lane.rank) for lane in found.lanes]) == ("new", [("algo-1", 0)])
    assert found.notes == [
        "algo-1/events.jsonl: 1 line unreadable or cut off",
        "algo-1-copy/events.jsonl belongs to algo-1, which has another file",
        "algo-3/events.jsonl: 1 line unreadable or cut off",
        "algo-5: its last job is old, not this one",
    ]


def test_a_host_whose_folder_is_closed_to_this_user_is_noted(tmp_path, monkeypatch):
    folder = write(tmp_path, {"algo-1": line(0, "began", job="x")})
    (folder / "algo-2").mkdir()  # as root sees it, who may enter all
    monkeypatch.setattr(os, "access", lambda path, _: not path.endswith("algo-2"))
    found = tool.read(str(folder))
    assert found.notes == ["algo-2/events.jsonl cannot be read (No such file or directory)"]


def test_the_folder_may_be_that_of_one_host_and_no_pipe_is_read(tmp_path):
    folder = write(tmp_path, {"algo-1": line(0, "began", job="x") + '{"cut off'}) / "algo-1"
    found = tool.read(str(folder))
    assert found.notes == ["algo-1/events.jsonl: 1 line unreadable or cut off"]
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    with pytest.raises(LaunchError, match=r"no host's events\.jsonl in .*/algo-1; expected"):
        tool.read(str(folder))


def test_the_file_with_the_output_of_a_failed_rank_is_named(tmp_path):
    """Or of its host, if ranks have no files of their own."""
    text = line(0, "began", job="x") + line(2, "failed", rank=3, cause="y", attempt=2)
    folder = write(tmp_path / "logs", {"algo-1": text})
    assert tool.read(str(folder)).events[0].output == ""
    for name in ("stderr.log", "attempt-2/rank-3.log"):
        (folder / "algo-1" / name).parent.mkdir(exist_ok=True)
        (folder / "algo-1" / name).touch()
        found = tool.read(str(folder))
        assert f"output: {folder}/algo-1/{name}" in "\n".join(tool.text(found, 80))


def test_a_file_that_names_no_job_is_of_the_job_that_the_others_name():
    """As of a launcher that was killed, whose first line is lost."""
    found = drawn_of(line(0, "began", job="x"), line(60, "runs", "algo-2", rank=1))
    assert (found.job, [*found.hosts], found.notes) == ("x", ["algo-1", "algo-2"], [])


# The command.


def test_the_page_and_the_text(tmp_path):
    folder = write(tmp_path / "logs", large())
    done = completed(*TIMELINE, folder)
    says = f"launcher: the timeline is in {folder}/timeline.html: open it in a browser.\n"
    assert done.stderr == says
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")
    done = completed(*TIMELINE, "--text", folder, COLUMNS="90")
    rows = done.stdout.splitlines()
    assert rows[0].startswith(
        "large (16 hosts, 128 ranks) stopped after 1 restart, 13 min: stopped"
    )
    assert all(len(row) <= 90 for row in rows[2:20]) and all(row.isprintable() for row in rows)
    (row,) = (row for row in rows if row.startswith("algo-12 93"))
    assert "X" in row and "S" in row
    assert "16:03:09Z  stalled: ranks have made no progress for 60" in done.stdout
    assert not os.path.exists("timeline.html")
    completed(*TIMELINE, "--text", "-o", "page.html", folder)
    assert os.path.exists("page.html")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: DIR; see sm-launch timeline --help."),
        (["--wide", "a"], "unrecognized arguments: --wide; see sm-launch timeline --help."),
        (["none"], "cannot read the folder none (No such file or directory)."),
        (["logs", "-o", "/dev/full"], "cannot write /dev/full (No space left on device); name"),
        (
            ["."],
            "no host's events.jsonl in .; expected the folder given to --launcher-log-dir or, ",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, argv, words):
    write(tmp_path / "logs", {"algo-1": RUNNING})
    done = completed(*TIMELINE, *argv, code=2)
    assert done.stderr.startswith(f"launcher: {words}") and done.stderr.count("\n") == 1
    assert not os.path.exists("output/failure")


# Of real jobs.


def test_local_with_a_log_dir_leaves_its_events_there(script, pretend_torch):
    """As the page says of that option; here the job fails before it has a rank."""
    pretend_torch("2.13.0")
    words = ("--hosts", "1", "--run-dir", "runs/x", "--", script(""), "--launcher-log-dir", "logs")
    done = completed(*LAUNCHER, "local", *words, code=69)
    assert "(raw data: logs/HOST/events.jsonl)" in done.stdout, done.stdout + done.stderr
    assert os.path.exists("logs/algo-1/events.jsonl") and os.path.exists("runs/x/timeline.html")
    assert not os.path.exists("runs/x/algo-1/events.jsonl")
