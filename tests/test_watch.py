"""What is logged of ranks without progress, and what a rank replies (launcher/watch)."""

import contextlib
import gc
import json
import math
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.job.options import Options
from launcher.peers.channel import Connection
from launcher.text.words import Log, Note
from launcher.watch import in_rank, judge, stacks, waits
from launcher.watch.host import Watch
from launcher.watch.waits import (
    ENDED,
    AllStacks,
    CollectStacks,
    Group,
    NoProgressReport,
    StalledRank,
)


def group(last, waits=0, op="all_reduce", size="4 Float", ranks="0-3", order=0, name="default_pg"):
    return Group(ranks, order, name, last, waits, op if waits else "", size if waits else "")


def rank(number, *groups, unchanged=60, **how):
    place = "load, data.py:88"
    return StalledRank(
        number, number % 2, **{"unchanged": unchanged, "place": place, **how}, groups=groups
    )


def found(ranks, since=0.0):
    reports = {
        one.rank: one._replace(host=f"algo-{one.rank // 2 + 1}", since=since) for one in ranks
    }
    return [one for one in waits.stalls_in(reports) if one.is_sure]


def begun(notify=60, timeout=math.inf, every=15, notes=True):
    """Return the coordinator's state at an attempt's begin."""
    options = Options(hang_notify=notify, hang_timeout=timeout, watch=every, notes=notes)
    return judge.Stalls(options)


def hears(state, host, ranks, now):
    return judge.reported(state, host, NoProgressReport(1, tuple(ranks)), (), now)[0]


def check(state, now):
    """Return the state, the log's lines, and whether stacks of a new stall are collected."""
    state, actions = judge.time_is_up(state, (), now)
    lines = [one.line for one in actions if isinstance(one, Log)]
    is_new = CollectStacks in map(type, actions)
    return state._replace(gathering=judge.Gathering()), lines, is_new


def counted(last, ranks="0-3", name="default_pg", waits=0):
    """A group of NCCL's."""
    return Group(ranks, 0, name, last, waits, is_counted=True)


IN_61 = group(61, 61)
IN_61_OF_3 = [rank(number, IN_61) for number in range(3)]
PAIR = {"ranks": "0,1", "name": ""}
SILENT = "does not answer: x"
KINDS = {
    "at": group,
    "in": lambda number: group(number, number),
    "begun": counted,  # of NCCL's groups
    "held": lambda number: counted(number, waits=number),
}


def ranks_of(text):
    """Return ranks by what each does: `in 61 | at 60, pair in 5 | at 60; does not answer: x`.

    It is in #61, or has begun #60; `pair` is the group of ranks 0 and 1.
    """
    ranks = []
    for number, one in enumerate(text.split("|")):
        does, _, trouble = one.strip().partition("; ")
        groups = []
        for words in filter(None, does.split(", ")):
            *pair, kind, last = words.split()
            found = KINDS[kind](int(last))
            groups.append(found._replace(**PAIR) if pair else found)
        ranks.append(rank(number, *groups, trouble=trouble))
    return ranks


SENTENCES = [
    (
        "in 61 | in 61 | in 61 | at 60",
        "algo-2, rank 3 (local rank 1) is absent from all_reduce #61 of the default group, where "
        "3 others are waiting; rank 3 is in load, data.py:88",
    ),
    (
        "in 61 | in 61 | at 60 | at 60",
        "algo-2, rank 2 (local rank 0), algo-2, rank 3 (local rank 1) are absent from all_reduce "
        "#61 of the default group, where 2 others are waiting; rank 2 is in load, data.py:88",
    ),
    (f"in 61 | in 61 | in 61 | at 60; {ENDED}", f"3 others are waiting; rank 3 {ENDED}"),
    (
        "in 61 | in 61 | in 61 | in 61",
        "all 4 ranks are in all_reduce #61 of the default group, which has not completed",
    ),
    (
        f"in 61 | in 61 | in 61 | in 61; {SILENT}",
        "3 ranks are in all_reduce #61 of the default group, which has not completed; rank 3 "
        f"{SILENT}",
    ),
    # The root of a broadcast goes on; it waits nowhere, and has begun all that there is.
    (
        "in 61 | in 61 | in 61 | at 61",
        "3 ranks are in all_reduce #61 of the default group, which has not completed",
    ),
    # Of other sizes: it has completed for rank 1.
    (
        "in 61 | in 62 | in 61 | in 61",
        "rank 1 is in all_reduce #62 (4 Float), 3 ranks are in all_reduce #61 (4 Float) of the "
        "default group, which have not completed",
    ),
    # Those ahead may be so by different numbers: they do not wait for the GPU after each.
    (
        "begun 61 | begun 75 | begun 75 | begun 60",
        "algo-2, rank 3 (local rank 1) has not begun collective #61 of the default group, which "
        "3 ranks have; rank 3 is in load, data.py:88",
    ),
    (
        f"begun 61 | begun 61 | begun 61 | ; {SILENT}",
        "algo-2, rank 3 (local rank 1) no longer takes part, and no rank has begun a collective "
        f"after #61 of the default group; rank 3 {SILENT}",
    ),
    # How far those were is not known, and rank 0 may wait for rank 3.
    (
        f"begun 61, pair begun 4 | begun 61, pair begun 5 | ; {ENDED} | ; {ENDED}",
        "rank 2 (local rank 0), algo-2, rank 3 (local rank 1) no longer take part, and no rank "
        "has begun a collective after #61 of the default group; rank 2 has ended with exit code 0",
    ),
]
OTHER_SENTENCES = [
    (
        [*IN_61_OF_3, rank(3, group(61, 61, size="5 Float"))],
        "rank 3 is in all_reduce #61 (5 Float), 3 ranks are in all_reduce #61 (4 Float) of the "
        "default group: all ranks must make the same call",
    ),
    (  # in which each rank may give as much as it likes
        [rank(number, group(61, 61, "scatter", f"{number} Float")) for number in range(4)],
        "all 4 ranks are in scatter #61 of the default group, which has not completed",
    ),
    (
        [
            rank(0, group(3, 3, **PAIR), group(1, **PAIR, order=1)),
            rank(1, group(2, **PAIR), group(2, 2, "barrier", "", **PAIR, order=1)),
            *(rank(number, group(9, 9, ranks="0-3")) for number in (2, 3)),  # who wait for both
        ],
        "ranks are waiting for each other: rank 0 in all_reduce #3 of group 1 of ranks 0,1, "
        "rank 1 in barrier #2 of group 2 of ranks 0,1",
    ),
    ([rank(0, group(9, 9, ranks="0,1", name="mesh_dp")), rank(1)], "group mesh_dp of ranks 0,1, w"),
]


# What ranks do; who is absent, from which collective, and how many wait in it.
ABSENT = [
    # A silent rank may wait for the other, and may have gone on from where it waited.
    (f"in 61 | at 60 | in 61 | at 60; {SILENT}", (1,), 61, 2),
    (f"in 61, pair at 5 | in 61, pair in 5; {SILENT} | in 61 | at 60; {SILENT}", (3,), 61, 3),
    (f"in 61 | in 61 | in 61 | ; {SILENT}", (3,), 61, 3),
    # Rank 1 was in another group, or made it, when it last replied.
    (f"in 61 | at 60, pair in 5; {SILENT} | in 61 | in 61", (1,), 61, 3),
    # Rank 1 may have begun #61 since: rank 2 surely has not.
    (f"in 61 | at 58; {SILENT} | at 60 | in 61", (2,), 61, 2),
    (f"begun 61 | begun 58; {SILENT} | begun 60 | begun 61", (2,), 61, 2),
    # Rank 0 is behind, but waits for rank 1 in another group.
    ("at 60, pair in 5 | at 60, pair at 4 | in 61 | in 61", (1,), 61, 2),
    # The recorder has lost rank 0's entries of this group.
    ("at 0 | in 61 | in 61 | in 61", (0,), 61, 3),
    # A rank that has gone on to the next one, while another is in this one and a third in none.
    ("in 61 | in 62 | at 61 | at 62", (2,), 62, 1),
    (f"begun 61 | begun 61 | begun 61 | begun 61; {SILENT}", (3,), 61, 3),
    # Of rank 3 it is known how far it was.
    (f"begun 61 | begun 60 | begun 61 | begun 61; {ENDED}", (1,), 61, 2),
    ("held 61 | held 61 | held 61 | begun 61", (), 61, 3),
    ("held 75 | held 75 | held 61 | held 61", (), 61, 4),  # the last two wait for GPUs after each
]


@pytest.mark.parametrize(("ranks", "root", "number", "waiting"), ABSENT)
def test_who_is_absent(ranks, root, number, waiting):
    (one,) = found(ranks_of(ranks))
    wait = one.waits[0]
    assert (one.root, wait.group.waits, len(wait.waiting)) == (root, number, waiting)


@pytest.mark.parametrize(("ranks", "words"), [*SENTENCES, *OTHER_SENTENCES])
def test_what_is_said(ranks, words):
    (one,) = found(ranks_of(ranks) if isinstance(ranks, str) else ranks)
    assert words in judge.reason_of(one, 0)


@pytest.mark.parametrize(
    "ranks",
    [
        "in 61 | in 61 | in 61",  # rank 3 moves
        "pair in 5 | in 61, pair at 4 | in 61",  # rank 0 waits for rank 1, which waits for rank 3
        "at 60 | at 60 | at 60 | at 60",  # in a long computation
        "begun 60 | begun 60 | begun 60 | begun 60",  # or in a graph's collectives
        "held 60 | held 60 | held 60 | ",  # of 3 no word
        f"begun 60 | begun 60 | begun 60 | ; {ENDED}",
        f"begun 0 | begun 0 | begun 0 | ; {SILENT}",
        "begun 61 | begun 60 | begun 60",  # rank 3 moves
        "",
    ],
)
def test_nothing_is_said(ranks):
    assert not found(ranks_of(ranks))


def report(watch, now, codes=(), state="S"):
    """Return what is reported now of ranks with these exit codes, None if nothing is."""
    return next(iter(watch.reports(dict(codes), lambda pid: state, now)), None)


def reported(watch, replies, until, codes=(), state="S"):
    """Yield when a host reports, and what: replies(request, now) are pids and their replies."""
    for now in range(until):
        request = watch.poll(now)
        for pid, fields in replies(request, now) if request else ():
            watch.replied(pid, fields, now)
        if found := report(watch, now, codes, state):
            yield now, found


def reply(request, unchanged, *calls, groups=(), **more):
    """Return a rank's reply: without progress for so long, amid these calls, the innermost last."""
    threads = [["", lines(*calls), False]]
    return {**request, "unchanged": unchanged, "threads": threads, "groups": [*groups], **more}


def watching(*pids, signal=0, cpu_of=lambda pid: 0.0):
    """Return the watch of a host's ranks, which are connected; rank 0 has pid 7."""
    watch = Watch(15, 60, cpu_of)
    for pid in pids:
        watch.started(pid, pid - 7, pid - 7, 0)
        watch.connected(pid, signal, 0)
    return watch


F = ("f", "/x/a.py", 3)


def test_a_rank_that_is_about_to_end():
    watch = watching(7)
    for now in (15, 30):
        watch.replied(7, reply(watch.poll(now), 35, F, ends=now == 30), now)
    (one,) = report(watch, 31).ranks
    # Not the 36 s of its own clock: for some of them all were suspended.
    assert (one.trouble, one.unchanged) == ("is about to end, in f, a.py:3", 31)


def test_a_rank_that_makes_progress_may_be_in_any_group():
    watch = watching(7, 8)
    request = watch.poll(15)
    watch.replied(7, request, 15)
    watch.replied(8, reply(request, 3, F, groups=[["0,1", 0, "", 9, 9]]), 15)
    watch.request_stacks(CollectStacks(1, False), 20)
    found = report(watch, 25, {7: None, 8: None})
    assert [one.has_more for one in found.ranks] == [True, False]


def lines(*calls):
    """Return calls as a rank sends them, the innermost last here."""
    return [f'  File "{path}", line {line} in {name}' for name, path, line in reversed(calls)]


UPLOAD = lines(("run", "/usr/lib/python3.11/threading.py", 982), ("upload", "/code/train.py", 4))
POOL = lines(("run", "/usr/lib/python3.11/concurrent/futures/process.py", 320))
SAVE = lines(("save", "/code/train.py", 9))
JOIN = lines(("_exit_function", "/usr/lib/python3.11/multiprocessing/util.py", 357))
CHILD = "P-1 (pid 99)"


@pytest.mark.parametrize(
    ("main", "threads", "child", "words"),
    [
        (
            JOIN,
            [["idle", POOL, True], ["uploader", UPLOAD, True], ["daemon", POOL, False]],
            CHILD,
            'thread "uploader", in upload, train.py:4, and 1 more',
        ),
        ([], [["idle", POOL, True]], "", 'thread "idle", in run, process.py:320'),
        ([], [["idle", POOL, True]], CHILD, f"it is waiting for its child process {CHILD}"),
        (SAVE, [], CHILD, "in its exit handlers, in save, train.py:9"),
    ],
)
def test_what_a_process_runs_on_in(main, threads, child, words):
    found = stacks.threads_of([["", main, False], *threads])
    assert stacks.kept_by(found, child) == words


LATE = {"poll": 0}  # a reply that comes too late


def returning(reply):
    """Return what a host reports, and when, of a rank whose script ends at 100 s.

    reply(now) is what it replies; {} is that there was progress.
    """
    watch = watching(7)
    watch.script_ended(7, 100)

    def replies(request, now):
        yield 7, {**request, **reply(now)}

    return [
        (now, one.runs_on and one.place, one.unchanged, found.others)
        for now, found in reported(watch, replies, 300, {7: None, 8: None})
        for one in found.ranks
    ]


def test_a_rank_that_runs_on_after_its_script_is_reported():
    threads = [["", SAVE, False], ["uploader", UPLOAD, True], ["a daemon's", POOL, False]]
    nothing = {"threads": threads, "groups": [], "child": ""}
    found = returning(lambda now: {**nothing, "unchanged": max(0, now - 95)})
    runs_on = 'thread "uploader", in upload, train.py:4'
    assert found == [(136, runs_on, 36, 1)]  # since its script's end
    assert returning(lambda now: {}) == []  # a thread trains on
    later = returning(lambda now: {**nothing, "unchanged": now - 160} if now >= 160 else {})
    assert later == [(196, runs_on, 36, 1)]
    child = {**nothing, "threads": [["", JOIN, False]], "child": CHILD}
    ((_, place, *_),) = returning(lambda now: {**child, "unchanged": max(0, now - 95)})
    assert place == f"it is waiting for its child process {CHILD}"
    # Python is gone, and with it the thread that replies.
    assert returning(lambda now: {} if now < 110 else LATE)[0][1] == "in its exit handlers"


def test_a_rank_that_cannot_be_polled_is_reported_but_not_before_it_could_have_ended():
    watch = Watch(15, 20, lambda pid: 0.0)
    watch.started(7, 3, 1, 100)
    watch.script_ended(7, 100)
    found = [(now, *one.ranks) for now, one in reported(watch, lambda *_: (), 200, {7: None})]
    somewhere = "in a thread, a child process or an exit handler"
    runs_on = StalledRank(3, 1, 31, place=somewhere, runs_on=True)
    assert [one for one in found if one[1:]] == [(131, runs_on)]


def test_a_rank_that_has_returned_while_others_wait_for_it_is_no_reason_to_restart():
    ranks = [*IN_61_OF_3, rank(3, group(60), runs_on=True)]
    state = hears(begun(timeout=60, every=1), "algo-1", ranks, 100)
    hang = check(state, 140)[0].hang
    assert hang.what.startswith("ranks have made no progress for") and not hang.may_restart


def test_a_rank_that_fails_while_another_runs_on_has_waited_for_nobody():
    state, _, _ = check(hears(begun(every=1), "algo-1", [rank(3, runs_on=True)], 100), 170)
    assert state.stalls and not judge.reason_of_wait(state, 0, "", 170)


def test_when_it_is_said():
    state = begun(notify=60, timeout=200, every=1)
    ranks = [rank(0, IN_61, unchanged=31), rank(1, IN_61, unchanged=30)]
    state = hears(state, "algo-1", ranks, 100)
    state, lines, _ = check(state, 101)
    assert not lines and judge.due(state) == math.inf
    ranks = [rank(2, IN_61, unchanged=30), rank(3, group(60), unchanged=33)]
    state = hears(state, "algo-2", ranks, 102)
    said = []
    while not state.hang:
        now = judge.due(state)
        state, lines, _ = check(state, now)
        said += [(now, line.partition(":")[0]) for line in lines]
        assert not judge.reason_of_wait(state, 0, "", 131)
    # Since 72 nothing has moved.
    assert said == [
        (132, "ranks have made no progress for 60 s"),
        (192, "ranks have made no progress for 120 s, for the same reason."),
    ]
    # The last moment at which what was seen before the time was over can become known.
    assert (now, state.hang.what[:37]) == (277, "ranks have made no progress for 205 s")
    assert judge.due(state) == math.inf
    assert "rank 3" in judge.reason_of_wait(state, 0, "", 133)
    for number in (3, 4):  # which do not wait
        assert not judge.reason_of_wait(state, number, "", 133)
    ranks = hears(state, "algo-1", [rank(0, IN_61)], 290)
    ranks, lines, _ = check(ranks._replace(hang=None), 291)
    # Torch's time-out, perhaps.
    assert "rank 3" in judge.reason_of_wait(ranks, 1, "", 293) and not lines
    state = hears(state, "algo-2", [rank(2, IN_61)], 290)
    state, lines, _ = check(state._replace(hang=None), 291)
    assert not judge.reason_of_wait(state, 0, "", 293) and not lines  # rank 3 has come
    assert judge.due(state) == 301
    state, lines, _ = check(state, 301)
    assert lines == ["ranks are making progress again after 219 s."] and not state.stalls


def test_where_ranks_are_that_move_is_no_stall():
    """Stacks have been requested: the report is of all ranks, and the next one follows a poll."""
    ranks = [*IN_61_OF_3, rank(3, group(60))]
    moving = tuple(one._replace(unchanged=0.01) for one in ranks)
    state = begun(notify=3, every=15)
    state, _ = judge.reported(state, "algo-1", NoProgressReport(1, moving, number=1), (), 100)
    state, lines, _ = check(state, 101)
    assert state.stalls and not lines and judge.due(state) >= 100 + 15 + 2
    state, lines, _ = check(hears(state, "algo-1", [], 116), 117)
    assert not (state.stalls or lines) and judge.due(state) == math.inf


def test_a_stall_that_begins_while_another_lasts_is_named_in_its_own_time():
    of_first, of_second = (
        [rank(n, group(9, 9, ranks=f"{n}-{n + 1}")), rank(n + 1, group(8, ranks=f"{n}-{n + 1}"))]
        for n in (0, 2)
    )
    state, said = begun(), []
    for now in range(100, 500):
        first = [one._replace(unchanged=now - 40) for one in of_first]
        state = hears(state, "algo-1", first if now < 310 else [], now)
        second = [one._replace(unchanged=now - 270) for one in of_second]
        state = hears(state, "algo-2", second if now >= 300 else [], now)
        if now >= judge.due(state):
            state, lines, _ = check(state, now)
            said += [(now, re.findall(r"rank \d", line)[:1]) for line in lines]
    assert said[0] == (101, ["rank 1"]) and said[3] == (330, ["rank 3"]), said
    assert [at for at, _ in said] == [101, 162, 284, 330, 390], said


def test_ranks_that_all_say_nothing_more_may_have_gone_on():
    """And then each keeps Python's lock, or Python ends."""
    state = begun(notify=60, timeout=90, every=1)
    ranks = [*IN_61_OF_3, rank(3, group(60))]
    state, lines, _ = check(hears(state, "algo-1", ranks, 100), 101)
    assert len(lines) == 1 and math.isfinite(judge.due(state))
    all_silent = [one._replace(trouble=SILENT) for one in ranks]
    state, lines, _ = check(hears(state, "algo-1", all_silent, 120), 121)
    assert not lines and judge.due(state) == math.inf
    # One that still waits has answered: it is the same stall.
    later = [one._replace(unchanged=360) for one in (ranks[0], *all_silent[1:])]
    state, lines, _ = check(hears(state, "algo-1", later, 400), 401)
    assert len(lines) == 1 and "no progress for 361 s" in lines[0] and state.hang


def test_what_a_host_polls_and_reports():
    def replies(request, now):
        yield 7, request  # it makes progress
        yield 8, reply(request, max(0, now - 15), F)
        if now < 40:
            yield 9, request  # and then it is stopped

    assert watching().due() == math.inf
    found = reported(watching(7, 8, 9), replies, 200, state="T")
    trouble = "does not answer: it is suspended (SIGSTOP)"
    two = StalledRank(1, 1, 31, "", "f, a.py:3")
    assert [(now, one.ranks) for now, one in found] == [
        (46, (two,)),
        (61, (two._replace(unchanged=46), StalledRank(2, 2, 31, trouble))),
    ]


def test_of_more_groups_than_a_message_holds_those_are_reported_in_which_a_rank_waits(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    groups = [[f"{n},{n + 1},{n + 9}", 0, 90 * "x", 9] for n in range(64)]
    reply, has_more = in_rank.Replier(None)._fitting(groups)
    assert has_more and len(json.dumps(reply)) < 17_000 / 8 and reply == groups[: len(reply)]
    long = [f"0,1,{2600 * '9'}", 0, "", 9, 9]
    assert in_rank.Replier(None)._fitting([long, *groups]) == (reply, True)


def test_what_many_ranks_of_a_host_report_is_one_message():
    pids = range(7, 71)
    watch, groups = watching(*pids), 13 * [["0-63", 0, "", 9]]  # as many as 64 ranks may send
    request = watch.request_stacks(CollectStacks(1, False), 15)
    calls = [(150 * "f", "/code/train.py", number) for number in range(40)]
    for pid in pids:
        watch.replied(pid, reply(request, 40, *calls, groups=groups, fact=150 * "n"), 15)
    assert len(json.dumps(report(watch, 16, dict.fromkeys(pids)))) < Connection.limit


def test_a_rank_of_more_groups_than_it_tells_is_absent_from_none_of_the_others():
    more = rank(0, group(5, ranks="0,1"), has_more=True)
    (one,) = found([more, rank(1, IN_61), rank(2, IN_61), rank(3, group(60))])
    assert one.root == (3,)


def test_a_rank_that_has_ended_or_gone_on_without_us():
    watch = watching(7, 8)
    for pid in (7, 8):
        watch.disconnected(pid)
    watch.poll(60)
    assert report(watch, 61, {7: 0}).ranks == (StalledRank(0, 0, 61, ENDED),)


@given(st.sets(st.integers(0, 9999), min_size=1).map(sorted))
@example(list(range(0, 64, 8)))
def test_ranks_are_read_as_they_were_written(ranks):
    assert list(Group(in_rank.ranges(ranks)).members) == ranks
    assert in_rank.ranges(range(0, 64, 8)) == "0-56:8"


@pytest.mark.parametrize("text", ["", "x", "0-", "-1", "0-7:0", "1,,2"])
def test_ranks_that_are_none(text):
    assert Group(text).members == () and len(Group("0-99999999").members) < 1 << 18


TORCHS = ("all_reduce", "/x/site-packages/torch/d.py", 9)
TRAIN = lines(("<module>", "/code/train.py", 30), TORCHS)
WARM, RANK = "/opt/launcher/warm/warm.py", "/t/sm-launch-7-0af/launcher/run/rank.py"
IN_FRONT = ("main", WARM, 300), ("main", RANK, 2)
LOAD = lines(*IN_FRONT, ("load", "/code/data.py", 88))
IDLE = lines(("run", "/usr/lib/python3.11/threading.py", 5))


def test_the_stacks_of_a_rank():
    threads = stacks.threads_of([["", TRAIN, 0], ["loader", LOAD, 0], ["monitor", IDLE, 0]])
    assert stacks.text_of(threads, 5000).splitlines() == [
        "  main thread:",
        '    File "/code/train.py", line 30, in <module>',
        '    File "/x/site-packages/torch/d.py", line 9, in all_reduce',
        "  thread loader:",
        '    File "/code/data.py", line 88, in load',
    ]


HOLDS = "  it does not answer: it is running code that holds Python's lock (the GIL)"


def test_a_request_for_stacks():
    watch = watching(6, 7, 8, 9, 10, signal=61)
    request = watch.poll(15)
    watch.replied(10, {**request, "signal": 0}, 15)  # its script has a handler of its own for that
    report(watch, 16)
    for number, may_signal in ((3, True), (4, False)):  # one of them allows the signal
        message = watch.request_stacks(CollectStacks(number, may_signal), 100)
    watch.disconnected(6)  # it has closed all descriptors, and may have others by these numbers
    watch.replied(7, {**message, "threads": [["", TRAIN, False]]}, 100)
    assert watch.signals_due(100.4) == {} and watch.due() == 100.5  # no other poll meanwhile
    assert watch.signals_due(100.5) == {8: 61, 9: 61} and watch.signals_due(100.6) == {}
    odd = f'  File "x", line {5000 * "9"} in x'
    for line in 2 * ("Stack (most recent call first):", '  File "/code/a.py", line 3 in f', odd):
        watch.wrote(8, line)  # twice, for two requests
    assert report(watch, 101) is None and report(watch, 101.5).number == 3
    assert watch.text(7, "S").startswith("  main thread:")
    assert watch.text(8, "S").splitlines() == [
        f"{HOLDS}.",
        "  main thread:",
        '    File "/code/a.py", line 3, in f',
    ]
    assert watch.text(9, "S") == f"{HOLDS}."
    assert "no stack" in watch.text(6, "S")


def test_ranks_that_get_no_signal_are_named_with_the_way_to_see_where_they_are():
    watch = watching(7, 8, signal=61)
    message = watch.request_stacks(CollectStacks(3, False), 100)
    watch.replied(7, {**message, "threads": [["", TRAIN, False]]}, 100)
    assert watch.signals_due(100.5) == {} and report(watch, 101.5)
    how = "`sm-launch stacks` shows where, by sending it a signal."
    assert watch.text(8, "S") == f"{HOLDS}; {how}"
    for state in ("Z", ""):  # its keeper has not said so yet
        assert watch.text(8, state) == "  it does not answer: it has ended."


def replies(state, host, number, now, *texts):
    """Return what is shown when a host has replied with its ranks' stacks."""
    report = NoProgressReport(1, (), number=number, stacks=texts)
    return judge.reported(state, host, report, ("algo-1", "algo-2"), now)


def test_stacks_of_all_hosts_for_users_and_the_log():
    state, asked = judge.collect(begun(), 50, may_signal=False, is_for_log=True)
    assert asked == (CollectStacks(1, False),)
    state, _ = replies(state, "algo-1", 1, 51, (0, "  a"))
    state, asked = judge.collect(state, 51, may_signal=True)  # by signals, too: collected again
    assert asked == (CollectStacks(2, True),) and state.gathering.deadline == 54
    assert judge.collect(state, 52, may_signal=True) == (state, ())
    state, _ = replies(state, "algo-1", 2, 52, (0, "  a"), (1, "  a"), (2, "  b"), (3, "  a"))
    assert replies(state, "algo-2", 1, 52, (4, "  too late"))[1] == ()
    lines = ("5 ranks (0-1, 3-5):", "  a", "rank 2:", "  b")
    done, told = replies(state, "algo-2", 2, 53, (4, "  a"), (5, "  a"))
    shown = (*map(Log, lines), Note("stacks", text="\n".join(lines)), AllStacks(lines))
    assert told == shown and done.gathering == judge.Gathering(2)
    late = NoProgressReport(1, (), number=2, stacks=((4, "  a"),))
    assert judge.reported(done, "algo-2", late, ("algo-2",), 53)[1] == ()  # they have been shown
    _, told = judge.time_is_up(state, ("algo-1", "algo-2"), 54)
    assert told[-1].lines[-1] == "no answer within 3 s from algo-2."


def test_of_long_stacks_the_rarest_and_the_innermost_calls_are_kept():
    deep = lines(*((f"f{depth}", f"/code/{150 * 'x'}.py", depth) for depth in range(60)))
    text = stacks.text_of(stacks.threads_of([["", deep, False]]), 5000).splitlines()
    assert text[0] == "  main thread:" and 10 < len(text) < 60 and text[-1].endswith("in f59")
    many = {str(number): ((number, f"  {number}"),) for number in range(1000)}
    shown = stacks.shown({**many, "some": [(number, "  x") for number in range(1001, 1017)]}, [])
    assert shown[0] == "801 more stacks, of as many ranks or more, are omitted."
    assert len(shown) == 401 and shown[-2:] == ["rank 999:", "  999"]
    long = {str(number): ((number, f"  {number}" + 4000 * "\u20ac"),) for number in range(64)}
    assert len(json.dumps(stacks.shown(long, []))) < 60_000


@pytest.mark.parametrize(("version", "is_off"), [((3, 11, 7), True), ((3, 12, 1), False)])
def test_garbage_is_collected_while_frames_are_read_but_in_python_3_11(
    monkeypatch, version, is_off
):
    collects = []
    frames = SimpleNamespace(
        version_info=version, _current_frames=lambda: collects.append(gc.isenabled()) or {}
    )
    monkeypatch.setattr(in_rank, "sys", frames)
    assert in_rank.of_threads("_current_frames") == {}
    assert collects == [not is_off] and gc.isenabled()


class Strange(Exception):
    def __str__(self):
        raise AssertionError("no code of the script may run in the thread that replies")

    args = property(__str__)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="no earlier Python tells")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("loss\nis nan"), "ValueError: loss\nis nan"),
        (OSError(28, "No space left", "/tmp/x"), "OSError: No space left"),
        (Strange("a", 5, Strange()), f"{__name__}.Strange: a"),
        (ValueError(600 * "x"), f"ValueError: {200 * 'x'}"),
        (RuntimeError(), "RuntimeError"),
        (ImportError("no apex"), ""),  # a program may run on in its handler
        (StopIteration(), ""),
    ],
)
def test_the_exception_that_a_thread_handles(error, words):
    def fail():
        raise error

    seen = []
    with contextlib.suppress(Exception):
        try:
            fail()
        finally:
            seen.append(in_rank.handled(threading.get_ident()))
    line = fail.__code__.co_firstlineno + 1
    assert seen == [words and f"{words}, raised in fail, test_watch.py:{line}"]
    assert in_rank.handled(threading.get_ident()) == ""


def test_the_fact_about_a_stalled_rank():
    """A Pool whose worker was killed waits for ever, and says nothing."""
    elsewhere, handles, oom = "rank 0 waits elsewhere", "rank 0 is handling x", "out of memory"
    for fact, handled, expected in (
        (elsewhere, handles, elsewhere),
        ("", handles, handles),
        ("", "", oom),
    ):
        watch = watching(7)
        watch.replied(7, reply(watch.poll(60), 40, fact=fact, handles=handled), 60)
        (found,) = watch.reports({}, lambda pid: "S", 61, oom)
        assert found.ranks[0].fact == expected


def entry(number, **how):
    """Return an entry of torch's flight recorder, as of torch 2.13."""
    about = {"collective_seq_id": number, "op_id": number, "pg_id": 0, "is_p2p": False}
    sizes = {"input_sizes": [[4, 2]], "input_dtypes": ["Float"]}
    name = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    return {"retired": True, **about, **sizes, **name, **how}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], (0, 0, "", "")),  # the recorder's buffer has no entry of this group any more
        ([entry(12), entry(13, retired=False)], (0, 0, "", "")),  # these were of another one
        ([entry(1), entry(2)], (2, 0, "", "")),
        ([entry(1), entry(2, retired=False)], (2, 2, "all_reduce", "4x2 Float")),
        ([entry(2, retired=False), entry(3, retired=False)], (3, 2, "all_reduce", "4x2 Float")),
        ([entry(1, retired=False, is_p2p=True), entry(1)], (1, 0, "", "")),
        ([entry(9, retired=False), entry(1, pg_id=3)], (1, 0, "", "")),  # a group that is gone
        ([entry(1, retired=False, input_sizes=[], input_dtypes=[])], (1, 1, "all_reduce", "")),
    ],
)
def test_how_far_a_group_is(entries, expected):
    said = in_rank.summary(entries, 9)
    assert (*said, "", "")[:4] == expected


def test_groups_in_which_a_rank_waits_come_first():
    world, other = a_group("cpu:gloo"), a_group("cpu:gloo")
    (one,) = other.pg_group_ranks
    world.pg_group_ranks[one], world.pg_backend_config[one] = {1: 0, 2: 1}, "cpu:gloo"
    entries = [entry(3), entry(4, process_group=["1", ""], retired=False)]
    world.pg_names[one] = "1"
    said = [Group(*fields) for fields in in_rank.groups(world, entries, {})]
    assert [(group.ranks, group.waits) for group in said] == [("1,2", 4), ("0,1", 0)]


def test_a_group_of_which_the_recorder_holds_nothing_has_begun_nothing():
    entries = [entry(3, process_group=["1", ""])]
    (said,) = groups_of("cpu:gloo", entries)
    assert (said.ranks, said.order, said.last) == ("0,1", 0, 0)


def a_group(backends):
    """Return torch's world, of one group, of ranks 0 and 1, that has begun 9 operations."""

    class ProcessGroup:
        group_desc = "mesh_dp"

        def _get_sequence_number_for_group(self):
            return 9

    one = ProcessGroup()
    return SimpleNamespace(
        pg_names={one: "0"},
        pg_group_ranks={one: {1: 1, 0: 0}},
        pg_backend_config={one: backends},
    )


def groups_of(backends, entries):
    return [Group(*fields) for fields in in_rank.groups(a_group(backends), entries, {})]


@pytest.mark.parametrize(
    ("of_backend", "enqueued", "completed", "waits"),
    [
        ({"uid": 2}, "9", "8", 9),
        ({"uid": 2}, "9", "9", 0),
        ({"uid": 2}, "4", "3", 0),  # a send's number, or in a graph
        ({"uid": 2}, None, None, 0),  # the recorder is off
        ({}, "9", "8", 0),  # of torch 2.15: the status is another class's
    ],
)
def test_whether_the_last_collective_of_nccls_has_ended(
    monkeypatch, of_backend, enqueued, completed, waits
):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str))
    world = a_group("cuda:nccl")
    (one,) = world.pg_backend_config
    one._get_backend = {"cuda": SimpleNamespace(**of_backend)}.get
    numbers = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
    status = {"1": {}, "2": numbers} if enqueued else {}
    assert in_rank.counted(one, status) == [9, waits, "", "", True]


@pytest.mark.parametrize(
    ("backends", "version", "expected"),
    [
        ("cuda:nccl", (2, 6), [(9, True)]),
        ("cuda:nccl", (2, 5, 1), [(0, False)]),  # there a batch of sends counted, too
        ("cpu:gloo,cuda:nccl", (2, 15), [(9, True), (1, False)]),
        ("cpu:gloo,cuda:other", (2, 13), [(1, False)]),
    ],
)
def test_of_which_groups_it_is_only_counted(monkeypatch, backends, version, expected):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    other = entry(2, profiling_name="other:all_reduce", retired=False)
    entries = [entry(1), other]
    said = groups_of(backends, entries if "gloo" in backends else [])
    assert [(one.last, one.is_counted) for one in said] == expected


# Before the first collective.

MAKING = Group("0-3", -1, "", 1, 1, "init_process_group")
MEETS = "but this job's ranks meet at algo-1:29500: the script"
ELSEWHERE = f"rank 0 waits at localhost:12355, {MEETS} sets MASTER_PORT"


def still(place):
    """Return ranks 1 and 2, which stand still there before any collective."""
    return [rank(number, place=place, is_still=True, unchanged=64) for number in (1, 2)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [*(rank(number, MAKING) for number in range(3)), rank(3)],
            "rank 3 (local rank 1) has not joined init_process_group of ranks 0-3, where 3 others "
            "are waiting; rank 3 is in load, data.py:88.",
        ),
        (
            [rank(number, MAKING, fact="" if number else ELSEWHERE) for number in range(4)],
            "all 4 ranks are in init_process_group of ranks 0-3, which has not completed; "
            f"{ELSEWHERE}.",
        ),
        (
            still("wait, file_baton.py:50"),
            "rank 1 has begun no collective: it is in wait, file_baton.py:50, for 65 s (a lock "
            "file of a run that was killed?); the same applies to 1 more rank.",
        ),
        (still("load_block, unlocked.py:8"), "8, for 65 s; the same"),  # not every lock is a file
    ],
)
def test_what_keeps_ranks_from_their_first_collective_is_said_but_ends_nothing(ranks, words):
    state = hears(begun(notify=60, timeout=60, every=1), "algo-1", ranks, 100)
    for now in (101, 170):
        state, said, is_new = check(state, now)
        assert len(said) == 1 and (words in said[0] or now > 101) and not is_new and not state.hang
    quiet = hears(begun(notify=60, notes=False), "algo-1", ranks, 100)
    assert check(quiet, 101)[1] == []


def test_of_a_stall_only_what_has_changed_is_said_again_and_so_at_its_hang():
    state, said = begun(notify=60, timeout=395), []
    does = {100: "load", 150: "load", 200: "save", 330: "wait"}
    for now in range(100, 600):
        if now in does:
            last = rank(3, group(60), place=f"{does[now]}, train.py:9")
            known = [one._replace(unchanged=now - 40) for one in (*IN_61_OF_3, last)]
            state = hears(state, "algo-1", known, now)
        if now >= judge.due(state):
            state, lines, _ = check(state, now)
            said += lines
    reasons = [re.findall(r"same reason|in \w+(?=, train)", line)[0] for line in said]
    assert reasons == ["in load", "same reason", "in save", "in wait"], said
    assert said[3] == state.hang.what


LOADS = ("load_extension", "/code/train.py", 9)
BATON = "/usr/lib/python3.11/site-packages/torch/utils/file_baton.py"
STILL = lines(LOADS, ("wait", BATON, 50))


def standing_still(cpu, calls=lambda now: STILL):
    """Return what a host reports of a rank in no group; cpu(now) is how much it has used."""
    clock = [0]

    def replies(request, now):
        clock[0] = now
        threads = [["", calls(now), False]]
        yield 7, {**request, "unchanged": now, "threads": threads, "fact": ""}

    found = reported(watching(7, cpu_of=lambda pid: cpu(clock[0])), replies, 200, {7: None})
    return [(now, one) for now, said in found for one in said.ranks if one.is_still]


def test_a_rank_that_stands_still_before_its_first_collective():
    seen = standing_still(lambda now: 0.0)
    where = "wait, file_baton.py:50, called in load_extension, train.py:9"
    assert (seen[0][0], seen[0][1].place, seen[0][1].unchanged) == (46, where, 31)
    # Python's own library says less: here, which worker it is that sends nothing.
    loader = ("get", "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 7)
    selector = ("select", "/usr/lib/python3.11/selectors.py", 415)
    of_workers = standing_still(lambda now: 0.0, lambda now: lines(LOADS, loader, selector))
    assert of_workers[0][1].place == "get, dataloader.py:7, called in load_extension, train.py:9"
    # The lines of a loop that waits are one place.
    assert standing_still(lambda now: 0.0, lambda now: lines(LOADS, ("wait", BATON, 50 + now % 2)))
    assert not standing_still(lambda now: 0.03 * now)  # it, or a child of it, works
    assert not standing_still(
        lambda now: 0.0, lambda now: lines((f"load{now}", "/code/train.py", 8), LOADS)
    )


GIVEN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "algo-1", "MASTER_PORT": "29500"}
GIVEN["GROUP_RANK"] = "0"
URL = "tcp://10.0.0.7:29500?x=1"


@pytest.mark.parametrize(
    ("sets", "passes", "words"),
    [
        ({"MASTER_ADDR": "localhost"}, {"rank": 0, "world_size": 2}, ""),
        ({"MASTER_PORT": "12355"}, {"init_method": None}, ""),  # it was given a store
        ({"MASTER_PORT": "12355", "MASTER_ADDR": "localhost"}, {}, ELSEWHERE),
        ({}, {"init_method": URL}, f"rank 0 waits at 10.0.0.7:29500, {MEETS} passes init_method"),
        ({}, {"rank": 1}, "rank 0 waits with RANK=1, but was given 0: the script passes rank"),
    ],
)
def test_a_rank_that_waits_elsewhere(monkeypatch, sets, passes, words):
    for name, value in {**GIVEN, **sets}.items():
        monkeypatch.setenv(name, value)
    assert in_rank.elsewhere(GIVEN, {"init_method": "env://", "rank": -1, **passes}) == words


TIMED_OUT, CLOSED = "RuntimeError: Timed out waiting 8000ms for recv", "Connection closed by peer"
TWO = {"ranks": "0,1"}


@pytest.mark.parametrize(
    ("first", "other", "why"),
    [
        (
            group(61, 61, **TWO),
            group(60, **TWO),
            "algo-1, rank 1 (local rank 1) is absent from all_reduce #61 of the default group, "
            "where 1 other is waiting; rank 1 is in load, data.py:88.",
        ),
        (
            group(61, 61, "broadcast", "1 Float", **TWO),
            group(61, 61, **TWO),
            "rank 0 is in broadcast #61 (1 Float), rank 1 is in all_reduce #61 (4 Float) of the "
            "default group: all ranks must make the same call.",
        ),
        # Perhaps this one has completed, and another call has timed out: monitored_barrier().
        (group(61, 61, **TWO), group(61, 61, **TWO), ""),
    ],
)
def test_a_timeout_before_any_notice_says_why_ranks_had_waited(first, other, why):
    state, asked = judge.failed(begun(), 10)
    assert asked == (CollectStacks(1, False),)
    report = NoProgressReport(1, (rank(0, first, unchanged=0), rank(1, other)), number=1)
    state, shown = judge.reported(state, "algo-1", report, {"algo-1"}, 11)
    assert shown == (AllStacks(("no rank is running.",)),)  # which nobody has requested
    assert judge.reason_of_wait(state, 0, TIMED_OUT, 13) == why
    assert not judge.reason_of_wait(state, 0, CLOSED, 13)


@pytest.mark.parametrize(
    ("other", "is_said"),
    [
        (rank(1), True),
        (rank(1, group(60)), False),  # it may train on in an `except`
        (rank(1, trouble=SILENT), False),
        (rank(0), False),
    ],
)
def test_a_rank_that_lost_another_names_the_exception_that_this_still_handles(other, is_said):
    words = "rank 1 is handling ValueError: loss is nan, raised in train, train.py:7"
    closed = (
        f"rank 2 is handling RuntimeError: [/b/gloo/transport/tcp/pair.cc] {CLOSED}, raised in f"
    )
    ranks = rank(2, fact=closed), other._replace(fact=words)
    state, _ = judge.failed(begun(), 10)
    state, _ = judge.reported(state, "algo-1", NoProgressReport(1, ranks, number=1), {"algo-1"}, 11)
    assert judge.reason_of_wait(state, 0, CLOSED, 13) == words * is_said


def test_a_rank_that_fails_is_reported_as_it_waited():
    watch = watching(7, 8)
    watch.failed(7, [["0,1", 0, "", 9, 9, "all_reduce"]])
    message = watch.request_stacks(CollectStacks(1, False), 20)
    for pid in (7, 8):  # the first is about to end
        watch.replied(pid, reply(message, 0, groups=[["0,1", 0, "", pid + 2]]), 20)
    found = report(watch, 20, {7: None, 8: None})
    assert [one.groups[0].waits for one in found.ranks] == [9, 0]


@pytest.mark.parametrize(
    ("had_group", "groups", "recorder", "is_isolated"),
    [
        (False, {}, None, True),
        (True, {}, {}, True),  # destroyed, and the recorder has nothing
        (True, {}, {"0": {}}, False),
        (True, {}, None, False),  # destroyed: nobody knows
        (True, {"one": "0"}, None, False),  # it has begun 9
    ],
)
def test_when_a_rank_was_isolated(monkeypatch, had_group, groups, recorder, is_isolated):
    monkeypatch.setenv("WORLD_SIZE", "2")
    world = a_group("cpu:gloo") if groups else SimpleNamespace(pg_group_ranks={}, pg_names={})
    world.pg_group_ranks[-100] = {0: 0, 1: 1}  # torch's mark of a group without this rank
    world.pg_map = groups
    module = SimpleNamespace(_world=world, _default_pg_init_method="env://" if had_group else None)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    dump = {"_dump_fr_trace_json": lambda *_: json.dumps({"pg_status": recorder})}
    core = SimpleNamespace(**dump if recorder is not None else {})
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", core)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    # What other tests have imported and run in this process counts for nothing.
    monkeypatch.setattr(in_rank, "_OTHER_WAYS", set())
    monkeypatch.setattr(in_rank, "_WORK_SECONDS", math.inf)
    replier = in_rank.Replier(None)
    assert replier.is_isolated() == is_isolated
    with monkeypatch.context() as patch:  # a thread that runs on may do its work
        patch.setattr(threading, "enumerate", lambda: 2 * [threading.main_thread()])
        assert not replier.is_isolated()
    replier.forked()  # and a child may
    assert not replier.is_isolated()


@pytest.mark.parametrize("function", ["recv", "all_reduce"])
def test_whether_a_rank_has_failed_in_its_last_collective(monkeypatch, function):
    told, module = [], SimpleNamespace(__file__="c10d.py")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    monkeypatch.setattr(in_rank, "groups_now", lambda *, has_failed: told.append(has_failed) or [])
    for file in (module.__file__, "train.py"):  # a function of the script's may have that name
        with pytest.raises(ZeroDivisionError) as raised:
            exec(compile(f"def {function}(): 1 / 0\n{function}()", file, "exec"), {})
        in_rank.Replier(None).failed(raised.value)
    assert told == [function == "all_reduce", True]
