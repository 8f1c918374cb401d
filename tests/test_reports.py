"""What ranks and torchrun tell the launcher, over real sockets; no torch."""

import json
import os
import resource
import socket
import subprocess

import pytest
from conftest import poll

from launcher.errors import LaunchError
from launcher.host.run_dir import run_dir
from launcher.host.signals import Signals
from launcher.host.system import System
from launcher.peers.messages import StacksRequest
from launcher.result.raised import Link
from launcher.run.events import (
    ChildEnded,
    CloseRequested,
    OrphanEnded,
    RankEnded,
    RankExits,
    RankNotStarted,
    RankRuns,
    Reply,
    StartRequested,
    ThreadRaised,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.run.reports import Reports
from launcher.watch.host import Watch
from launcher.watch.stacks import Call

RUNNER = "neuron_parallel_compile"
STARTS = {"starts": [[0, 0], [1, 1], [7, 2]], "keeps_store": True, "world": 8, "request": 1}


@pytest.fixture
def reports():
    with Signals() as signals, System(signals) as system:
        told = []
        # The job has a child, or else there are no processes to know.
        system.start(["true"], {}, ("MARK", "1"), tied=False)
        reports = Reports(os.environ["TMPDIR"], system, told.append, Watch(0, 60))

        def act_until(condition):
            def met():
                ready = system.selector.select(0)
                for key, _ in ready:
                    key.data()
                if not ready:
                    reports.take_ends()
                return condition()

            poll(met, 10, every=0.01)

        reports.told, reports.act_until = told, act_until
        with connect({"torchrun_pid": os.getpid()}, STARTS) as torchrun:
            act_until(lambda: len(told) == 2)
            assert told == [TorchrunRuns(), StartRequested(((0, 0), (1, 1), (7, 2)), True, 8)]
            told.clear()
            reports.at_torchrun = torchrun
            yield reports
        reports.close()


def connect(*messages):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.environ["TMPDIR"], "socket"))
    for message in messages:
        connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


def rank(number, pid):
    return connect({"rank": number, "local_rank": number, "pid": pid})


def test_ranks_for_which_no_descriptor_is_left_wait(reports):
    ranks = [rank(number, 71 + number) for number in (0, 1, 7)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 2, limits[1]))
        with pytest.raises(OSError):
            while True:
                spare.append(os.dup(0))
        os.close(spare.pop())
        reports.act_until(lambda: reports.told == [RankRuns(71, 0, 0)])
        ranks[0].close()
        reports.act_until(lambda: RankRuns(72, 1, 1) in reports.told)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    ranks[1].close()
    reports.act_until(lambda: RankRuns(78, 7, 2) in reports.told)
    ranks[2].close()


def test_a_rank_has_the_local_rank_that_torchrun_says(reports):
    """With --virtual-local-rank each rank's own is 0."""
    reports._watch = watch = Watch(15, 60)
    with rank(7, 77) as connection:
        reports.act_until(lambda: reports.told)
        about = {"rank": 7, "local_rank": 0}
        with connect({"watch": 77, "signal": 0, **about}):
            connection.sendall(json.dumps({"script_ended": 77, **about}).encode() + b"\n")
            reports.act_until(lambda: watch._ranks and watch._returned)
    assert (watch._ranks[77].known.local_rank, watch._returned[77].local_rank) == (2, 2)


def test_torchrun_knows_the_pid_and_the_end_of_a_rank_before_its_answer(reports):
    torchrun = reports.at_torchrun
    with rank(7, 77) as waits:
        reports.act_until(lambda: reports.told)
        assert reports.told == [RankRuns(77, 7, 2)] and reports.pids == [77]
        reports.reply_to_rank(77, lets_go=True)
        assert waits.recv(100) == b"go"
        torchrun.sendall(b'{"close": true, "tees": true, "request": 2}\n')
        reports.act_until(lambda: len(reports.told) == 2)
        reports.child_ended(OrphanEnded(77, 42))
        assert reports.pids == []  # nobody signals what may be another process by now
        reports.act_until(lambda: len(reports.told) == 3)
    assert reports.told[1:] == [CloseRequested(0, "", True), RankEnded(77, 42)]
    reports.reply(Reply(depart=True))
    assert list(map(json.loads, torchrun.recv(1000).splitlines())) == [
        {"rank": 7, "pid": 77},
        {"rank": 7, "exit_code": 42},
        {"request": 2, "depart": True},
    ]


@pytest.mark.parametrize("is_taken_in", [True, False])
def test_a_rank_whose_process_is_reaped_before_its_word_is_read_has_ended(reports, is_taken_in):
    """Each of many connections is accepted in a turn of its own, and all signals in one."""
    process = subprocess.Popen(["true"])
    process.wait()
    end = OrphanEnded(process.pid, -9)
    reports.child_ended(end)
    if is_taken_in:
        reports.take_ends()
    with rank(7, process.pid):
        reports.act_until(lambda: RankRuns(process.pid, 7, 2) in reports.told)
        assert reports.pids == []
        reports.act_until(lambda: any(isinstance(one, RankEnded) for one in reports.told))
    assert reports.told[:-1] == [*[end] * is_taken_in, RankRuns(process.pid, 7, 2)]


def test_a_rank_that_has_the_pid_of_a_process_that_has_ended_runs(reports):
    reports.child_ended(OrphanEnded(os.getpid(), 0))
    reports.take_ends()
    with rank(7, os.getpid()):
        reports.act_until(lambda: len(reports.told) == 2)
        assert reports.pids == [os.getpid()] and not reports.has_more


def test_a_rank_that_is_not_to_run_gets_no_word(reports):
    with rank(0, 77) as waits:
        reports.act_until(lambda: reports.told)
        reports.reply_to_rank(77, lets_go=False)
        assert waits.recv(100) == b""


def test_a_rank_that_nobody_starts_and_one_that_is_there_already_do_not_run(reports):
    with rank(3, 71) as unknown, rank(0, 72), rank(0, 73) as second:
        for refused in (unknown, second):
            reports.act_until(lambda refused=refused: is_closed(refused))
    assert reports.told == [RankRuns(72, 0, 0)]


def is_closed(connection):
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("code", [0, 127])
def test_a_process_that_ends_before_it_is_a_rank(reports, code):
    about = {"rank": 7, "pid": 77, "exit_code": code}
    reports.at_torchrun.sendall(json.dumps({"not_started": about}).encode() + b"\n")
    reports.act_until(lambda: reports.told)
    assert reports.told == [RankNotStarted(77, 7, 2, code)]
    assert json.loads(reports.at_torchrun.recv(100)) == {"rank": 7, "exit_code": code}
    with rank(7, 78) as late:
        reports.act_until(lambda: is_closed(late))
    assert len(reports.told) == 1


@pytest.mark.parametrize("code", [0, -9])
def test_a_process_that_has_become_a_rank_by_its_end(reports, code):
    """It ends once the rank has said that it is one, which may be read later."""
    about = {"rank": 7, "pid": 77, "exit_code": code}
    reports.at_torchrun.sendall(json.dumps({"not_started": about}).encode() + b"\n")
    with rank(7, 78):
        reports.act_until(lambda: reports.told and not reports.has_more)
    assert reports.told == [RankRuns(78, 7, 2)]


def test_the_end_of_a_rank_comes_behind_what_it_has_said(reports):
    """It may have been reaped before its first word was read."""
    link = {"exception": "KeyError", "message": "x", "frames": "", "how": ""}
    with rank(0, 77) as said:
        reports.child_ended(OrphanEnded(77, 3))
        said.sendall(json.dumps({"end": {"exit_code": 1, "chain": [link]}}).encode() + b"\n")
        reports.act_until(lambda: len(reports.told) == 3)
    ends = [RankExits(77, 1, (Link(**link),)), RankEnded(77, 3)]
    assert reports.told == [RankRuns(77, 0, 0), *ends]


def test_a_tmpdir_that_is_too_long_for_the_socket_is_named(tmp_path, logged):
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    with run_dir({"TMPDIR": str(folder)}) as made:
        assert made.startswith("/tmp/sm-launch-")
    assert "TMPDIR is too long for a socket in it (" in logged()
    refused = pytest.raises(
        LaunchError, match=r"cannot create a folder in /proc .* at most 60 bytes"
    )
    with refused, run_dir({"TMPDIR": "/proc"}):
        pass


NONSENSE = [{}, {"close": 1}, {"end": {}}, {"not_started": {"x": 1}}, {"pid": True}, 3, [1], "abc"]
NONSENSE += [{"thread": None}, {"pid": 1e300}, {"pid": "x"}, {"rank": [[1]]}, {"starts": True}]


@pytest.mark.parametrize("message", NONSENSE)
def test_invalid_messages_change_nothing(reports, message, logged):
    pid = os.getpid()
    with rank(0, pid) as good, connect(message) as other:
        deep = b"[" * 5000 + b"]" * 5000 + b"\n"
        other.sendall(b'{"pid": 1e999}\n\0\n' + deep)
        good.sendall(b"no JSON\n")
        reports.act_until(lambda: RankRuns(pid, 0, 0) in reports.told)
        connect({"close": {}}).close()
        reports.act_until(lambda: reports.told)
    assert reports.told == [RankRuns(pid, 0, 0)]
    assert "ignoring an invalid message from a rank: b'no JSON'" in logged()


def test_torchrun_below_a_program_ends_as_it_says(reports):
    reports._runner = RUNNER
    connect({"torchrun_pid": os.getpid()}, {"exit_code": 2, "error": "no such option"}).close()
    reports.act_until(lambda: TorchrunEnded(2, "no such option") in reports.told)


def test_a_torchrun_below_a_program_that_ends_without_a_word(reports):
    reports._runner = RUNNER
    connect({"torchrun_pid": os.getpid()}).close()
    without = TorchrunEnded(None, "it ended without an exit code")
    reports.act_until(lambda: without in reports.told)


def test_torchrun_by_itself_ends_as_its_process_does(reports):
    connect({"torchrun_pid": os.getpid()}, {"exit_code": 1, "error": "what it raised"}).close()
    reports.child_ended(TorchrunEnded(1))  # its last word may not have been read yet
    reports.act_until(lambda: len(reports.told) == 2)
    assert reports.told == [TorchrunRuns(), TorchrunEnded(1, "what it raised")]


def test_somebody_told_torchrun_to_end(reports):
    connect({"torchrun_pid": os.getpid()}, {"exit_code": 1, "signal": 15}).close()
    reports.child_ended(TorchrunEnded(1))
    reports.act_until(lambda: len(reports.told) == 2)
    told = "it received SIGTERM (signal 15), which the launcher had not sent"
    assert reports.told == [TorchrunRuns(), TorchrunEnded(None, told)]


GROUP = "the memory cgroup"
OOM = f"out of memory: {GROUP} recorded an OOM kill (oom_kill)"
NO_OOM = "no out-of-memory kill was recorded"
POOL = "A process in the process pool was terminated abruptly"


def counts(reports, kills):
    """Have the kernel count kills from now on; none was counted before."""
    reports._oom_kills = {GROUP: 0}
    reports._system.oom_kills = lambda: {GROUP: kills}


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize(
    ("code", "message", "is_told"),
    [(1, POOL, True), (1, "loss is nan", False), (247, "", True), (137, "", True), (3, "", False)],
)
def test_a_rank_of_which_a_process_was_killed_for_memory(reports, kills, code, message, is_told):
    counts(reports, kills)
    link = {"exception": "E", "message": message, "frames": "", "how": ""}
    with connect(
        {"rank": 0, "local_rank": 0, "pid": os.getpid()},
        {"thread": "pin", "chain": [link]},
        {"thread": "pin", "chain": []},
        {"end": {"exit_code": code, "chain": [link]}},
    ):
        reports.act_until(lambda: len(reports.told) == 3)
    oom, chain = OOM if kills and is_told else "", (Link(**link),)
    of_thread = oom if message else ""
    assert reports.told[1:] == [
        ThreadRaised(os.getpid(), "pin", chain, of_thread),
        RankExits(os.getpid(), code, chain, oom),
    ]


@pytest.mark.parametrize("kills", [0, 1])
@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL (signal 9)"), (11, "SIGSEGV (signal 11)")]
)
def test_a_rank_whose_connection_to_a_process_of_its_own_broke(reports, kills, number, name):
    counts(reports, kills)
    link = {"exception": "EOFError", "message": "", "frames": "", "how": ""}
    killed = f"its process loader (pid 7) was killed by {name}"
    end = {"exit_code": 1, "chain": [link], "killed": killed}
    with connect({"rank": 0, "local_rank": 0, "pid": os.getpid()}, {"end": end}):
        reports.act_until(lambda: len(reports.told) == 2)
    oom = OOM if kills and number == 9 else ""
    assert reports.told[1:] == [RankExits(os.getpid(), 1, (Link(**link),), oom, killed)]


@pytest.mark.parametrize(
    ("code", "with_kill", "without"),
    [(-9, OOM, NO_OOM), (247, OOM, ""), (137, OOM, ""), (1, "", ""), (-15, "", "")],
)
def test_counters_are_read_at_the_end_of_a_rank(reports, code, with_kill, without):
    rank(0, 7).close()
    reports.act_until(lambda: reports.told)
    for kills, oom in ((0, without), (1, with_kill)):
        counts(reports, kills)
        reports.told.clear()
        reports.child_ended(OrphanEnded(7, code))
        reports.act_until(lambda: reports.told)
        assert reports.told[-1] == RankEnded(7, code, oom)


@pytest.mark.parametrize("kind", [TorchrunEnded, ChildEnded])
def test_a_torchrun_that_is_killed_for_memory(reports, kind):
    for kills, code, oom in ((0, -9, ""), (1, -9, OOM), (1, -15, ""), (1, 1, "")):
        counts(reports, kills)
        reports.told.clear()
        reports.child_ended(kind(code))
        reports.act_until(lambda: reports.told)
        assert reports.told == [kind(code)._replace(oom=oom)]


def test_a_crash_comes_with_its_place_and_time(reports):
    rank(0, 7).close()
    reports.act_until(lambda: reports.told)
    with open(os.path.join(os.environ["TMPDIR"], "crash-7"), "w") as file:
        file.write("Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n")
        file.write('  File "/t/data.py", line 12 in decode\n')
    for code, calls in ((-11, (Call("decode", "/t/data.py", 12),)), (-6, ()), (-15, ()), (1, ())):
        reports.told.clear()
        reports.child_ended(OrphanEnded(7, code))
        reports.act_until(lambda: reports.told)
        (event,) = reports.told
        assert event.calls == calls and event.at.endswith(" UTC") is (code in (-11, -6))
    os.unlink(os.path.join(os.environ["TMPDIR"], "crash-7"))


def test_what_is_queued_of_an_attempt_is_not_told_once_the_next_has_begun(reports):
    """Whoever is told of one thing may end the attempt at that, also within one message's data."""
    ends = [OrphanEnded(pid, 1) for pid in (1, 2)]
    reports._take = lambda event: (reports.told.append(event), reports.close())
    for end in ends:
        reports.child_ended(end)
    reports.take_ends()
    assert reports.told == ends[:1] and not reports.has_more


def test_what_one_connection_has_said_behind_the_end_of_its_attempt_is_not_told(reports):
    reports._take = lambda event: (reports.told.append(event), reports.close())
    with connect({"torchrun_pid": os.getpid()}, {"starts": True, "request": 1}):
        reports.act_until(lambda: reports.told)
    assert reports.told == [TorchrunRuns()]


def test_those_who_ask_for_stacks_are_asked_for_once_and_answered_all(reports):
    """However many ask, and hang up: other hosts hear of it once."""
    for _ in range(50):
        connect(*[{"want_stacks": True}] * 20).close()
    with connect({"want_stacks": True}), rank(0, os.getpid()):
        reports.act_until(lambda: len(reports.told) == 2)
        assert reports.told == [StacksRequest(), RankRuns(os.getpid(), 0, 0)]
    with connect({"want_stacks": True}) as other:
        reports.act_until(lambda: not reports._pids and reports._stacks_requests)
        assert reports.told.count(StacksRequest()) == 1
        reports.reply_stacks({"lines": []})
        assert other.recv(100) == b'{"lines": []}\n'
    with connect({"want_stacks": True}):
        reports.act_until(lambda: reports.told.count(StacksRequest()) == 2)


@pytest.mark.parametrize("pid", [0, -1, -(2**40), 2**40])
def test_no_rank_has_a_pid_that_means_other_processes(reports, pid):
    """As kill(2) takes 0 and -1 for all that there are."""
    with (
        connect({"torchrun_pid": pid}),
        rank(0, pid),
        connect({"torchrun_pid": os.getpid()}),
    ):
        reports.act_until(lambda: TorchrunRuns() in reports.told)
    assert reports.told == [TorchrunRuns()] and not reports._ranks


def test_many_invalid_messages_are_few_lines_of_the_log(reports, logged):
    for _ in range(5):
        with connect(*[{"end": {}}] * 100):
            pass
    with rank(0, os.getpid()):
        reports.act_until(lambda: reports.told)
    assert 0 < logged().count("from a rank: b'{\"end\": {}}'") <= 20


def test_a_rank_that_speaks_before_anything_is_started_is_ignored(logged):
    with Signals() as signals, System(signals) as system:
        told = []
        reports = Reports(os.environ["TMPDIR"], system, told.append, Watch(0, 60))
        with rank(0, os.getpid()) as connection:
            for _ in range(2):
                for key, _ in system.selector.select(1):
                    key.data()
            connection.shutdown(socket.SHUT_WR)
            for key, _ in system.selector.select(1):
                key.data()
        reports.take_ends()
        reports.close()
    assert told == [] and logged() == ""
