"""What is logged of ranks without progress, and what a rank replies (launcher/watch)."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.watch import in_rank, judge, overview, progress, sentences, stacks, waits
from launcher.watch.host import Watch
from launcher.watch.progress import ENDED, Group, StalledRank


def group(last, waits=0, op="all_reduce", size="4 Float", ranks="0-3", order=0, name="default_pg"):
    return Group(ranks, order, name, last, waits, op if waits else "", size if waits else "")


def rank(number, *groups, unchanged=60, **how):
    place = "load, data.py:88"
    return StalledRank(
        number, number % 2, **{"unchanged": unchanged, "place": place, **how}, groups=groups
    )


def found(ranks, since=0.0):
    reports = {one.rank: waits.Reported(f"algo-{one.rank // 2 + 1}", one, since) for one in ranks}
    return [one for one in waits.findings(reports) if one.is_sure]


def counted(last, ranks="0-3", name="default_pg", waits=0):
    """A group of NCCL's."""
    return Group(ranks, 0, name, last, waits, is_counted=True)


IN_61 = group(61, 61)
PAIR = {"ranks": "0,1", "name": ""}
SENTENCES = [
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60))],
        "algo-2, rank 3 (local rank 1) is absent from all_reduce #61 of the default group, where "
        "3 others are waiting; rank 3 is in load, data.py:88",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, group(60)), rank(3, group(60), place="")],
        "algo-2, rank 2 (local rank 0), algo-2, rank 3 (local rank 1) are absent from all_reduce "
        "#61 of the default group, where 2 others are waiting; rank 2 is in load, data.py:88",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, trouble="does not answer: x")],
        "where 3 others are waiting; rank 3 does not answer: x",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60), trouble=ENDED)],
        "where 3 others are waiting; rank 3 has ended with exit code 0",
    ),
    # Rank 0 has not begun #61, but waits for rank 1 in another group.
    (
        [
            rank(0, group(60), group(5, 5, **PAIR)),
            rank(1, group(60), group(4, **PAIR)),
            rank(2, IN_61),
            rank(3, IN_61),
        ],
        "algo-1, rank 1 (local rank 1) is absent from all_reduce #61 of the default group",
    ),
    (
        [rank(number, IN_61) for number in range(4)],
        "all 4 ranks are in all_reduce #61 of the default group, which has not completed",
    ),
    # The root of a broadcast goes on; it waits nowhere, and has begun all that there is.
    (
        [*(rank(number, IN_61) for number in range(3)), rank(3, group(61))],
        "3 ranks of 4 are in all_reduce #61 of the default group, which has not completed",
    ),
    (
        [*(rank(number, IN_61) for number in range(3)), rank(3, group(61, 61, "broadcast"))],
        "rank 3 is in broadcast #61 (4 Float), 3 ranks are in all_reduce #61 (4 Float) of the "
        "default group: all ranks must make the same call",
    ),
    (
        [
            rank(0, group(3, 3, **PAIR), group(1, **PAIR, order=1)),
            rank(1, group(2, **PAIR), group(2, 2, "barrier", "", **PAIR, order=1)),
            *(rank(number, group(9, 9, ranks="0-3")) for number in (2, 3)),  # who wait for both
        ],
        "ranks are waiting for each other: rank 0 in all_reduce #3 of the group of ranks 0,1, "
        "rank 1 in "
        "barrier #2 of group 2 of ranks 0,1",
    ),
    ([rank(0, group(9, 9, ranks="0,1", name="mesh_dp")), rank(1)], "group mesh_dp (ranks 0,1), w"),
    # Those ahead may be so by different numbers: they do not wait for the GPU after each.
    (
        [rank(0, counted(61)), rank(1, counted(75)), rank(2, counted(75)), rank(3, counted(60))],
        "algo-2, rank 3 (local rank 1) has not begun collective #61 of the default group, which "
        "3 ranks have; rank 3 is in load, data.py:88",
    ),
    # Rank 0 is behind, but waits for rank 1 in another group.
    (
        [
            rank(0, counted(60), counted(5, "0,1", "")),
            rank(1, counted(60), counted(4, "0,1", "")),
            rank(2, counted(61)),
            rank(3, counted(61)),
        ],
        "algo-1, rank 1 (local rank 1) has not begun collective #61 of the default group",
    ),
    (
        [
            *(rank(number, counted(61)) for number in range(3)),
            rank(3, trouble="does not answer: x"),
        ],
        "algo-2, rank 3 (local rank 1) does not answer: x; no rank has begun "
        "a collective after #61 of the default group",
    ),
    (
        [rank(number, counted(61, waits=61)) for number in range(4)],
        "all 4 ranks have begun collective #61 of the default group, which has not completed",
    ),
    (
        [*(rank(number, counted(61, waits=61)) for number in range(3)), rank(3, counted(61))],
        "have begun collective #61 of the default group, which has not completed on 3 of them",
    ),
    # Ranks 2 and 3 wait for their GPUs after each.
    (
        [
            *(rank(number, counted(75, waits=75)) for number in range(2)),
            *(rank(number, counted(61, waits=61)) for number in (2, 3)),
        ],
        "all 4 ranks have begun collective #61 of the default group, which has not completed",
    ),
    # Of rank 3 it is known how far it was.
    (
        [
            rank(0, counted(61)),
            rank(1, counted(60)),
            rank(2, counted(61)),
            rank(3, counted(61), trouble=ENDED),
        ],
        "algo-1, rank 1 (local rank 1) has not begun collective #61 of the default group, which "
        "2 ranks have; rank 1 is in load, data.py:88",
    ),
    # How far those were is not known, and rank 0 may wait for rank 3.
    (
        [
            rank(0, counted(61), counted(4, "0,1", "")),
            rank(1, counted(61), counted(5, "0,1", "")),
            rank(2, trouble=ENDED),
            rank(3, trouble=ENDED),
        ],
        "rank 2 (local rank 0), algo-2, rank 3 (local rank 1) no longer take part: rank 2 has "
        "ended "
        "with exit code 0; no rank has begun a collective after #61 of the default group",
    ),
]


@pytest.mark.parametrize(("ranks", "words"), SENTENCES)
def test_what_is_said(ranks, words):
    (one,) = found(ranks)
    assert words in sentences.reason(one)


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61)],  # rank 3 moves
        [rank(number, group(60)) for number in range(4)],  # in a long computation
        [rank(number, counted(60)) for number in range(4)],  # or in a graph's collectives
        [*(rank(number, counted(60, waits=60)) for number in range(3)), rank(3)],  # of 3 no word
        [*(rank(number, counted(60)) for number in range(3)), rank(3, trouble=ENDED)],
        [*(rank(number, counted(0)) for number in range(3)), rank(3, trouble="does not answer: x")],
        [rank(0, counted(61)), rank(1, counted(60)), rank(2, counted(60))],  # rank 3 moves
        [rank(0)],
        [],
    ],
)
def test_nothing_is_said(ranks):
    assert not found(ranks)


def test_a_part_of_the_job_may_move():
    stuck = [rank(0, group(5, 5, **PAIR)), rank(1, group(4, **PAIR))]
    moving = [rank(2, group(5, 5, ranks="2,3"))]
    (one,) = found([*stuck, *moving])
    assert one.root == (1,) and one.ranks.keys() == {0, 1}


def test_a_rank_that_reports_a_group_of_others_belongs_to_their_stall():
    """Who is named is among the ranks of a stall, whatever a rank reports."""
    pair = [rank(number, counted(61, "0,1", "")) for number in (0, 1)]
    (one,) = found([*pair, rank(2, counted(60, "0,1", ""))])
    assert one.root == (2,) and one.ranks.keys() == {0, 1, 2}


def test_a_rank_that_says_nothing_more_is_named_only_if_no_other_is_absent():
    """It may wait for the other; and it may have gone on from where it waited."""
    three = [rank(0, IN_61), rank(1, group(60)), rank(2, IN_61)]
    (one,) = found([*three, rank(3, group(60), trouble="does not answer: x")])
    assert one.root == (1,)
    silent = rank(3, group(60), group(5, 5, **PAIR), trouble="does not answer: x")
    others = rank(1, IN_61, group(5, **PAIR))
    (one,) = found([rank(0, IN_61, group(5, **PAIR)), others, rank(2, IN_61), silent])
    assert one.root == (3,)


@pytest.mark.parametrize(
    ("op", "is_wrong"), [("all_reduce", True), ("scatter", False), ("all_to_all", False)]
)
def test_sizes_are_compared_where_they_must_agree(op, is_wrong):
    ranks = [rank(number, group(61, 61, op, f"{number} Float")) for number in range(4)]
    (one,) = found(ranks)
    assert ("all ranks must make the same call" in sentences.reason(one)) == is_wrong


def report(watch, now, codes=(), state="S"):
    """Return what is reported now of ranks with these exit codes, None if nothing is."""
    return next(iter(watch.reports(dict(codes), lambda pid: state, now)), None)


def test_a_rank_that_is_about_to_end():
    watch = Watch(15, 60)
    watch.started(7, 3, 1, 0)
    watch.connected(7, 0, 0)
    for now in (15, 30):
        request = watch.poll(now)
        reply = {
            "unchanged": 35,
            "threads": [["", [["f", "a.py", 3]]]],
            "groups": [],
            "ends": now == 30,
        }
        watch.replied(7, {**request, **reply}, now)
    (one,) = report(watch, 31).ranks
    assert (one.trouble, one.unchanged) == ("is about to end, in f, a.py:3", 36)


UPLOAD = [["run", "/usr/lib/python3.11/threading.py", 982], ["upload", "/code/train.py", 4]]
POOL = [["run", "/usr/lib/python3.11/concurrent/futures/process.py", 320]]
SAVE = [["save", "/code/train.py", 9]]


@pytest.mark.parametrize(
    ("main", "threads", "child", "words"),
    [
        ([], [["uploader", UPLOAD]], None, 'thread "uploader", in upload, train.py:4'),
        (
            [],
            [["idle", POOL], ["uploader", UPLOAD]],
            None,
            'thread "uploader", in upload, train.py:4, and 1 more',
        ),
        ([], [["idle", POOL]], None, 'thread "idle", in run, process.py:320'),
        (
            [],
            [["idle", POOL]],
            ["Process-1", 99],
            "it is waiting for its child process Process-1 (pid 99)",
        ),
        (SAVE, [], None, "in its exit handlers, in save, train.py:9"),
        ([], [], None, "in its exit handlers"),
    ],
)
def test_what_a_process_runs_on_in(main, threads, child, words):
    assert stacks.kept_by(stacks.calls_of(main), stacks.threads_of(threads), child) == words


def returning(replies):
    """Return what a host reports, and when, of a rank whose script has ended at 100 s.

    replies(now) is what it replies, None for nothing; {} is that there was progress.
    """
    watch, reported = Watch(15, 60), []
    watch.started(7, 0, 0, 0)
    watch.connected(7, 0, 0)
    for now in range(90, 300):
        if now == 100:
            watch.script_ended(7, now)
        request, reply = watch.poll(now), replies(now)
        if request and reply is not None:
            watch.replied(7, {**request, **reply}, now)
        found = report(watch, now, {7: None, 8: None})
        if found and found.ranks:
            one = found.ranks[0]
            reported.append((now, one.runs_on, round(one.unchanged), found.others))
    return reported


def test_a_rank_that_runs_on_after_its_script_is_reported():
    threads = [["", SAVE], ["uploader", UPLOAD], ["a daemon's", POOL]]
    nothing = {"threads": threads, "groups": [], "kept": 1, "child": None}
    found = returning(lambda now: {**nothing, "unchanged": max(0, now - 95)})
    runs_on = 'thread "uploader", in upload, train.py:4'
    assert found == [(136, runs_on, 36, 1)]  # since its script's end
    assert returning(lambda now: {}) == []  # a thread trains on
    later = returning(lambda now: {**nothing, "unchanged": now - 160} if now >= 160 else {})
    assert later == [(196, runs_on, 36, 1)]
    # Python is gone, and with it the thread that replies.
    assert returning(lambda now: {} if now < 110 else None)[0][1] == "in its exit handlers"


def test_a_rank_that_cannot_be_polled_is_reported_but_not_before_it_could_have_connected():
    watch = Watch(15, 20)
    watch.started(7, 3, 1, 100)
    watch.script_ended(7, 100)
    found = {}
    for now in range(100, 200):
        watch.poll(now)
        seen = report(watch, now, {7: None})
        found.update({now: seen.ranks} if seen and seen.ranks else {})
    assert found == {131: (StalledRank(3, 1, 31, runs_on="in its exit handlers"),)}
    watch = Watch(15, 20)
    watch.started(7, 3, 1, 100)
    watch.script_ended(7, 100)  # and its process ends
    assert watch.poll(150) and report(watch, 151, {7: 0}).ranks == (StalledRank(3, 1, 51, ENDED),)


def test_with_a_watch_of_0_nothing_is_polled_after_a_script():
    watch = Watch(0, 60)
    watch.script_ended(7, 100)
    assert watch.due() == math.inf


def test_many_ranks_that_run_on_are_one_line():
    ranks = [rank(number, unchanged=70, runs_on=f'thread "t{number}"') for number in range(3, 9)]
    state = judge.host_reported(judge.Stalls(notify=60), "algo-1", ranks, 100)
    state, lines, is_new = judge.check(state, 101)
    assert lines == [
        'rank 3\'s script has ended, but its process is still running: thread "t3"; '
        "the same applies to 5 more ranks."
    ]
    assert not is_new and judge.due(state) == 172  # as of the other sentences, since 30


def test_a_rank_that_has_returned_while_others_wait_for_it_is_no_reason_to_restart():
    state = judge.Stalls(notify=60, timeout=60, every=1, busy=frozenset({"algo-2"}))
    ranks = [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60), runs_on="in f")]
    state = judge.host_reported(state, "algo-1", ranks, 100)
    while not state.hang:
        state, _, _ = judge.check(state, judge.due(state))
    assert (
        state.hang.text.startswith("ranks have made no progress for") and not state.hang.may_restart
    )


def test_it_is_not_said_in_a_burst_when_it_is_seen_late():
    state = judge.Stalls(notify=60)
    state = judge.host_reported(
        state, "algo-1", [rank(0, IN_61, unchanged=500), rank(1, unchanged=500)], 500
    )
    state = judge.host_reported(
        state, "algo-2", [rank(2, unchanged=500), rank(3, unchanged=500)], 500
    )
    state, lines, is_new = judge.check(state, 501)
    assert len(lines) == 1 and is_new and judge.due(state) == 1002


def test_stacks_are_new_also_if_the_job_ends_at_once():
    state = judge.Stalls(notify=60, timeout=30, every=1)
    ranks = [rank(number, IN_61, unchanged=40) for number in range(4)]
    state, lines, is_new = judge.check(judge.host_reported(state, "algo-1", ranks, 100), 101)
    assert state.hang and is_new and len(lines) == 1


def test_when_it_is_said():
    state = judge.Stalls(notify=60, timeout=200, every=1)
    ranks = [rank(0, IN_61, unchanged=31), rank(1, IN_61, unchanged=30)]
    state = judge.host_reported(state, "algo-1", ranks, 100)
    state, lines, _ = judge.check(state, 101)
    assert not lines and judge.due(state) == math.inf
    ranks = [rank(2, IN_61, unchanged=30), rank(3, group(60), unchanged=33)]
    state = judge.host_reported(state, "algo-2", ranks, 102)
    said = []
    while not state.hang:
        now = judge.due(state)
        state, lines, _ = judge.check(state, now)
        said += [(now, line.partition(":")[0]) for line in lines]
        assert not judge.reason_of_wait(state, 0, 131)
    # Since 72 nothing has moved.
    assert said == [
        (132, "ranks have made no progress for 60 s"),
        (192, "ranks have made no progress for 120 s, for the same reason."),
    ]
    # The last moment at which what was seen before the time was over can become known.
    assert (now, state.hang.text[:37]) == (277, "ranks have made no progress for 205 s")
    assert judge.due(state) == math.inf
    assert "rank 3" in judge.reason_of_wait(state, 0, 133)
    assert not judge.reason_of_wait(state, 3, 133) and not judge.reason_of_wait(
        state, 4, 133
    )  # which do not wait
    ranks = judge.host_reported(state, "algo-1", [rank(0, IN_61)], 290)
    ranks, lines, _ = judge.check(ranks._replace(hang=None), 291)
    assert (
        "rank 3" in judge.reason_of_wait(ranks, 1, 293) and not lines
    )  # torch's time-out, perhaps
    state = judge.host_reported(state, "algo-2", [rank(2, IN_61)], 290)
    state, lines, _ = judge.check(state._replace(hang=None), 291)
    assert not judge.reason_of_wait(state, 0, 293) and not lines  # rank 3 has come
    assert judge.due(state) == 301
    state, lines, _ = judge.check(state, 301)
    assert lines == ["ranks are making progress again after 219 s."] and not state.stalls


def test_more_ranks_that_come_to_wait_are_no_other_trouble():
    state = judge.Stalls(notify=60)
    two = {"ranks": "0,1"}
    ranks = [rank(0, group(9, 9, **two), group(60)), rank(1, group(8, **two), group(60))]
    state = judge.host_reported(state, "algo-1", ranks, 60)
    state, _, is_new = judge.check(state, 61)
    assert is_new and [bool(one.logged) for one in state.stalls] == [True]
    state = judge.host_reported(state, "algo-2", [rank(2, IN_61), rank(3, IN_61)], 61)
    state, lines, is_new = judge.check(state, 62)
    assert lines == [] and not is_new and [bool(one.logged) for one in state.stalls] == [True]


def test_who_is_named_may_change_while_nothing_moves():
    others = [rank(0, counted(61)), rank(1, counted(60)), rank(2, counted(61))]
    state, said = judge.Stalls(notify=60), []
    one, silent = rank(3, counted(60)), rank(3, counted(60), trouble="does not answer: x")
    unknown = silent._replace(groups=())  # it moved at its last look
    for now, last in zip(range(100, 1000, 100), (unknown, one, silent, one)):
        state = judge.host_reported(state, "algo-1", [*others, last._replace(unchanged=70)], now)
        for later in (1, 12):
            state, lines, is_new = judge.check(state, now + later)
            said += [(now + later, is_new)] if lines else []
            assert not any("progress again" in line for line in lines), lines
    assert len(state.stalls) == 1 and [is_new for _, is_new in said] == [True, False, False], said


def test_a_move_that_shows_in_no_group_ends_a_stall():
    """As one of a send, before the others' wait is taken back."""
    state = judge.Stalls(notify=4, timeout=20, every=2)
    for now in range(10, 100, 8):
        waiting = [rank(one, IN_61, unchanged=now - 5) for one in range(3)]
        state = judge.host_reported(
            state, "algo-1", [*waiting, rank(3, group(60), unchanged=4)], now
        )
        state, _, _ = judge.check(state, now + 1)
        assert not state.hang and state.stalls
        state = judge.host_reported(state, "algo-1", waiting, now + 2)
        state, _, _ = judge.check(state, now + 3)


def test_ranks_that_all_say_nothing_more_may_have_gone_on():
    """And then each keeps Python's lock, or Python ends."""
    silent = {"trouble": "does not answer: x"}
    state = judge.Stalls(notify=60, timeout=90, every=1)
    ranks = [*(rank(number, IN_61) for number in range(3)), rank(3, group(60))]
    state, lines, _ = judge.check(judge.host_reported(state, "algo-1", ranks, 100), 101)
    assert len(lines) == 1 and math.isfinite(judge.due(state))
    all_silent = [one._replace(**silent) for one in ranks]
    state, lines, _ = judge.check(judge.host_reported(state, "algo-1", all_silent, 120), 121)
    assert not lines and judge.due(state) == math.inf
    # One that still waits has answered: it is the same stall.
    state, lines, _ = judge.check(
        judge.host_reported(state, "algo-1", [ranks[0], *all_silent[1:]], 400), 401
    )
    assert len(lines) == 1 and "no progress for 361 s" in lines[0] and state.hang


def test_a_stall_that_becomes_two_is_not_new():
    pairs = [rank(0, counted(5, "0,1")), rank(1, counted(4, "0,1"))]
    pairs += [rank(2, counted(5, "2,3")), rank(3, counted(4, "2,3"))]
    whole = [one._replace(groups=(*one.groups, counted(8))) for one in pairs]
    silent = whole[3]._replace(trouble="does not answer: x")
    state = judge.host_reported(judge.Stalls(notify=60), "algo-1", [*whole[:3], silent], 100)
    state, lines, is_new = judge.check(state, 101)
    assert len(lines) == 1 and is_new
    state, lines, is_new = judge.check(judge.host_reported(state, "algo-1", whole, 110), 111)
    assert len(state.stalls) == 2 and not lines and not is_new


def test_two_stalls_that_become_one():
    state = judge.Stalls(notify=60)
    pairs = [({"ranks": "0,1", "name": ""}), ({"ranks": "2,3", "name": ""})]
    all_of = {"ranks": "0-4", "name": ""}
    ranks = []
    for first, pair in zip((0, 2), pairs):
        ranks += [rank(first, group(9, 9, **pair)), rank(first + 1, group(8, **pair))]
    state, lines, _ = judge.check(judge.host_reported(state, "algo-1", ranks, 100), 101)
    assert len(lines) == len(state.stalls) == 2
    ranks += [rank(4, group(1, 1, **all_of))]
    state, lines, is_new = judge.check(judge.host_reported(state, "algo-1", ranks, 140), 141)
    assert (lines, is_new, len(state.stalls)) == ([], False, 1)


def test_a_stall_is_not_the_one_before():
    """Rank 0 has come to #61, and is absent from #62: that is no hang of both together."""
    state, timeout = judge.Stalls(notify=20, timeout=60, every=5), 60
    for number, now in enumerate(range(30, 30 + 10 * 30, 30)):
        ranks = [rank(0, group(number), unchanged=25)]
        ranks += [rank(one, group(number + 1, number + 1), unchanged=25) for one in (1, 2, 3)]
        state, _, _ = judge.check(judge.host_reported(state, "algo-1", ranks, now), now + 1)
        assert not state.hang and now - state.stalls[-1].finding.since < timeout


def test_many_stalls_at_once_are_not_all_said():
    pairs = []
    for first in range(0, 200, 2):
        pair = {"ranks": f"{first},{first + 1}", "name": ""}
        pairs += [rank(first, group(9, 9, **pair)), rank(first + 1, group(8, **pair))]
    state = judge.host_reported(judge.Stalls(notify=60), "algo-1", pairs, 100)
    state, lines, _ = judge.check(state, 101)
    assert len(state.stalls) == 100 and lines[5:] == ["... and 95 more like these."]


def test_what_a_host_polls_and_reports():
    watch = Watch(15, 60)
    assert watch.due() == math.inf
    for pid in (7, 8, 9):
        watch.started(pid, pid - 7, pid - 7, 0)
        watch.connected(pid, 0, 0)
    reported = []
    for now in range(200):
        request = watch.poll(now)
        if request:
            watch.replied(7, request, now)  # it makes progress
            reply = {
                "unchanged": max(0, now - 15),
                "threads": [["", [["f", "/x/a.py", 3]]]],
                "groups": [],
            }
            watch.replied(8, {**request, **reply}, now)
            if now < 40:
                watch.replied(9, request, now)  # and then it is stopped
        found = report(watch, now, state="T")
        if found:
            reported.append((now, found.ranks))
    trouble = "does not answer: it is suspended (SIGSTOP)"
    two = StalledRank(1, 1, 31, "", "f, a.py:3")
    assert reported == [
        (46, (two,)),
        (61, (two._replace(unchanged=46), StalledRank(2, 2, 31, trouble))),
    ]


def test_ranks_of_which_no_message_has_the_groups_are_counted():
    watch, most = Watch(15, 60), progress.MOST_GROUPS
    groups = [{"ranks": f"{n},{n + 1},{n + 9}", "name": 90 * "x", "last": 9} for n in range(most)]
    for pid in range(12):
        watch.started(pid, pid, pid, 0)
        watch.connected(pid, 0, 0)
    assert not watch.error
    request = watch.poll(15)
    for pid in range(12):
        watch.replied(pid, {**request, "unchanged": 40, "threads": [], "groups": groups}, 15)
    ranks = report(watch, 16).ranks
    assert 6 < len(ranks) < 12
    others = f"{12 - len(ranks)} ranks"
    assert watch.error == f"the progress of {others} of this host does not fit into a message."


def test_a_rank_of_more_groups_than_it_tells_is_absent_from_none_of_the_others():
    many = [group(5, ranks=f"0,{n}", name="") for n in range(1, 1 + progress.MOST_GROUPS)]
    (one,) = found([rank(0, *many), rank(1, IN_61), rank(2, IN_61), rank(3, group(60))])
    assert one.root == (3,)


def test_a_rank_that_has_ended_or_gone_on_without_us():
    watch = Watch(15, 60)
    for pid in (7, 8):
        watch.started(pid, pid, 0, 0)
        watch.connected(pid, 0, 0)
        watch.disconnected(pid)
    watch.poll(60)
    assert report(watch, 61, {7: 0}).ranks == (StalledRank(7, 0, 61, ENDED),)


def test_ranks_are_written_in_few_characters():
    for ranks, text in (
        ([0], "0"),
        ([0, 1], "0,1"),
        (range(8), "0-7"),
        (range(0, 64, 8), "0-56:8"),
        ([0, 1, 5], "0,1,5"),
    ):
        assert in_rank.ranges(list(ranks)) == text


@given(st.sets(st.integers(0, 9999), min_size=1).map(sorted))
def test_ranks_are_read_as_they_were_written(ranks):
    assert list(progress.members(in_rank.ranges(ranks))) == ranks


@pytest.mark.parametrize("text", ["", "x", "0-", "-1", "0-7:0", "1,,2", "0-99999999", "\u0663"])
def test_ranks_that_are_none(text):
    with pytest.raises(ValueError):
        progress.members(text)


def test_what_names_ranks_that_the_job_has_not_counts_as_ranks_that_move():
    """A rank is left out with all that it says, not a group of its alone: others wait there."""
    good = rank(0, IN_61, group(3, ranks="0,2"))
    odd = [rank(4, IN_61), rank(1, group(9, 9, ranks="0-131071")), rank(2, group(1, ranks="0,4"))]
    assert progress.within([good, *odd], 4) == (good,)
    assert progress.within([rank(3, group(1, ranks="3-2"))], 4)
    assert progress.within([good], 0) == ()  # it is not known yet how many there are
    assert stacks.within((((0, 4), "  a"), ((5,), "  b")), 4) == (((0,), "  a"),)


def test_a_message_holds_as_many_ranks_as_it_has_room_for():
    ranks = [rank(number, IN_61) for number in range(100)]
    assert progress.bounded(ranks, 1 << 20) == tuple(ranks)
    kept = progress.bounded(ranks, 2000)
    assert 5 < len(kept) < 20 and kept == tuple(ranks[: len(kept)])


TRAIN = [["<module>", "/code/train.py", 30], ["all_reduce", "/x/site-packages/torch/d.py", 9]]
IN_FRONT = [
    ["main", "/opt/launcher/warm/warm.py", 300],
    ["main", "/t/sm-launch-7-0af/rank.py", 2],
]
LOAD = [*IN_FRONT, ["load", "/code/data.py", 88]]
IDLE = [["run", "/usr/lib/python3.11/threading.py", 5]]


def test_the_stacks_of_a_rank():
    threads = stacks.threads_of([["", TRAIN], ["loader", LOAD], ["monitor", IDLE]])
    assert stacks.text_of(threads).splitlines() == [
        "  main thread:",
        '    File "/code/train.py", line 30, in <module>',
        '    File "/x/site-packages/torch/d.py", line 9, in all_reduce',
        "  thread loader:",
        '    File "/code/data.py", line 88, in load',
    ]
    calls = [calls for _, calls in threads]
    assert [stacks.place(one) for one in calls] == [
        "<module>, train.py:30",
        "load, data.py:88",
        "run, threading.py:5",
    ]


def test_a_request_for_stacks():
    watch = Watch(15, 60)
    for pid in (6, 7, 8, 9):
        watch.started(pid, pid - 6, 0, 0)
        watch.connected(pid, 61, 0)
    watch.poll(15)
    report(watch, 16)
    message = watch.request_stacks(3, 100, may_signal=True)
    watch.disconnected(6)  # it has closed all descriptors, and may have others by these numbers
    watch.replied(7, {**message, "threads": [["", TRAIN]]}, 100)
    assert watch.signals_due(100.4) == {} and watch.due() == 100.5  # no other poll meanwhile
    assert watch.signals_due(100.5) == {8: 61, 9: 61} and watch.signals_due(100.6) == {}
    odd = f'  File "x", line {5000 * "9"} in x'
    for line in 2 * ("Stack (most recent call first):", '  File "/code/a.py", line 3 in f', odd):
        watch.wrote(8, line)  # twice, for two requests
    assert report(watch, 101) is None and report(watch, 101.5).number == 3
    held = "does not answer: it is running code that holds Python's lock (the GIL)"
    assert watch.text(7, "S").startswith("  main thread:")
    assert watch.text(8, "S").splitlines() == [
        f"  it {held}.",
        "  main thread:",
        '    File "/code/a.py", line 3, in f',
    ]
    assert watch.text(9, "S") == f"  it {held}."
    assert "no stack" in watch.text(6, "S")


def test_ranks_that_get_no_signal_are_named_with_the_way_to_see_where_they_are():
    watch = Watch(15, 60)
    for pid in (7, 8):
        watch.started(pid, pid - 6, 0, 0)
        watch.connected(pid, 61, 0)
    message = watch.request_stacks(3, 100, may_signal=False)
    watch.replied(7, {**message, "threads": [["", TRAIN]]}, 100)
    assert watch.signals_due(100.5) == {} and report(watch, 101.5)
    assert watch.text(8, "S") == (
        "  it does not answer: it is running code that holds Python's lock (the GIL); "
        "`sm-launch stacks` shows "
        "where, by sending it a signal."
    )
    assert watch.text(8, "T") == "  it does not answer: it is suspended (SIGSTOP)."


def test_a_request_for_stacks_by_signals_has_hosts_collect_them_again():
    state = stacks.requested(stacks.Gathering(), {""}, 50, may_signal=False)
    state = stacks.received(state, "algo-1", 1, (((0,), "  a"),))
    state = stacks.requested(state, {"algo-2"}, 51, may_signal=True)
    assert state == stacks.Gathering(2, 54, frozenset({"", "algo-2"}), {}, True)
    assert stacks.received(state, "algo-1", 1, (((0,), "  too late"),)) == state
    assert stacks.requested(state, {"algo-3"}, 52, may_signal=True).number == 2


def test_stacks_of_all_hosts():
    state = stacks.requested(stacks.Gathering(), {"algo-2"}, 50, may_signal=True)
    state = stacks.requested(state, {""}, 51, may_signal=False)
    assert (state.number, state.deadline, state.requested_by) == (1, 53, {"algo-2", ""})
    first = stacks.grouped({0: "  a", 1: "  a", 2: "  b", 3: "  a"})
    assert first == (((0, 1, 3), "  a"), ((2,), "  b"))
    state = stacks.received(state, "algo-1", 1, first)
    state = stacks.received(state, "algo-2", 1, (((4, 5), "  a"),))
    state = stacks.received(state, "algo-3", 0, (((6,), "  too late"),))
    assert stacks.shown(state, ["algo-1", "algo-2", "algo-3"]) == (
        "5 ranks (0-1, 3-5):",
        "  a",
        "rank 2:",
        "  b",
        "no answer within 3 s from algo-3.",
    )
    assert stacks.requested(stacks.Gathering(1), {"algo-1"}, 60, may_signal=True).number == 2


def test_of_long_stacks_the_rarest_and_the_innermost_calls_are_kept():
    deep = [[f"f{depth}", f"/code/{200 * 'x'}.py", depth] for depth in range(60)]
    (main,) = stacks.threads_of([["", deep]])
    text = stacks.text_of((main,)).splitlines()
    assert text[0] == "  main thread:" and 10 < len(text) < 60 and text[-1].endswith("in f59")
    pairs = tuple(((n, n + 1), f"  {n}\n" + 60 * "  x\n" + "  last") for n in range(0, 16, 2))
    state = stacks.requested(stacks.Gathering(), {""}, 0, may_signal=False)
    lines = stacks.shown(stacks.received(state, "algo-1", 1, (*pairs, ((16,), "  here"))), [])
    assert lines[-2:] == ("rank 16:", "  here") and lines.count("  last") == 8


def test_stacks_fit_in_a_message():
    long = {number: f"  {number}" + 7990 * "\u20ac" for number in range(64)}
    sent = stacks.grouped(long)
    assert sum(len(ranks) for ranks, _ in sent) == 64 and len(json.dumps(sent)) < 60_000
    many = stacks.grouped({number: f"  {number}" + 300 * "x" for number in range(1024)})
    assert sum(len(ranks) for ranks, _ in many) == 1024 and len(json.dumps(many)) < 60_000
    state = stacks.received(
        stacks.requested(stacks.Gathering(), {""}, 0, may_signal=False), "algo-1", 1, sent
    )
    others = {str(number): (((number,), f"  {number}"),) for number in range(1000)}
    lines = stacks.shown(state._replace(received=others), [])
    assert (
        len(lines) == 401 and lines[0] == "800 more stacks, of as many ranks or more, are omitted."
    )
    assert len(json.dumps(stacks.shown(state, []))) < 60_000


def entry(number, **how):
    """Return an entry of torch's flight recorder, as of torch 2.13."""
    about = {"collective_seq_id": number, "op_id": number, "pg_id": 0, "is_p2p": False}
    sizes = {"input_sizes": [[4, 2]], "input_dtypes": ["Float"]}
    name = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    return {"retired": True, **about, **sizes, **name, **how}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], (9, 0, "", "")),  # the recorder's buffer has no entry of this group any more
        ([entry(12), entry(13, retired=False)], (9, 0, "", "")),  # these were of another one
        ([entry(1), entry(2)], (2, 0, "", "")),
        ([entry(1), entry(2, retired=False)], (2, 2, "all_reduce", "4x2 Float")),
        ([entry(2, retired=False), entry(3, retired=False)], (3, 2, "all_reduce", "4x2 Float")),
        ([entry(1, retired=False, is_p2p=True), entry(1)], (1, 0, "", "")),
        ([entry(9, retired=False), entry(1, pg_id=3)], (1, 0, "", "")),  # a group that is gone
        ([entry(1, retired=False, input_sizes=[], input_dtypes=[])], (1, 1, "all_reduce", "")),
    ],
)
def test_how_far_a_group_is(entries, expected):
    said = in_rank.summary(entries, 9, has_lost=True)
    assert tuple(said.get(key, "") for key in ("last", "waits", "op", "size")) == expected


def test_groups_in_which_a_rank_waits_come_first():
    world, names = a_group("cpu:gloo")
    other, _ = a_group("cpu:gloo")
    (one,) = other.pg_group_ranks
    world.pg_group_ranks[one], world.pg_backend_config[one] = {1: 0, 2: 1}, "cpu:gloo"
    entries = [entry(3, record_id=0), entry(4, process_group=["1", ""], retired=False)]
    said = in_rank.groups(world, {**names, one: "1"}, entries, {})
    assert [(group["ranks"], group["waits"]) for group in said] == [("1,2", 4), ("0,1", 0)]


@pytest.mark.parametrize(("oldest", "last"), [(0, 0), (7, 9)])
def test_a_group_of_which_the_recorder_holds_nothing(oldest, last):
    """It has begun nothing, unless the recorder has had no room."""

    entries = [entry(3, record_id=oldest, process_group=["1", ""])]
    (said,) = groups_of("cpu:gloo", entries)
    assert (said["ranks"], said["order"], said["last"]) == ("0,1", 0, last)


def a_group(backends):
    """Return torch's world, of one group, of ranks 0 and 1, that has begun 9 operations."""

    class ProcessGroup:
        group_desc = "mesh_dp"

        def _get_sequence_number_for_group(self):
            return 9

    one = ProcessGroup()
    world = SimpleNamespace(pg_group_ranks={one: {1: 1, 0: 0}}, pg_backend_config={one: backends})
    return world, {one: "0"}


def groups_of(backends, entries):
    return in_rank.groups(*a_group(backends), entries, {})


@pytest.mark.parametrize(
    ("enqueued", "completed", "waits"),
    [
        ("9", "8", 9),
        ("9", "9", 0),
        ("4", "3", 0),  # a send's number, or in a graph
        (None, None, 0),  # the recorder is off
    ],
)
def test_whether_the_last_collective_of_nccls_has_ended(monkeypatch, enqueued, completed, waits):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str))
    world, _ = a_group("cuda:nccl")
    (one,) = world.pg_backend_config
    one._get_backend = {"cuda": SimpleNamespace(uid=2)}.get
    numbers = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
    status = {"1": {}, "2": numbers} if enqueued else {}
    assert in_rank.counted(one, status) == {"name": "mesh_dp", "last": 9, "waits": waits}


def test_of_torch_2_15s_nccl_it_is_not_known_what_has_ended(monkeypatch):
    """ProcessGroupNCCL2 has no uid; the old class, of which there may be groups, has other ones."""
    torch = SimpleNamespace(__version__=(2, 15), device=str)
    monkeypatch.setitem(sys.modules, "torch", torch)
    world, names = a_group("cuda:nccl")
    (one,) = names
    one._get_backend = {"cuda": SimpleNamespace()}.get
    begun = {"last_enqueued_collective": "9", "last_completed_collective": "8"}
    for status in ({}, {"": begun, "None": begun, "0": begun}):
        (said,) = in_rank.groups(world, names, [], status)
        assert (said["last"], said["waits"], said["is_counted"]) == (9, 0, True)


@pytest.mark.parametrize(
    ("backends", "version", "expected", "is_known"),
    [
        ("cuda:nccl", (2, 6), [(9, True)], True),
        ("cuda:nccl", (2, 5, 1), [(0, False)], False),  # there a batch of sends counted, too
        ("cpu:gloo,cuda:nccl", (2, 7), [(9, True), (1, False)], True),
        ("cpu:gloo,cuda:nccl", (2, 13), [(9, True), (1, False)], True),
        ("cpu:gloo,cuda:nccl", (2, 15), [(9, True), (1, False)], True),
        ("cpu:gloo,cuda:other", (2, 7), [(1, False)], False),
        ("cpu:gloo,cuda:other", (2, 13), [(1, False)], True),
    ],
)
def test_of_which_groups_it_is_only_counted(monkeypatch, backends, version, expected, is_known):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    is_recorded = version >= (2, 8)
    recorder = {"_dump_fr_trace_json": None} if is_recorded else {}
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**recorder))
    other = entry(2, profiling_name="other:all_reduce", retired=False)
    entries = [entry(1, record_id=0), other]
    said = groups_of(backends, entries if "gloo" in backends else [])
    assert [(one["last"], one.get("is_counted", False)) for one in said] == expected
    known = in_rank.unknown(*a_group(backends), is_recorded=is_recorded) == {}
    assert known == is_known
    is_on = known if "nccl" in backends else False  # TORCH_FR_BUFFER_SIZE may be 0
    assert (in_rank.unknown(*a_group(backends), is_recorded=False) == {}) == is_on


# Before the first collective.

MAKING = Group("0-3", -1, "", 1, 1, "init_process_group")
MEETS = "rank 0 waits at localhost:12355, but this job's ranks meet at algo-1:29500: the script"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [*(rank(number, MAKING) for number in range(3)), rank(3)],
            "algo-2, rank 3 (local rank 1) has not joined init_process_group of ranks 0-3, where 3 "
            "others are waiting; rank 3 is in load, data.py:88",
        ),
        (
            [rank(number, MAKING, note=MEETS if number == 0 else "") for number in range(4)],
            f"all 4 ranks are in init_process_group of ranks 0-3, which has not completed; {MEETS}",
        ),
    ],
)
def test_a_group_that_cannot_come_is_said_but_ends_nothing(ranks, words):
    (one,) = found(ranks)
    assert sentences.reason(one) == words
    state = judge.Stalls(notify=60, timeout=60, every=1)
    state = judge.host_reported(state, "algo-1", ranks, 100)
    state, lines, is_new = judge.check(state, 101)
    assert len(lines) == 1 and not is_new and not state.hang
    state, lines, _ = judge.check(state, judge.due(state))
    assert "for the same reason" in lines[0] and not state.hang
    quiet = judge.host_reported(judge.Stalls(notify=60, notes=False), "algo-1", ranks, 100)
    assert judge.check(quiet, 101)[1] == []


def test_of_a_stall_that_lasts_only_what_has_changed_is_said_again():
    state, said = judge.Stalls(notify=60), []
    ranks = [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60))]
    moved = ranks[3]._replace(place="save, train.py:9")
    for now, last in ((100, ranks[3]), (170, ranks[3]), (410, moved)):
        known = [one._replace(unchanged=now - 40) for one in (*ranks[:3], last)]
        state = judge.host_reported(state, "algo-1", known, now)
        while judge.due(state) < now + 60:
            state, lines, _ = judge.check(state, max(now + 1, judge.due(state)))
            said += lines
    assert "is in load" in said[0] and said[1].endswith(", for the same reason."), said
    assert [line for line in said[2:] if "same reason" not in line and "is in save" in line], said


STILL = [["load_extension", "/code/train.py", 9]]
STILL += [["wait", "/usr/lib/python3.11/site-packages/torch/utils/file_baton.py", 50]]


def standing_still(cpu, calls=lambda now: STILL):
    """Return what a host reports of a rank in no group; cpu(now) is how much it has used."""
    clock = [0]
    watch, seen = Watch(15, 60, lambda pid: cpu(clock[0])), []
    watch.started(7, 1, 1, 0)
    watch.connected(7, 0, 0)
    for now in range(0, 200):
        clock[0] = now
        request = watch.poll(now)
        if request:
            fields = {"unchanged": now, "threads": [["", calls(now)]], "groups": [], "before": True}
            watch.replied(7, {**request, **fields}, now)
        one = report(watch, now, {7: None})
        seen += [(now, one.ranks[0])] if one and one.ranks and one.ranks[0].silent else []
    return seen


def test_a_rank_that_stands_still_before_its_first_collective():
    seen = standing_still(lambda now: 0.0)
    where = "wait, file_baton.py:50, called in load_extension, train.py:9"
    assert (seen[0][0], seen[0][1].silent, seen[0][1].unchanged) == (46, where, 31)
    # The lines of a loop that waits are one place.
    lines = [[*STILL[:1], [*STILL[1][:2], 50 + number]] for number in range(2)]
    assert standing_still(lambda now: 0.0, lambda now: lines[now % 2])
    assert not standing_still(lambda now: 0.03 * now)  # it, or a child of it, works
    moves = [[["load", "/code/train.py", number], *STILL] for number in range(200)]
    assert not standing_still(lambda now: 0.0, lambda now: moves[now])


def test_what_is_said_of_a_rank_that_stands_still():
    ranks = [rank(number, silent="wait, file_baton.py:50", unchanged=64) for number in (1, 2)]
    state = judge.host_reported(judge.Stalls(notify=60, timeout=60, every=1), "algo-1", ranks, 100)
    state, lines, _ = judge.check(state, 101)
    assert lines == [
        "rank 1 has begun no collective: it is in wait, file_baton.py:50, for 65 s (a lock file of "
        "a run that was killed?); the same applies to 1 more rank."
    ]
    assert judge.due(state) == 166 and not state.hang
    quiet = judge.host_reported(judge.Stalls(notify=60, notes=False), "algo-1", ranks, 100)
    assert judge.check(quiet, 101)[1] == []


GIVEN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "algo-1", "MASTER_PORT": "29500"}
GIVEN["GROUP_RANK"] = "0"


@pytest.mark.parametrize(
    ("how", "seen", "words"),
    [
        ({}, ("algo-1", 29500, 0, 2), ""),
        ({}, ("localhost", "29500", "0", "2"), ""),
        ({}, ("", "", "", ""), ""),
        (
            {"MASTER_PORT": "12355"},
            ("localhost", 12355, 0, 2),
            "rank 0 waits at localhost:12355, but this job's ranks meet at algo-1:29500: "
            "the script sets MASTER_PORT",
        ),
        (
            {},
            ("10.0.0.7", 29500, 0, 2),
            "rank 0 waits at 10.0.0.7:29500, but this job's ranks meet at algo-1:29500: "
            "the script passes init_method",
        ),
        (
            {},
            ("algo-1", 29500, 0, 4),
            "rank 0 waits until there are 4 ranks, but this job has 2: "
            "the script passes world_size",
        ),
        ({"RANK": "1"}, ("algo-1", 29500, 1, 2), "rank 0 joins as rank 1: the script sets RANK"),
    ],
)
def test_a_rank_that_waits_elsewhere(monkeypatch, how, seen, words):
    for name, value in how.items():
        monkeypatch.setenv(name, value)
    assert in_rank.elsewhere(GIVEN, *seen) == words


def test_a_timeout_before_any_notice_names_the_rank_that_has_not_come():
    state = judge.Stalls(notify=60, every=15)
    state, (ask,) = overview.failed(state, "RuntimeError: Timed out waiting 8000ms for recv", 10)
    assert ask == overview.Tell(None, overview.CollectStacks(1, False))
    ranks = (rank(0, group(61, 61, ranks="0,1"), unchanged=0), rank(1, group(60, ranks="0,1")))
    report = overview.NoProgressReport(1, ranks, number=1)
    state, shown = overview.reported(state, "algo-1", report, {"algo-1"}, 11, is_running=False)
    assert shown == ()
    why = overview.reason_of_wait(state, 0, "Timed out waiting", 13)
    assert why == (
        "algo-1, rank 1 (local rank 1) is absent from all_reduce #61 of the default group, where "
        "1 other is waiting; rank 1 is in load, data.py:88."
    )
    assert not overview.reason_of_wait(state, 0, "Connection closed by peer", 13)
    assert overview.failed(state, "Connection closed by peer", 14)[1] == ()


def test_a_rank_that_fails_is_reported_as_it_waited():
    watch = Watch(15, 60)
    for pid in (7, 8):
        watch.started(pid, pid - 7, 0, 0)
        watch.connected(pid, 0, 0)
    waited = {"ranks": "0,1", "name": "", "last": 9, "waits": 9, "op": "all_reduce"}
    watch.failed(7, [waited])
    message = watch.request_stacks(1, 20, may_signal=False)
    for pid in (7, 8):  # the first is about to end
        groups = [{**waited, "waits": 0, "last": pid + 2}]
        watch.replied(pid, {**message, "unchanged": 0, "threads": [], "groups": groups}, 20)
    found = report(watch, 20, {7: None, 8: None})
    assert [one.groups[0].waits for one in found.ranks] == [9, 0]


def test_that_ranks_of_a_job_have_exchanged_nothing():
    alone = judge.host_succeeded(judge.Stalls(), "algo-1", 2)
    assert len(judge.nothing_exchanged(alone)) == 1
    assert not judge.nothing_exchanged(judge.host_succeeded(alone, "algo-2", 0))
    assert not judge.nothing_exchanged(judge.host_succeeded(judge.Stalls(), "algo-1", 1))
    assert not judge.nothing_exchanged(alone._replace(notes=False))
    (line,) = judge.nothing_exchanged(judge.host_succeeded(alone, "algo-2", 2))
    # They may have by other ways: a store of theirs, files, sockets.
    assert line.startswith(
        "4 ranks ran, and none exchanged anything with another in a process group."
    )
    assert "each worked alone" not in line
