"""What becomes of one host's torchrun and ranks: events in, phases and actions out; no processes.

What follows from two things at once, and for several hosts, is the simulator's (tests/simulation).
"""

import math
import signal
from typing import get_args

import pytest
from jobs import job_of

from launcher.errors import Disposition
from launcher.peers.events import Alone, Time
from launcher.peers.messages import Cleared, End, FromMember, Leave, Start, Stop, Succeeded
from launcher.result.causes import (
    SUCCESS,
    Cause,
    Exit,
    Failure,
    Link,
    Result,
    of_lost_host,
    stopped,
)
from launcher.run import machine
from launcher.run.events import (
    KeeperCleared,
    KeeperJoined,
    KeeperLost,
    KillTorchrun,
    LeaveRanks,
    NothingLeft,
    RankEnded,
    RankExits,
    RankRuns,
    ScriptEnded,
    StubSignalled,
    ThreadRaised,
    TorchrunEnded,
)
from launcher.run.state import Done
from launcher.text.words import Log, Note

TERM, INT = signal.SIGTERM, signal.SIGINT
FAILED = Result(1, "algo-2, rank 2 (local rank 0) failed\n")
FAILURE, STOP, RESTART = End(1, FAILED), End(1, stopped(TERM)), End(1, SUCCESS, "again")
JOINED = (KeeperJoined(0, 0, 2), KeeperJoined(1, 1, 2))
RUN = (RankRuns(0, 71), RankRuns(1, 72))
STARTED = (Start(1, 0), *JOINED, *RUN)
CLEARED = (KeeperCleared(0, 1, 0), KeeperCleared(1, 1, 0))
BROKEN = Exit(1, (Link("RuntimeError", "CUDA error"),), broken="an uncorrectable ECC error")
PEER = Link("RuntimeError", "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
RAISED = RankExits(0, Exit(1, (Link("ValueError", "loss is nan"),)))
COMPILE = "neuron_parallel_compile"


class Host:
    """A host that takes events in; `done` are the actions of the last one, `lines` its log."""

    def __init__(self, *events, runner="", tees=False, **options):
        options = {"grace": 20, "failure_grace": 10, "start_timeout": 60, **options}
        job = job_of("algo-1", ("algo-1", "algo-2"), runner=runner, **options)
        job = job._replace(plan=job.plan._replace(tees=tees))
        self.state, self.done, self.lines = machine.begin(job, 0.0), [], []
        self.at(1.0, *events)

    def at(self, now, *events):
        for event in events:
            self.state, actions = machine.step(self.state, event, now)
            self.done = [one for one in actions if not isinstance(one, (Log, Note))]
            self.lines = [one.line for one in actions if isinstance(one, Log)]
        return self

    def due(self, now):
        """Take in Time when it is due, which is now."""
        assert machine.due(self.state) == pytest.approx(now)
        return self.at(now, Time())

    @property
    def told(self):
        return [one for one in self.done if isinstance(one, get_args(FromMember))]


def running(**options):
    """Return a host whose two ranks run, with the pids 71 and 72."""
    host = Host(*STARTED, **options)
    assert machine.due(host.state) == math.inf
    return host


@pytest.mark.parametrize(("ends", "age"), [(6.0, 1.0), (600.0, 0.0)])
def test_a_rank_has_left_when_its_script_ended_unless_its_process_ran_on(ends, age):
    host = running().at(5.0, ScriptEnded(1)).at(ends, RankEnded(1, Exit(0)))
    assert host.told == [Succeeded(1, age)]


@pytest.mark.parametrize(("others", "isolated"), [(True, 2), (False, 0)])
def test_ranks_have_exchanged_nothing_only_if_all_say_so(others, isolated):
    host = running().at(5.0, ScriptEnded(0, isolated=others), ScriptEnded(1, isolated=True))
    host.at(5.0, RankEnded(0, Exit(0)), RankEnded(1, Exit(0)))
    assert host.told == [Succeeded(1, 0.0, are_all=True, isolated=isolated)]


@pytest.mark.parametrize(("between", "name"), [(60.0, "pin"), (61.0, "later")])
def test_what_a_thread_raised_up_to_a_minute_before_is_told(between, name):
    """The first of them: the others may follow from it."""
    threads = [
        ThreadRaised(0, one, Exit(1, (Link("KeyError", "x"),))) for one in ("old", "pin", "later")
    ]
    host = running().at(5.0, threads[0]).at(100.0, threads[1]).at(120.0, threads[2])
    (failed,) = host.at(100.0 + between, RankEnded(0, Exit(4))).told
    assert f'exit code 4 (thread "{name}" raised KeyError: x' in failed.headline


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_failure_after_the_end_of_its_script_is_told_as_such(has_ended):
    host = running().at(5.0, *[ScriptEnded(0)] * has_ended)
    (failed,) = host.at(6.0, RankEnded(0, Exit(4))).told
    assert ("exit code 4 after its script had ended" in failed.headline) is has_ended


def test_what_a_rank_has_said_comes_before_the_end_of_torchrun():
    said, torchruns = running().at(10.0, RAISED).at(10.5, TorchrunEnded(-9)).told
    assert (said.cause, said.age, torchruns.cause) == (Cause.OWN, 0.5, Cause.TORCHRUN)


def test_a_failure_after_a_restart_counts_its_seconds_from_the_start_of_the_job():
    host = running().at(60.0, RESTART, *CLEARED).at(62.0, Start(2, 1), *RUN, RAISED)
    (failed,) = host.at(62.5, RankEnded(0, Exit(1))).told
    assert (failed.details, failed.age) == ("exit code 1, 61 s after start", 0.5)
    (failed,) = host.at(63.0, TorchrunEnded(-9)).told
    assert failed.details == "exit code 69, 62 s after start"


# Why this host fails, if its torchrun or a keeper does; what a program does after a success, too.
@pytest.mark.parametrize(
    ("event", "runner", "says"),
    [
        (TorchrunEnded(-9, oom="out of memory"), "", "torchrun was killed by SIGKILL (signal 9); "),
        (TorchrunEnded(1, "OSError: x"), "", "torchrun failed: OSError: x"),
        (TorchrunEnded(3), COMPILE, f"{COMPILE} failed"),
        (TorchrunEnded(0), COMPILE, "it ended before torchrun had succeeded"),
        (KeeperLost(1), "", "rank 1 (local rank 1): its keeper was killed"),
    ],
)
def test_what_ends_before_the_job_has_failed(event, runner, says):
    (failed,) = running(runner=runner).at(5.0, event).told
    assert says in failed.headline and not failed.may_restart


def test_a_keeper_that_leaves_as_it_was_told_is_not_lost():
    host = running().at(5.0, FAILURE, *CLEARED, Leave(FAILED))
    left = host.state
    assert host.at(5.1, KeeperLost(0)).state == left and host.done == []


WORKS_ON = (End(1, SUCCESS), *CLEARED, Leave(SUCCESS))


@pytest.mark.parametrize("end", [End(1, SUCCESS), End(1, FAILED)], ids=["success", "failure"])
@pytest.mark.parametrize(("grace", "copies"), [(0, 15.0), (100, 100.0)])
def test_torchrun_is_killed_at_the_end_unless_it_has_output_to_copy(end, grace, copies):
    events = (end, *CLEARED, Leave(end.result))
    assert KillTorchrun() in running().at(5.0, *events).done
    host = running(tees=True, failure_grace=grace).at(5.0, *events)
    assert host.done == [LeaveRanks(end.result.exit_code)]
    assert host.due(5.0 + copies).done == [KillTorchrun()]


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((*WORKS_ON, TorchrunEnded(3)), 3),
        ((WORKS_ON[0], TorchrunEnded(3), *WORKS_ON[1:]), 3),
        ((TorchrunEnded(3), *WORKS_ON), 3),  # they cross
        ((*WORKS_ON, TorchrunEnded(0)), 0),
        ((*WORKS_ON, Stop(TERM)), 143),
        ((WORKS_ON[0], Stop(TERM), *WORKS_ON[1:]), 143),
        ((Stop(TERM), *WORKS_ON), 143),  # they cross
        ((Stop(TERM), TorchrunEnded(-TERM), *WORKS_ON), 143),  # the stop has ended it, too
        ((TorchrunEnded(3), Stop(TERM), *WORKS_ON), 3),
    ],
)
def test_a_program_that_runs_torchrun_may_work_on_after_a_success(events, code):
    assert machine.due(running(runner=COMPILE).at(5.0, *WORKS_ON).state) == math.inf
    host = running(runner=COMPILE).at(5.0, *events)
    assert host.state.result.exit_code == code
    has_ended = any(isinstance(one, TorchrunEnded) for one in events)
    assert (KillTorchrun() in host.done) == (code == 143 and not has_ended)
    if code == 143:
        host.at(6.0, TorchrunEnded(-9))
    assert isinstance(host.at(6.0, NothingLeft()).state.phase, Done)
    assert host.state.result.exit_code == code


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "rank 1 (local rank 1): its process below torchrun was killed"),
        (TERM, "torchrun failed: it was sent a signal, or ends by itself"),
    ],
)
def test_a_torchrun_that_signals_its_stubs_has_failed(number, says):
    """Once; it may have words of its own when it has ended. Or a stop reaches the launcher, too."""
    host = running().at(5.0, StubSignalled(1, number))
    (failed,) = host.told
    assert says in failed.headline
    again = host.at(5.0, StubSignalled(0, TERM), StubSignalled(0, TERM)).told
    (ended,) = host.at(5.5, TorchrunEnded(1)).told
    assert again == [] and ended.cause == Cause.TORCHRUN_ENDS >= failed.cause
    error = "SignalException: Process 7 got signal: 15"
    (told,) = running().at(5.0, StubSignalled(1, TERM)).at(5.5, TorchrunEnded(1, error)).told
    assert "torchrun was ended by SIGTERM" in told.headline
    assert told.cause == Cause.TORCHRUN
    assert host.at(5.6, Stop(TERM)).told == [Stop(TERM)]
    (failed,) = running().at(5.0, RESTART, StubSignalled(1, number)).told
    assert says in failed.headline


def test_torchrun_has_to_start_all_ranks_in_time():
    (failed,) = Host(Start(1, 0), JOINED[0]).due(61.0).told
    assert "it has not started all ranks of this host within 60 s" in failed.text


def test_a_first_host_whose_ranks_are_not_the_first_fails():
    (failed,) = Host(Start(1, 0), *(one._replace(group_rank=1) for one in JOINED)).told
    assert "has not given the first host group rank 0" in failed.text


@pytest.mark.parametrize("end", [FAILURE, RESTART])
def test_a_rank_that_failed_before_it_could_be_ended_is_told(end):
    """A rank that has got the signal failed for that; but hardware does not break for it."""
    (failed,) = running().at(5.0, RAISED, end).at(6.0, RankEnded(0, Exit(1))).told
    assert (failed.cause, failed.may_restart, failed.age) == (Cause.OWN, True, 1.0)
    handles = RankEnded(0, Exit(1), response=Disposition.HANDLES)
    assert running().at(5.0, end, RAISED, handles).told == []
    (failed,) = running().at(5.0, end, RankExits(0, BROKEN), handles).told
    assert failed.broken and not failed.may_restart


ALONE = Alone(of_lost_host("algo-1", "was lost: its launcher died"))
LOST = Result(69, "algo-1 was lost: its launcher died\nexit code 69\n")
NOT_HERE = Failure(Cause.OWN, 127, "algo-2: no such file")


@pytest.mark.parametrize(
    ("events", "result"),
    [
        ((), LOST),
        ((Stop(INT), Stop(TERM)), stopped(INT)),
        ((NOT_HERE,), NOT_HERE.result),
        ((NOT_HERE, Stop(TERM)), stopped(TERM)),
        (STARTED, LOST),
        ((*STARTED, Stop(TERM)), stopped(TERM)),
        ((*STARTED, FAILURE), FAILED),
        ((*STARTED, RESTART), LOST),
        ((*STARTED, Stop(TERM), RESTART), stopped(TERM)),  # they cross
    ],
)
def test_without_a_coordinator_a_host_ends_for_its_own_reason_or_the_loss(events, result):
    host = Host(*events).at(5.0, ALONE)
    assert host.state.result == result
    host.at(6.0, *CLEARED[: len(host.state.ranks)], TorchrunEnded(-9), NothingLeft())
    assert isinstance(host.state.phase, Done) and host.state.result == result


HANG = "ranks have made no progress for 60 s"


@pytest.mark.parametrize(
    ("is_hang", "text", "because"),
    [
        (
            True,
            f"{HANG}: algo-2, rank 1 is absent\nexit code 75 (--launcher-hang-timeout)\n",
            "a hang",
        ),
        (False, "x failed with E: (--launcher-hang-timeout)\n", None),
    ],
)
def test_only_a_hang_whose_reason_the_log_has_is_cut(is_hang, text, because):
    lines = running().at(5.0, End(1, Result(75, text, is_hang=is_hang))).lines
    assert lines == [f"stopping this host's ranks: {because or text.strip()}"]


def test_no_rank_is_told_twice():
    host = running().at(5.0, RAISED).due(7.5)
    assert len(host.told) == 1 and host.at(8.0, FAILURE, RankEnded(0, Exit(1))).told == []


def test_where_ranks_are_is_logged_before_they_are_killed():
    host = running().at(5.0, RAISED).at(8.0, Time(), FAILURE, RankEnded(1, Exit(0))).due(16.0)
    assert host.done == [machine.PLACES]
    assert host.lines == [
        "1 rank still running at the end of the grace period: SIGKILL follows in 2 s."
    ]


KILLED = "before the stop: algo-1, rank 0 (local rank 0) was killed by SIGKILL (signal 9)"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((RankEnded(0, Exit(-9)),), [f"{KILLED}."]),
        (
            (RankEnded(0, Exit(-9, recorded="x")), RankEnded(1, Exit(3))),
            [f"{KILLED}; x, and 1 rank more."],
        ),
        ((RankEnded(0, Exit(0)),), []),
        # By somebody who stops the ranks, too; and what follows from another one's end.
        ((RankEnded(0, Exit(-TERM)),), []),
        ((RankEnded(0, Exit(128 + TERM)),), []),
        ((RankExits(0, Exit(1, (PEER,))), RankEnded(0, Exit(1))), []),
    ],
)
def test_a_rank_that_failed_before_a_stop_came_is_said_here_alone(ends, said):
    host = running(max_restarts=1).at(5.0, *ends).at(5.1, Stop(TERM))
    assert host.lines[0].startswith("SIGTERM (signal 15): stopping; ")
    assert host.lines[1:] == said


def test_what_a_rank_does_at_a_stop_is_said_if_it_fails():
    handles = Disposition.HANDLES
    host = running().at(5.0, STOP, RankEnded(0, Exit(1), response=handles))
    assert host.lines == ["during the stop: algo-1, rank 0 (local rank 0) ended with exit code 1."]
    assert host.at(6.0, RankEnded(1, Exit(143), response=handles)).lines == []
    # By somebody else: its grace is not over.
    host = running().at(5.0, STOP).at(6.0, RankEnded(0, Exit(-9), response=handles))
    assert host.lines == [f"during{KILLED.removeprefix('before')}."]


def test_a_stop_before_ranks_run_is_said():
    host = Host(Start(1, 0), *JOINED).at(2.0, Stop(TERM))
    (line,) = host.lines
    assert line.endswith(": stopping; the ranks of algo-1 have 20 s to save.")


def test_processes_that_survive_are_given_up():
    host = running().at(5.0, FAILURE, CLEARED[0], KeeperCleared(1, 1, 2))
    assert host.told == [Cleared(1, 2)] and host.lines == [
        "2 processes of the job survived SIGKILL for 5 s (stuck in the kernel); giving up on them."
    ]


@pytest.mark.parametrize("stop", [(STOP,), (Stop(TERM), ALONE), (STOP, RAISED)])
def test_a_rank_that_is_killed_at_the_end_of_its_grace_is_said_once(stop):
    """Also where nobody commands it any more."""
    host = running().at(5.0, *stop).due(23.0)
    assert host.done == [machine.PLACES] and host.lines == [
        "2 ranks still running at the end of the grace period: SIGKILL follows in 2 s."
    ]
    killed = RankEnded(0, Exit(-9, recorded="x"), response=Disposition.HANDLES)
    assert host.at(25.1, killed).lines == []


def test_a_stop_that_comes_again_is_said():
    """But not the first signal here after another host's: SageMaker signals all."""
    host = running().at(5.0, STOP).at(5.1, Stop(TERM))
    assert host.lines == []
    assert "gives ranks no more time" in host.at(6.0, Stop(TERM)).lines[0]


HANDLES, DEFAULT = Disposition.HANDLES, Disposition.DEFAULT


@pytest.mark.parametrize(
    ("stop", "ends", "handled"),
    [
        (TERM, [(0, 143, HANDLES), (1, -15, HANDLES)], 2),
        (TERM, [(0, 0, HANDLES), (1, -15, DEFAULT)], -1),
        (TERM, [(0, 1, HANDLES), (1, 0, HANDLES)], -1),
        (INT, [(0, -2, HANDLES), (1, -2, HANDLES)], -1),  # Python dies of KeyboardInterrupt
        (TERM, [(0, 0, None), (1, 0, HANDLES)], 1),
    ],
)
def test_ranks_that_have_handled_a_stop_are_counted(stop, ends, handled):
    host = running().at(5.0, End(1, stopped(stop)))
    host.at(8.0, *(RankEnded(rank, Exit(code), response=how) for rank, code, how in ends), *CLEARED)
    assert host.told == [Cleared(1, 0, -1, handled, 3.0 if handled > 0 else 0.0)]
