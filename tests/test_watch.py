"""What is said of ranks of which nothing moves, and what a rank says of itself (launcher/watch)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.watch import in_rank, judge, progress, waits
from launcher.watch.host import Watch
from launcher.watch.progress import ENDED, Group, Rank


def group(last, waits=0, op="all_reduce", of="4 Float", ranks="0-3", order=0, name="default_pg"):
    return Group(ranks, order, name, last, waits, op if waits else "", of if waits else "")


def rank(number, *groups, still=60, **how):
    place = "load, data.py:88"
    return Rank(number, number % 2, **{"still": still, "place": place, **how}, groups=groups)


def found(ranks, since=0.0):
    seen = {one.rank: waits.Seen(f"algo-{one.rank // 2 + 1}", one, since) for one in ranks}
    return waits.findings(seen)


IN_61 = group(61, 61)
PAIR = {"ranks": "0,1", "name": ""}
SENTENCES = [
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60))],
        "algo-2, rank 3 (local rank 1) is absent from all_reduce #61 of the default group, where "
        "3 ranks wait; it is in load, data.py:88",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, group(60)), rank(3, group(60), place="")],
        "algo-2, rank 2 (local rank 0), algo-2, rank 3 (local rank 1) are absent from all_reduce "
        "#61 of the default group, where 2 ranks wait; rank 2 is in load, data.py:88",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, trouble="does not answer: x")],
        "where 3 ranks wait; it does not answer: x",
    ),
    (
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61), rank(3, group(60), trouble=ENDED)],
        "where 3 ranks wait; it has ended with exit code 0",
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
        "all 4 ranks are in all_reduce #61 of the default group, which does not complete",
    ),
    # The root of a broadcast goes on; it waits nowhere, and has begun all that there is.
    (
        [*(rank(number, IN_61) for number in range(3)), rank(3, group(61))],
        "3 ranks of 4 are in all_reduce #61 of the default group, which does not complete",
    ),
    (
        [*(rank(number, IN_61) for number in range(3)), rank(3, group(61, 61, "broadcast"))],
        "rank 3 is in broadcast #61 (4 Float), 3 ranks are in all_reduce #61 (4 Float) of the "
        "default group: they must call the same",
    ),
    (
        [
            rank(0, group(3, 3, **PAIR), group(1, **PAIR, order=1)),
            rank(1, group(2, **PAIR), group(2, 2, "barrier", "", **PAIR, order=1)),
        ],
        "ranks wait for each other: rank 0 in all_reduce #3 of the group of ranks 0,1, rank 1 in "
        "barrier #2 of the group of ranks 0,1",
    ),
    ([rank(0, group(9, 9, ranks="0,1", name="mesh_dp")), rank(1)], "group mesh_dp (ranks 0,1), w"),
]


@pytest.mark.parametrize(("ranks", "words"), SENTENCES)
def test_what_is_said(ranks, words):
    (one,) = found(ranks)
    assert words in one.what


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(0, IN_61), rank(1, IN_61), rank(2, IN_61)],  # rank 3 moves
        [rank(number, group(60)) for number in range(4)],  # in a long computation
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
    assert one.named == (1,) and one.ranks == {0, 1}


def test_when_it_is_said():
    state = judge.State(notify=60, timeout=200)
    ranks = [rank(0, IN_61, still=31), rank(1, IN_61, still=30)]
    state = judge.heard(state, "algo-1", ranks, 100)
    state, lines, _ = judge.time(state, 101)
    assert not lines and judge.due(state) == math.inf
    ranks = [rank(2, IN_61, still=30), rank(3, group(60), still=33)]
    state = judge.heard(state, "algo-2", ranks, 102)
    said = []
    while not state.hung:
        now = judge.due(state)
        state, lines, _ = judge.time(state, now)
        said += [(now, line.partition(":")[0]) for line in lines]
        assert not judge.cause(state, 131)
    # Since 72 nothing has moved.
    assert said == [(132, "no progress for 60 s"), (192, "no progress for 120 s")]
    assert (now, state.hung[:21]) == (272, "no progress for 200 s")
    assert judge.due(state) == math.inf
    assert "rank 3" in judge.cause(state, 133)
    state = judge.heard(state, "algo-2", [rank(2, IN_61)], 290)
    state, lines, _ = judge.time(state._replace(hung=""), 291)
    assert "rank 3" in judge.cause(state, 293) and not lines  # torch's time-out, perhaps
    assert judge.due(state) == 301
    state, lines, _ = judge.time(state, 301)
    assert lines == ["progress again after 219 s."] and not state.known


def test_more_ranks_that_come_to_wait_are_no_other_trouble():
    state = judge.State(notify=60)
    two = {"ranks": "0,1"}
    state = judge.heard(
        state, "algo-1", [rank(0, group(9, 9, **two)), rank(1, group(8, **two), group(60))], 60
    )
    state, _, is_new = judge.time(state, 61)
    assert is_new and [one.said for one in state.known] == [True]
    state = judge.heard(state, "algo-2", [rank(2, IN_61), rank(3, IN_61)], 61)
    ranks = [rank(0, group(9, 9, **two), IN_61), rank(1, group(8, **two), group(60))]
    state = judge.heard(state, "algo-1", ranks, 61)
    state, lines, is_new = judge.time(state, 62)
    assert lines == [] and not is_new and [one.said for one in state.known] == [True]


def test_what_a_host_asks_and_tells():
    watch = Watch(15, 60)
    assert watch.due() == math.inf
    for pid in (7, 8, 9):
        watch.joined(pid, pid - 7, pid - 7, 0, 0)
    told = []
    for now in range(200):
        question = watch.question(now)
        if question:
            watch.answered(7, question, now)  # it moves
            still = {"still": max(0, now - 15), "calls": [["f", "/x/a.py", 3]], "groups": []}
            watch.answered(8, {**question, **still}, now)
            if now < 40:
                watch.answered(9, question, now)  # and then it is stopped
        ranks = watch.changes({}, {9: "T"}.get, now)
        if ranks is not None:
            told.append((now, ranks))
    answers = "does not answer: it was stopped (SIGSTOP)"
    two = Rank(1, 1, 31, "", "f, a.py:3")
    # The first look is told, for whoever was told something of an attempt before.
    assert told == [
        (46, (two,)),
        (61, (two._replace(still=46), Rank(2, 2, 31, answers))),
    ]


def test_a_rank_that_has_ended_or_gone_on_without_us():
    watch = Watch(15, 60)
    for pid in (7, 8):
        watch.joined(pid, pid, 0, 0, 0)
        watch.left(pid)
    watch.question(60)
    assert watch.changes({7}, lambda _: "", 61) == (Rank(7, 0, 61, ENDED),)


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


def test_a_message_holds_as_many_ranks_as_it_has_room_for():
    ranks = [rank(number, IN_61) for number in range(100)]
    assert progress.bounded(ranks, 1 << 20) == tuple(ranks)
    kept = progress.bounded(ranks, 2000)
    assert 5 < len(kept) < 20 and kept == tuple(ranks[: len(kept)])


def entry(number, **how):
    """Return an entry of torch's flight recorder, as of torch 2.13."""
    about = {"collective_seq_id": number, "pg_id": 0, "is_p2p": False, "retired": True}
    sizes = {"input_sizes": [[4, 2]], "input_dtypes": ["Float"]}
    name = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    return {**about, **sizes, **name, **how}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], (7, 0, "", "")),  # the recorder's buffer has no entry of this group any more
        ([entry(1), entry(2)], (2, 0, "", "")),
        ([entry(1), entry(2, retired=False)], (2, 2, "all_reduce", "4x2 Float")),
        ([entry(2, retired=False), entry(3, retired=False)], (3, 2, "all_reduce", "4x2 Float")),
        ([entry(1, retired=False, is_p2p=True), entry(1)], (1, 0, "", "")),
        ([entry(9, retired=False), entry(1, pg_id=3)], (1, 0, "", "")),  # a group that is gone
        ([entry(1, retired=False, input_sizes=[], input_dtypes=[])], (1, 1, "all_reduce", "")),
    ],
)
def test_how_far_a_group_is(entries, expected):
    said = in_rank.summary(entries, 7)
    assert tuple(said.get(key, "") for key in ("last", "waits", "op", "of")) == expected


@pytest.mark.parametrize(("oldest", "last"), [(0, 0), (7, 9)])
def test_a_group_of_which_the_recorder_holds_nothing(oldest, last):
    """It has begun nothing, unless the recorder has had no room."""

    class ProcessGroup:
        def _get_sequence_number_for_group(self):
            return 9

    one, entries = ProcessGroup(), [entry(3, record_id=oldest, process_group=["1", ""])]
    (said,) = in_rank.groups({one: "0"}, {one: {1: 1, 0: 0}}, entries)
    assert (said["ranks"], said["order"], said["last"]) == ("0,1", 0, last)
