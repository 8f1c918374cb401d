"""What keepers say to the launcher, over real sockets; no torch."""

import contextlib
import glob
import json
import os
import resource
import signal
import socket
import time

import pytest
from conftest import poll

from launcher.errors import Disposition, LaunchError
from launcher.host.folders import SOCKET, run_dir
from launcher.host.system import System
from launcher.result.causes import Exit, Link
from launcher.run.events import (
    EndRanks,
    KeeperCleared,
    KeeperJoined,
    KeeperLost,
    RankEnded,
    RankExits,
    RankRuns,
    ScriptEnded,
    StubSignalled,
    ThreadRaised,
)
from launcher.run.keepers import Keepers
from launcher.watch.host import Watch
from launcher.watch.waits import StacksRequest

SECONDS = 60
RUNS = {"runs": {"pid": 77}}
JOINED = KeeperJoined(7, 2, 3, 0)


@pytest.fixture
def keepers():
    unix = socket.socket(socket.AF_UNIX)
    with unix as listener:
        system, told = System(signals=None), []  # only the supervisor waits for signals
        keepers = Keepers(system, told.append, Watch(15, 60, lambda pid: 0.0))
        listener.bind(os.path.join(os.environ["TMPDIR"], "socket"))
        listener.listen()
        keepers.listen(listener)

        def act():
            for key, _ in system.selector.select(0):
                key.data()

        def act_until(condition):
            def met():
                act()
                return condition()

            poll(met, SECONDS, every=0.01)

        keepers.told, keepers.act, keepers.act_until = told, act, act_until
        yield keepers
        keepers.close()


def connect(*messages):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.environ["TMPDIR"], "socket"))
    connection.settimeout(SECONDS)
    connection.sendall(b"".join(map(line_of, messages)))
    return connection


def line_of(message):
    """Return a keeper's line: for `said`, a line of the script's process that it passes on."""
    is_said = isinstance(message, dict) and "said" in message
    mark, message = (b":", message["said"]) if is_said else (b"", message)
    return mark + json.dumps(message).encode() + b"\n"


def keeper(rank, *messages):
    hello = {"rank": rank, "local_rank": 2, "nproc": 3, "group_rank": 0}
    return connect({"hello": hello}, *messages)


def said(**message):
    return {"said": message}


LINK = {"exception": "EOFError", "message": "x", "frames": "", "how": ""}
CLUES = {"facts": [], "counted": [], "broken": ""}
ENDED = {"exit_code": 3, "response": ""}


def test_what_a_keeper_says_of_its_rank_in_order(keepers, logged):
    with keeper(
        7,
        RUNS,
        {"log": "a line\n of its own"},
        said(script_ended={}),
        {"words": "no data"},
        said(end={"exit_code": 3, "chain": [LINK], **CLUES, "facts": ["it was killed"]}),
        {"hangs_up": True},
        {"ended": {**ENDED, "response": "handles"}},
        {"cleared": {"number": 4, "survivors": 1}},
    ):
        keepers.act_until(lambda: len(keepers.told) == 6)
    assert keepers.told == [
        JOINED,
        RankRuns(7, 77),
        ScriptEnded(7),
        RankExits(7, Exit(3, (Link(**LINK),), ("it was killed",), words="no data")),
        RankEnded(7, Exit(3), Disposition.HANDLES),
        KeeperCleared(7, 4, 1),
    ]
    assert "a line\\n of its own" in logged()


def test_commands_reach_the_ranks_that_they_are_for(keepers):
    with keeper(0, RUNS) as first, keeper(7, {"runs": {"pid": 78}}) as second:
        keepers.act_until(lambda: len(keepers.told) == 4)
        keepers.run((7,), lambda rank: {"attempt": rank})
        keepers.ask({"poll": 1}, [77])
        keepers.ask({"stacks": 2})
        keepers.end(EndRanks(3, 15, 1.0, waits=True))
        keepers.leave(1)
        end = {"number": 3, "signal_number": 15, "grace": 1.0, "waits": True, "at_once": False}
        rest = [{"end": end}, {"leave": 1}]
        stacks = {"ask": {"stacks": 2}}
        for connection, expected in (
            (first, [{"ask": {"poll": 1}}, stacks, *rest]),
            (second, [{"run": {"attempt": 7}}, stacks, *rest]),
        ):
            data = b""
            while data.count(b"\n") < len(expected):
                data += connection.recv(4096)
            assert list(map(json.loads, data.splitlines())) == expected
    keepers.act_until(lambda: keepers.are_gone)
    assert {*keepers.told[4:]} == {KeeperLost(0), KeeperLost(7)}


def test_a_keeper_that_is_killed_and_one_whose_stub_is(keepers):
    with keeper(7, {"stub": {"number": signal.SIGTERM}}):
        keepers.act_until(lambda: len(keepers.told) == 2)
        assert keepers.told[1] == StubSignalled(7, signal.SIGTERM)
    keepers.act_until(lambda: len(keepers.told) == 3)
    assert keepers.told[2] == KeeperLost(7) and keepers.are_gone


NONSENSE = [{}, {"hello": {}}, {"hello": {"rank": "x"}}, {"runs": 3}, {"ended": {}}, 3, [1], "abc"]
NONSENSE += [said(end={}), said(thread=None), {"said": 3}, {"cleared": {"x": 1}}, {"ended": None}]


@pytest.mark.parametrize("message", NONSENSE)
def test_invalid_messages_change_nothing(keepers, message, logged):
    deep = b"[" * 5000 + b"]" * 5000 + b"\n"
    with keeper(7, RUNS) as good, connect(message, RUNS) as other:
        other.sendall(b'{"runs": 1e999}\n\0\n' + deep)
        good.sendall(b"no JSON\n" + line_of(message))
        good.sendall(json.dumps({"ended": ENDED}).encode() + b"\n")
        keepers.act_until(lambda: len(keepers.told) == 3)
        other.close()
        keepers.act_until(lambda: len(keepers.connections) == 1)
    assert keepers.told == [JOINED, RankRuns(7, 77), RankEnded(7, Exit(3))]
    assert "ignoring an invalid message from a rank: b'no JSON'" in logged()


INVALID = [{"script_ended": True}, {"script_ended": {"isolated": 1}}, {"watch": "x"}]
INVALID += [{"end": {"exit_code": "x"}, "groups": [["0,1", 0, "", 9, 9]]}]
INVALID += [{"poll": 0, "unchanged": "x"}, {"poll": 0, "threads": [["", [3], False]]}]


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_message_of_a_script_changes_nothing_that_is_known_of_its_rank(
    keepers, message, logged
):
    with keeper(7, RUNS) as connection:
        keepers.act_until(lambda: len(keepers.told) == 2)
        before = dict(vars(keepers.watch._ranks[77]))
        connection.sendall(line_of(said(**message)) + line_of({"ended": ENDED}))
        keepers.act_until(lambda: len(keepers.told) == 3)
    assert vars(keepers.watch._ranks[77]) == before and "ignoring an invalid" in logged()


def test_why_a_rank_ends_is_heard_even_if_its_groups_are_none_that_we_know(keepers):
    end = {"exit_code": 1, "chain": [LINK]}
    with keeper(7, RUNS, said(end=end, groups=[["0,1", 0, "", "7", 9]])):
        keepers.act_until(lambda: len(keepers.told) == 3)
    assert keepers.told[2:] == [RankExits(7, Exit(1, (Link(**LINK),)))]


def test_a_script_cannot_say_what_only_its_launcher_finds_out(keepers):
    end = {"exit_code": -11, "chain": [LINK], **CLUES}
    more = {"recorded": "x", "words": "x", "place": "x", "frames": "x", "at": "x"}
    more["after_script"] = True
    with keeper(7, RUNS, said(end={**end, **more}), said(thread={"name": "pin", "end": end})):
        keepers.act_until(lambda: len(keepers.told) == 4)
    expected = Exit(-11, (Link(**LINK),))
    assert keepers.told[2:] == [RankExits(7, expected), ThreadRaised(7, "pin", expected)]


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, TypeError])
def test_a_mistake_of_ours_is_no_invalid_message(keepers, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(keepers.watch, "script_ended", fails)
    with keeper(7, RUNS, said(script_ended={})), pytest.raises(error):
        keepers.act_until(lambda: len(keepers.told) == 3)


@contextlib.contextmanager
def descriptors_left(count):
    """Use all of this process's descriptors but some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + count
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    filled = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.open("/dev/null", os.O_RDONLY))
        for each in filled[:count]:
            os.close(each)
        yield
    finally:
        for each in filled[count:]:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [2, 30])  # descriptors: fewer than strangers may take, or enough
def test_idle_strangers_make_way_for_a_keeper(keepers, left):
    with contextlib.ExitStack() as stack:
        stack.enter_context(descriptors_left(31 + left))  # 31: the other ends
        for _ in range(30):
            stack.enter_context(connect())
        stack.enter_context(connect({"hello": JOINED._asdict()}))
        keepers.act_until(lambda: JOINED in keepers.told)


def test_a_connection_waits_without_load_while_no_descriptor_is_free(keepers):
    """Where no stranger can make way for it, the loop pauses."""
    with connect({"hello": JOINED._asdict()}):
        with descriptors_left(0):
            began, used = time.monotonic(), time.thread_time()
            for _ in range(20):
                keepers.act()
            took, used = time.monotonic() - began, time.thread_time() - used
        assert used < took / 4
        keepers.act_until(lambda: JOINED in keepers.told)


def test_a_keeper_that_takes_the_last_descriptor_need_not_make_way(keepers):
    with connect() as connection, descriptors_left(1):
        keepers.act()
        connection.sendall(line_of({"hello": JOINED._asdict()}))
        keepers.act_until(lambda: JOINED in keepers.told)


def test_a_tmpdir_that_cannot_be_used(tmp_path, monkeypatch):
    """With a path that is too long for a socket's /tmp is used."""
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.chdir(folder)
    made, listener = run_dir({"TMPDIR": "."})
    listener.close()
    assert made.startswith("/tmp/sm-launch-")
    os.remove(os.path.join(made, SOCKET))
    os.rmdir(made)
    with pytest.raises(LaunchError, match=r"cannot create a folder in /proc .* at most 60 bytes"):
        run_dir({"TMPDIR": "/proc"})
    mine = f"/tmp/sm-launch-{os.getpid()}-*"
    before = glob.glob(mine)
    with descriptors_left(0), pytest.raises(LaunchError, match="Too many open files"):
        run_dir({})
    assert glob.glob(mine) == before


# Kills for memory.

GROUP = "the memory cgroup"
OOM = f"out of memory: {GROUP} recorded an OOM kill (oom_kill)"
NO_OOM = "no out-of-memory kill was recorded"
POOL = "A process in the process pool was terminated abruptly"


def counts(keepers, kills):
    """Have the kernel count kills from now on; none was counted before."""
    keepers._counted = {OOM: 0}
    keepers._system.oom_kills = lambda: {OOM: kills}


# (exit code, what the rank says that the kernel counts, whether a kill explains that)
COUNTED = [
    (1, ["memory"], True),
    (1, [], False),
    (247, [], True),
    (137, [], True),
    (-9, [], True),
    (-15, [], False),
]


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize(("code", "counted", "is_told"), COUNTED)
def test_a_kill_for_memory_that_was_counted_stands_behind_an_end(
    keepers, kills, code, counted, is_told
):
    counts(keepers, kills)
    clues = {**CLUES, "counted": counted}
    end, nothing = {"exit_code": code, "chain": [LINK], **clues}, {"exit_code": 1, "chain": []}
    with keeper(
        7,
        RUNS,
        said(thread={"name": "pin", "end": end}),
        said(thread={"name": "pin", "end": {**nothing, **CLUES}}),
        said(end=end),
        {"ended": {**ENDED, **clues, "exit_code": code}},
    ):
        keepers.act_until(lambda: len(keepers.told) == 5)
    oom = OOM if kills and is_told else ""
    expected = Exit(code, (Link(**LINK),), recorded=oom)
    died = Exit(code, recorded=oom or (NO_OOM if code == -signal.SIGKILL else ""))
    thread, exits, ended = keepers.told[2:]
    assert (thread, exits) == (ThreadRaised(7, "pin", expected), RankExits(7, expected))
    assert ended._replace(end=ended.end._replace(at="")) == RankEnded(7, died)


CRASH = b"""Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/t/data.py", line 12 in decode
""".splitlines()


def test_a_crash_comes_with_its_place_and_time_and_an_abort_with_its_words(keepers):
    for code, place in ((-11, "decode, data.py:12"), (-6, ""), (-15, "")):
        keepers.told.clear()
        ended = {"ended": {**ENDED, "exit_code": code, "words": "why"}}
        with keeper(7, RUNS) as connection:
            connection.sendall(b"".join(b":%s\n" % line for line in CRASH) + line_of(ended))
            keepers.act_until(lambda: len(keepers.told) == 3)
        end = keepers.told[2].end
        assert end.place == place and end.at.endswith(" UTC") is (code != -signal.SIGTERM)
        assert end.words == "why" and ("in decode" in end.frames) is bool(place)
        keepers.act_until(lambda: keepers.are_gone)


# Who asks for the stacks.


def test_all_who_ask_for_stacks_are_answered(keepers):
    """However often each asks: other hosts hear of it once."""
    with connect(*[{"want_stacks": True}] * 20) as one, connect({"want_stacks": True}) as other:
        keepers.act_until(lambda: [each.wants_stacks for each in keepers.connections] == [True] * 2)
        keepers.act_until(lambda: keepers.told == [StacksRequest()] * 2)
        keepers.reply_stacks({"lines": []})
        assert one.recv(100) == other.recv(100) == b'{"lines": []}\n'
