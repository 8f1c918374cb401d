"""What becomes of one host's torchrun and ranks: the rules, without processes or clocks."""

import signal

import pytest

from launcher.errors import AtSignal
from launcher.events import AllJoined, Decided, Leave, Left, Log, Stop, Succeeded, Tell, Time
from launcher.result.causes import Cause, Failure, RankFailure, Result
from launcher.result.raised import Link
from launcher.run import machine, ranks
from launcher.run.events import (
    Answer,
    CannotStart,
    ChildEnded,
    ExitCodes,
    Look,
    NoteResponses,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
    Remaining,
    Responses,
    Signal,
    SignalGroup,
    SignalProcesses,
    SignalTorchrun,
    Start,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunStarts,
    Why,
)
from launcher.run.state import Job, Phase
from launcher.text import lasted

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
SECONDARY = (Link("RuntimeError", "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),)
LOST = Result(69, "algo-2 was lost: its launcher died\nexit code 69\n")


class Run:
    """One host's run, of two ranks with pids 10 and 11: each call is an event at a time."""

    def __init__(self, *, has_peers=True, grace=100, failure_grace=10, max_restarts=0):
        job = Job("algo-1", ("algo-1", "algo-2"), "algo-1:29400", grace, failure_grace, has_peers)
        self.state = machine.begin(job)
        self.max_restarts = max_restarts

    def __call__(self, now, *events):
        """Let events happen; return what is to be done, but for the log."""
        done = []
        for event in events:
            self.state, actions = machine.step(self.state, event, now)
            done += actions
        self.log = [action.line for action in done if isinstance(action, Log)]
        return [action for action in done if not isinstance(action, Log)]

    def started(self, now=0, first_pid=10, restart=0):
        """Start torchrun and the ranks."""
        if self.state.phase is Phase.JOINING:
            assert self(now, AllJoined("10.0.0.1")) == [Start("10.0.0.1", True)]
        more = (restart, self.max_restarts)
        ranks = [RankStarted(number, number, first_pid + number, *more) for number in (0, 1)]
        assert self(now, *ranks) == []
        return self

    def is_in(self, phase, due=float("inf")):
        assert (self.state.phase, machine.due(self.state)) == (phase, due)
        return True


def test_while_all_ranks_run_nothing_is_due():
    run = Run().started()
    assert run.is_in(Phase.RUNNING)
    assert run(5, Time(), ChildEnded()) == [] and run.is_in(Phase.RUNNING)


def test_success_of_a_host_that_is_alone():
    run = Run(has_peers=False).started()
    assert run(3, RankGone(10, 0), RankGone(11, 0), TorchrunEnded(0)) == [Look()]
    assert run(3, Remaining([])) == []
    assert run.state.phase is Phase.DONE and run.state.result == Result(0)


def test_success_waits_for_the_other_hosts():
    run = Run().started()
    run(3, RankGone(10, 0), RankGone(11, 0), TorchrunEnded(0))
    assert run(3, Remaining([])) == [Tell(Succeeded())] and run.is_in(Phase.WAITING)
    assert run(9, Decided(Result(0))) == [] and run.state.phase is Phase.DONE


def test_a_failure_from_the_rank_to_the_end():
    run = Run().started()
    assert run(5, RankSaid(11, 1, (Link("ValueError", "x"),), False)) == []
    assert run.is_in(Phase.FAILING, due=7.5)  # its exit code is not certain yet
    (tell,) = run(6, RankGone(11, 3))
    assert tell.what.cause is Cause.OWN and tell.what.exit_code == 3
    assert tell.what.text.startswith("algo-1, rank 1 (local rank 1) failed with ValueError: x\n")
    assert run.is_in(Phase.FAILING, due=16)
    assert run(6, TorchrunAsks(Why.FAILURE)) == [Answer(15.0)]
    assert run.is_in(Phase.ENDING, due=16)
    assert run(7, RankGone(10, -TERM)) == []
    tell, look = run(7, TorchrunEnded(1))
    assert tell.what.exit_code == 3 and look == Look()
    assert run(7, Decided(tell.what.result)) == []
    assert run(7, Remaining([])) == [] and run.state.phase is Phase.DONE


def test_the_other_hosts_do_not_wait_longer_for_an_exit_code():
    run = Run().started()
    run(5, RankSaid(11, 1, (Link("ValueError"),), False))
    assert [type(action.what) for action in run(7.5, Time())] == [Failure]
    assert run.is_in(Phase.FAILING, due=15)
    (tell,) = run(8, TorchrunEnded(1))[:1]  # all that is known at the end is told once more
    assert tell.what.exit_code == 1


def test_a_rank_that_raised_and_ends_with_0_has_not_failed():
    run = Run().started()
    run(5, RankSaid(11, 1, (Link("ValueError"),), False))
    assert run(6, RankGone(11, 0)) == [] and run.is_in(Phase.RUNNING)


def test_a_stop_beside_a_failure_that_is_taken_back():
    run = Run().started()
    run(5, RankSaid(11, 1, (Link("ValueError"),), False))
    assert run(6, Signal(TERM)) == []
    assert SignalTorchrun(TERM) in run(7, RankGone(11, 0)) and run.state.phase is Phase.STOPPING


def test_no_restart_of_a_job_that_has_failed():
    run = Run(max_restarts=1).started(restart=1)
    run(5, RankGone(11, 7), Decided(LOST))
    assert run(6, TorchrunAsks(Why.RESTART)) == [Answer(15.0), SignalTorchrun(TERM)]
    assert run.state.phase is Phase.ENDING


def test_a_failed_rank_that_does_not_end_is_killed():
    run = Run().started()
    run(5, RankSaid(11, 1, (Link("ValueError"),), True))
    assert run(15, Time()) == [SignalProcesses((11,), KILL)] and run.is_in(Phase.FAILING, due=30)
    assert "--launcher-failure-grace sets its time to end" in run.log[0]
    assert run(30, Time()) == [SignalProcesses((11,), KILL)]


def test_torchrun_that_sees_nothing_is_killed_with_the_job():
    run = Run().started()
    run(5, RankGone(11, 7))
    assert run(15, Time()) == [SignalTorchrun(KILL)] and run.is_in(Phase.FAILING, due=20)
    # Then what it leaves hears SIGTERM. Torchrun itself may be held by the kernel.
    assert run(20, Time()) == [Look()] and run.is_in(Phase.KILLING)
    assert run(20, Remaining([(5, 5), (10, 10)])) == [SignalProcesses([5, 10], KILL)]
    assert run.log == ["killing 2 processes of the job with SIGKILL."]
    assert run(21, Time()) == [Look()]
    assert run(21, Remaining([(5, 5)])) == [SignalProcesses([5], KILL)] and run.log == []


def test_no_rank_runs_but_torchrun_does_not_end():
    run = Run().started()
    run(5, RankGone(11, 7), RankGone(10, -TERM))
    assert run(15, Time()) == [SignalTorchrun(KILL)]


def test_a_better_cause_is_waited_for():
    run = Run().started()
    run(5, RankSaid(11, 1, SECONDARY, True))
    assert run(5, TorchrunAsks(Why.FAILURE)) == [] and run.is_in(Phase.HOLDING, due=8)
    tell, answer = run(6, RankSaid(10, 1, (Link("KeyError"),), True))
    assert tell.what.cause is Cause.OWN and answer == Answer(15.0)
    assert run.is_in(Phase.ENDING, due=16)
    (tell, _) = run(7, TorchrunEnded(1))
    assert tell.what.text.startswith("algo-1, rank 0 (local rank 0) failed with KeyError\n")


@pytest.mark.parametrize("event", [Time(), RankGone(10, 0), Decided(LOST)])
def test_no_better_cause_comes(event):
    run = Run().started()
    run(5, RankSaid(11, 1, SECONDARY, True), TorchrunAsks(Why.FAILURE))
    assert run(8, event) == [Answer(15.0)] and run.is_in(Phase.ENDING, due=18)


# Stops.


def test_a_stop_that_saves():
    run = Run().started()
    assert run(5, Signal(TERM)) == [Tell(Stop(TERM)), NoteResponses(TERM), SignalTorchrun(TERM)]
    run(5, Responses({10: AtSignal.HANDLES, 11: AtSignal.HANDLES}))
    assert run.is_in(Phase.STOPPING, due=10)  # torchrun is to pass it on
    assert run(5, TorchrunAsks(Why.STOP)) == [Answer(100)] and run.is_in(Phase.STOPPING, due=110)
    assert run(30, RankGone(10, 0)) == [] and run.is_in(Phase.STOPPING, due=110)
    assert run(40, RankGone(11, -TERM)) == [] and run.is_in(Phase.STOPPING, due=45)
    assert run(41, TorchrunEnded(1)) == [Look()]  # and tells of no failure
    assert run(41, Remaining([])) == [] and run.is_in(Phase.WAITING)


def test_a_stop_of_a_host_that_is_alone():
    run = Run(has_peers=False).started()
    run(5, Signal(INT), RankGone(10, 0), RankGone(11, 0), TorchrunEnded(1), Remaining([]))
    assert run.state.result == Result(130, "", INT)


def test_a_stop_before_anything_was_started():
    run = Run(has_peers=False)
    assert run(0, Signal(TERM)) == [] and run.state.result == Result(143, "", TERM)
    assert run(0, AllJoined("")) == []  # and nothing is


def test_what_a_wrapper_runs_hears_a_stop():
    run = Run().started()
    run(5, Signal(INT))
    # os.system ignores Ctrl-C while it waits for what it runs.
    assert run(5, Responses({10: AtSignal.IGNORES, 11: AtSignal.HANDLES})) == [SignalGroup(10, INT)]
    # A rank that died of it has saved nothing. With a handler it may have, but not of SIGINT.
    assert run(6, RankGone(11, -INT)) == [SignalGroup(11, INT)]
    run = Run().started()
    run(5, Signal(TERM), Responses({10: AtSignal.DIES, 11: AtSignal.HANDLES}))
    assert run(6, RankGone(10, -TERM)) == [SignalGroup(10, TERM)]
    assert run(6, RankGone(11, -TERM)) == []


def test_nobody_hears_a_stop_twice():
    run = Run().started()
    run(5, Signal(TERM), TorchrunAsks(Why.STOP))
    assert run(6, Signal(TERM), Signal(INT), Decided(Result(143, "", TERM))) == []
    assert run.is_in(Phase.STOPPING, due=110)


def test_the_third_interrupt_kills():
    run = Run().started()
    assert Look() not in run(5, Signal(INT), Signal(INT))
    assert run(6.5, Signal(INT)) == [Look()] and run.state.phase is Phase.KILLING
    run = Run().started()
    run(5, Signal(INT), Signal(INT))
    assert run(7.5, Signal(INT)) == []  # too late for the third within 2 s


def test_the_third_interrupt_ends_a_host_that_waits_for_others():
    run = Run()
    assert run(5, Signal(INT), Signal(INT), Signal(INT)) == [Tell(Stop(INT)), Tell(Stop(INT))]
    assert run.state.phase is Phase.DONE and run.state.result.exit_code == 130


def test_when_the_grace_is_over_the_job_is_killed():
    run = Run().started()
    run(5, Signal(TERM), TorchrunAsks(Why.STOP))
    assert run(110, Time()) == [Look()] and run.state.phase is Phase.KILLING


@pytest.mark.parametrize("event", [Signal(TERM), Decided(LOST), Decided(Result(143, "", TERM))])
def test_ranks_hear_a_stop_though_torchrun_hangs(event):
    run = Run(failure_grace=10).started()
    run(5, event)
    assert run(10, Time()) == [SignalTorchrun(KILL)]
    run(10, TorchrunEnded(-KILL))
    assert run(10, Remaining([(10, 10), (20, 10)])) == [SignalProcesses([10], TERM)]
    assert run.state.leftovers_by == (105 if run.state.stop_signal else 20)


def test_a_torchrun_that_restarts_ranks_has_its_time_to_pass_a_stop_on():
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART), Signal(TERM))
    assert run(10, Time()) == [SignalTorchrun(KILL)]


def test_ranks_that_start_after_the_stop_have_their_grace():
    run = Run()
    run(0, AllJoined(""))
    run(5, Signal(TERM))
    assert run.is_in(Phase.STOPPING, due=10)  # torchrun may be deaf, and no rank runs
    run(6, RankStarted(0, 0, 10, 0, 0))
    assert run.is_in(Phase.STOPPING, due=11)  # for torchrun to pass it on
    run(7, TorchrunAsks(Why.STOP))
    assert run.is_in(Phase.STOPPING, due=111)


def test_ranks_that_start_after_torchrun_was_answered_have_their_grace():
    run = Run()
    run(0, AllJoined(""))
    run(1, Signal(TERM), TorchrunAsks(Why.STOP), RankStarted(0, 0, 10, 0, 0))
    assert run.is_in(Phase.STOPPING, due=106)


def test_a_failure_while_ranks_save_is_said_and_no_more():
    run = Run().started()
    run(5, Signal(TERM))
    assert run(6, RankSaid(10, 1, (Link("OSError", "disk full"),), True)) == []
    assert run.log == [
        "while stopping: algo-1, rank 0 (local rank 0) failed with OSError: disk full."
    ]


@pytest.mark.parametrize("phase", ["failing", "holding", "ending"])
def test_a_stop_after_a_failure_changes_nothing(phase):
    run = Run().started()
    run(5, RankSaid(11, 1, SECONDARY if phase == "holding" else (Link("KeyError"),), True))
    if phase != "failing":
        run(5, TorchrunAsks(Why.FAILURE))
    assert run.state.phase.value == phase
    assert run(5, Signal(TERM)) == [] and run.log == [
        "SIGTERM (signal 15): the job is already ending."
    ]
    assert run.state.phase.value == phase


def test_a_stop_while_the_other_hosts_go_on_stops_them():
    run = Run().started()
    run(3, RankGone(10, 0), RankGone(11, 0), TorchrunEnded(0), Remaining([]))
    assert run(4, Signal(TERM)) == [Tell(Stop(TERM))] and run.is_in(Phase.WAITING)
    run(5, Decided(Result(143, "", TERM)))
    assert run.state.phase is Phase.DONE and run.state.result.exit_code == 143


def test_a_stop_that_came_first_elsewhere_is_a_stop():
    run = Run().started()
    run(5, RankGone(11, 7))
    assert SignalTorchrun(TERM) in run(5, Decided(Result(143, "", TERM)))
    assert run.state.phase is Phase.STOPPING


# What ranks left behind.


def test_an_upload_keeps_the_rest_of_the_grace():
    run = Run(grace=40).started()
    run(5, Signal(TERM), RankGone(10, 0), RankGone(11, 0), TorchrunEnded(1))
    assert run(6, Remaining([(20, 10)])) == [] and run.is_in(Phase.DRAINING, due=40)
    assert run.log == ["1 processes that ranks left behind have 39 s to end."]
    assert run(7, ChildEnded()) == [Look()]
    assert run(7, Remaining([(20, 10)])) == [] and run.log == []
    assert run(40, Time()) == [Look()]
    assert run(40, Remaining([(20, 10)])) == [SignalProcesses([20], TERM)]
    assert run.is_in(Phase.DRAINING, due=45)
    run(45, Time())
    assert run(45, Remaining([(20, 10)])) == [SignalProcesses([20], KILL)]
    run(50, Time())
    assert run(50, Remaining([(20, 10)])) == []  # the kernel holds it
    assert run.state.phase is Phase.WAITING


def test_ranks_that_lost_their_torchrun_hear_a_stop_and_not_their_helpers():
    run = Run().started()
    run(5, Signal(TERM), TorchrunEnded(-KILL))
    # What another rank has started that has ended, an upload say, keeps the rest of the grace.
    left = Remaining([(10, 10), (11, 11), (20, 10), (30, 30)])
    assert run(6, left) == [SignalProcesses([10, 11], TERM)]


def test_what_ranks_leave_after_a_failure_is_told_at_once():
    run = Run().started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.FAILURE), RankGone(10, -TERM), TorchrunEnded(1))
    assert run(6, Remaining([(20, 10)])) == [SignalProcesses([20], TERM)]
    assert run(7, Remaining([(20, 10)])) == []  # once
    assert run(15, Remaining([(20, 10)])) == [SignalProcesses([20], KILL)]


# Restarts.


def test_a_restart():
    run = Run(max_restarts=1).started()
    (tell,) = run(5, RankGone(11, 7))
    assert tell.what.cause is Cause.RESTARTED and run.is_in(Phase.RUNNING)
    assert run(5, TorchrunAsks(Why.RESTART)) == [Answer(None)] and run.is_in(Phase.RESTARTING)
    assert run(6, RankGone(10, 5)) == []  # no cause: torchrun has ended it
    assert run(6, TorchrunStarts()) == [Look(behind=True)]
    assert run(6, Remaining([(20, 10)])) == [SignalProcesses([20], TERM)]
    assert run.is_in(Phase.CLEARING, due=16)
    assert run(7, ChildEnded()) == [Look(behind=True)]
    assert run(7, Remaining([])) == [Answer(None)] and run.is_in(Phase.RUNNING)
    run.started(8, first_pid=12, restart=1)
    (tell,) = run(9, RankGone(13, 7))
    assert tell.what.cause is Cause.OWN


def test_what_the_last_attempt_left_is_killed_in_the_end():
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART), TorchrunStarts(), Remaining([(20, 10)]))
    assert run(15, Time()) == [Look(behind=True)]
    assert run(15, Remaining([(20, 10)])) == [SignalProcesses([20], KILL)]
    assert run(20, Remaining([(20, 10)])) == [Answer(None)] and run.is_in(Phase.RUNNING)


def test_a_stop_gives_what_the_last_attempt_left_no_more_time():
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART), TorchrunStarts(), Remaining([(20, 10)]))
    run(6, Signal(TERM))
    run(7, TorchrunEnded(1))
    assert run(15, Remaining([(20, 10)])) == [SignalProcesses([20], KILL)]


def test_a_kill_between_two_attempts_is_not_the_last():
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART), TorchrunStarts(), Remaining([(20, 10)]))
    run(15, Time(), Remaining([(20, 10)]))
    run(16, Signal(TERM))
    run(21, TorchrunEnded(1))
    assert run(21, Remaining([(20, 10)])) == [SignalProcesses([20], KILL)]
    assert run.state.phase is Phase.DRAINING


@pytest.mark.parametrize("clearing", [False, True])
def test_a_stop_while_torchrun_restarts_ranks(clearing):
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART))
    if clearing:
        run(5, TorchrunStarts(), Remaining([(20, 10)]))
    assert SignalTorchrun(TERM) in run(6, Signal(TERM)) and run.state.phase is Phase.STOPPING
    assert run(6, TorchrunStarts()) == [Answer(None)]


def test_a_failure_elsewhere_while_torchrun_starts_ranks_again():
    run = Run(max_restarts=1).started()
    run(5, RankGone(11, 7), TorchrunAsks(Why.RESTART), Decided(LOST))
    assert run(6, TorchrunStarts()) == [Answer(None)] and run.state.phase is Phase.ENDING


# Other hosts, and torchrun itself.


def test_another_host_failed():
    run = Run().started()
    assert run(5, Decided(LOST)) == [SignalTorchrun(TERM)]
    assert run.log == ["ending the ranks of algo-1: algo-2 was lost: its launcher died"]
    assert run(6, TorchrunAsks(Why.STOP)) == [Answer(15.0)] and run.is_in(Phase.ENDING, due=16)
    assert run(7, RankSaid(10, 1, (Link("KeyError"),), True)) == []  # it has been told to end


@pytest.mark.parametrize("deaf", ["the store is lost", "no rank runs"])
def test_a_deaf_torchrun_is_killed(deaf):
    run = Run().started()
    if deaf == "no rank runs":
        run(4, RankGone(10, 0), RankGone(11, 0))
    decided = Decided(LOST, store_is_lost=deaf == "the store is lost")
    assert run(5, decided) == [SignalTorchrun(KILL)]


def test_torchrun_cannot_go_on():
    run = Run().started()
    answer, tell = run(5, TorchrunAsks(Why.ERROR, "RendezvousConnectionError: lost"))
    assert answer == Answer(15.0)
    assert (tell.what.cause, tell.what.exit_code) == (Cause.TORCHRUN, 69)
    assert run(6, RankGone(10, 3)) == []  # no cause
    named = (RankFailure(0, 0, 3),)
    tell, _ = run(7, TorchrunEnded(1, named))
    assert tell.what.cause is Cause.TORCHRUN


def test_somebody_else_stops_torchrun():
    run = Run().started()
    assert run(5, TorchrunAsks(Why.STOP)) == [Answer(15.0)] and run.is_in(Phase.ENDING, due=15)
    assert SignalTorchrun(TERM) in run(5, Signal(TERM)) and run.state.phase is Phase.STOPPING


def test_torchrun_is_killed():
    run = Run().started()
    tell, look = run(5, TorchrunEnded(-KILL))
    assert tell.what.text.startswith("algo-1: torchrun was killed by SIGKILL") and look == Look()
    left = Remaining([(10, 10), (11, 11), (20, 10)])
    assert run(5, left) == [SignalProcesses([10, 11], TERM)]


def test_this_host_cannot_start():
    run = Run()
    failure = Failure(Cause.OWN, 2, "launcher: algo-1: no script\n")
    assert run(0, CannotStart(failure)) == [Tell(failure), Tell(Leave())]
    assert run(1, Signal(TERM)) == [Tell(Stop(TERM))] and run.is_in(Phase.LEAVING)
    run(2, Left())
    assert run.state.phase is Phase.DONE and run.state.result == failure.result


def test_the_job_ends_before_the_start():
    run = Run()
    assert run(0, Decided(LOST)) == [Tell(Leave())] and run(1, Left()) == []
    assert run.state.result == LOST


# What is known of a rank.


STARTED = RankStarted(3, 1, 10, 0, 0)


@pytest.mark.parametrize(
    ("said", "failure", "exit_code"),
    [
        # what a rank said is the cause; its exit code is what its hook chose
        ([RankSaid(10, 1, (), False), RankGone(10, 7)], 7, 7),
        # said 1, crashed on its way out: torch's threads make some do that
        ([RankSaid(10, 1, (), False), RankGone(10, -signal.SIGABRT)], 1, -signal.SIGABRT),
        ([RankSaid(10, 1, (), False), RankIsFinal(10), RankGone(10, -signal.SIGABRT)], 1, 1),
        # torchrun alone knows it
        ([RankGone(10, None), ExitCodes({1: 42})], 42, 42),
        ([RankGone(10, None), ExitCodes({0: 42})], None, None),
        ([RankGone(10, 0)], None, 0),
        ([RankGone(12, 1)], None, None),  # another process
    ],
)
def test_what_is_known_of_a_rank(said, failure, exit_code):
    known, _ = ranks.take_in({}, STARTED, 0.0)
    for one in said:
        known, _ = ranks.take_in(known, one, 5.0)
    rank = known[10]
    assert (rank.failure and rank.failure.exit_code, rank.exit_code) == (failure, exit_code)


def test_an_out_of_memory_kill_is_named():
    known, _ = ranks.take_in({}, STARTED, 0.0)
    known, _ = ranks.take_in(known, RankGone(10, -KILL, "out of memory: x"), 5.0)
    assert known[10].failure == RankFailure(3, 1, -KILL, time=5.0, oom="out of memory: x")


def took(*events, has_peers=True):
    """Return what the log says at the end of a host that began to join at 10 s."""
    job = Job("algo-1", ("algo-1", "algo-2"), "algo-1:29400", 100, 10, has_peers)
    host = machine.begin(job, 10)
    for now, event in events:
        host, _ = machine.step(host, event, now)
    return host.took(now)


FROM_10_S = ((12.5, AllJoined("10.0.0.1")), (15, RankStarted(0, 0, 10, 0, 0)))


def test_how_long_each_part_of_a_job_took():
    assert took(*FROM_10_S, (140, TorchrunEnded(0)), (140.5, Remaining([]))) == (
        "joining 2.5 s, start 2.5 s, training 125 s"
    )
    alone = took(*FROM_10_S, (20000, TorchrunEnded(0)), has_peers=False)
    assert alone == "start 2.5 s, training 5 h 33 min"
    stop = ((60, Signal(TERM)), (60, TorchrunAsks(Why.STOP)), (75, TorchrunEnded(1)))
    assert took(*FROM_10_S, *stop) == "joining 2.5 s, start 2.5 s, training 45 s, saving 15 s"


def test_how_long_a_job_that_failed_took():
    failed = ((20, RankGone(10, 1)), (20, TorchrunAsks(Why.FAILURE)), (30, TorchrunEnded(1)))
    assert took(*FROM_10_S, *failed) == "joining 2.5 s, start 2.5 s, training 5.0 s, ending 10 s"
    before_a_rank = took(FROM_10_S[0], (15, TorchrunEnded(1)))
    assert before_a_rank == "joining 2.5 s, start 2.5 s"
    never = took((910, Decided(LOST)))
    assert never == "joining 15 min, nothing was started"


def test_a_restart_is_part_of_the_training():
    again = ((20, RankGone(10, 1)), (20, TorchrunAsks(Why.RESTART)), (20, TorchrunStarts()))
    again += ((20, Remaining([])), (23, RankStarted(0, 0, 20, 1, 1)), (40, TorchrunEnded(0)))
    assert took(*FROM_10_S, *again) == "joining 2.5 s, start 2.5 s, training 25 s"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (599, "599 s"), (600, "10 min")),
        *((3599, "59 min"), (3600, "1 h 0 min"), (200_000, "55 h 33 min")),
    ],
)
def test_how_the_log_says_how_long(seconds, says):
    assert lasted(seconds) == says
