"""What becomes of one host's torchrun and ranks: events in, phases and actions out; no processes.

What follows from two things at once, and for several hosts, is the simulator's (tests/simulation).
"""

import math
import signal

import pytest
from jobs import job_of

from launcher.errors import Disposition
from launcher.peers.messages import (
    Cleared,
    End,
    Failed,
    NoRanksHere,
    RanksSucceeded,
    Restart,
    Start,
    Stop,
    Succeeded,
)
from launcher.result.causes import Result, stopped
from launcher.result.raised import Link
from launcher.run import machine
from launcher.run.events import (
    CancelGpuCheck,
    CheckGpus,
    ChildEnded,
    CloseRequested,
    FindLeftovers,
    GpusChecked,
    KillRanks,
    KillTorchrun,
    LeftoversFound,
    PlacesReported,
    RankEnded,
    RankExits,
    RankNotStarted,
    RankRuns,
    Reply,
    ReplyToRank,
    Report,
    RequestPlaces,
    ScriptEnded,
    Signal,
    SignalChild,
    SignalGroup,
    Signalled,
    SignalProcesses,
    SignalRanks,
    StartRequested,
    ThreadRaised,
    Time,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.run.state import Done, Ending, Failing, Restarting, Running, Waiting, Why
from launcher.text.words import Log

TERM, KILL = signal.SIGTERM, signal.SIGKILL
FAILED = Result(1, "algo-2, rank 2 (local rank 0) failed\n")
RANKS = ((71, 0, 0), (72, 1, 1))
STARTS = StartRequested(((0, 0), (1, 1)), keeps_store=False)


class Host:
    """A host that takes events in; `done` are the actions of the last one."""

    def __init__(self, runner="", **job):
        job = {"grace": 20, "failure_grace": 10, "peer_port": 29401, **job}
        self.state = machine.begin(
            job_of("algo-1", ("algo-1", "algo-2"), runner=runner, **job), 0.0
        )
        self.done = []

    def at(self, now, *events):
        for event in events:
            self.state, actions = machine.step(self.state, event, now)
            self.done = [one for one in actions if not isinstance(one, Log)]
            self.lines = [one.line for one in actions if isinstance(one, Log)]
        return self

    def due(self, now):
        """Take in Time when it is due, which is now."""
        assert machine.due(self.state) == pytest.approx(now)
        return self.at(now, Time())

    @property
    def phase(self):
        return type(self.state.phase)

    @property
    def why(self):
        return self.state.phase.why

    @property
    def kills_torchrun(self):
        return any(
            isinstance(one, KillTorchrun) for one in self.done
        )  # it equals any that is empty

    def told(self):
        return [one.message for one in self.done if isinstance(one, Report)]


def running(nproc=2, **job):
    """Return a host whose ranks run since 2 s; they have pids from 71 on."""
    starts = STARTS._replace(ranks=tuple((rank, rank) for rank in range(nproc)))
    host = Host(**job).at(0.0, Start(1)).at(1.0, TorchrunRuns(), starts)
    assert host.done == [Reply()]
    for rank in range(nproc):
        host.at(2.0, RankRuns(71 + rank, rank, rank))
        assert host.done == [ReplyToRank(71 + rank, lets_go=True)]
    assert machine.due(host.state) == math.inf
    return host


def raised(pid=71):
    return RankExits(pid, 1, (Link("ValueError", "loss is nan"),))


def test_a_failure_counts_when_its_rank_has_ended():
    host = running().at(5.0, raised())
    assert host.phase is Running and not host.done
    host.at(6.0, RankEnded(71, 42))
    (failed,) = host.told()
    assert host.phase is Failing and failed.failure.exit_code == 42 and failed.failure.may_restart


def test_or_two_seconds_and_a_half_after_it_was_said():
    host = running().at(5.0, raised()).due(7.5)
    assert host.phase is Failing and host.told()[0].failure.exit_code == 1
    assert host.at(8.0, RankEnded(71, 0)).phase is Failing  # nothing is taken back


def of_thread(name, oom=""):
    return ThreadRaised(71, name, (Link("KeyError", "x"),), oom)


@pytest.mark.parametrize(
    ("end", "says"),
    [((raised(), RankEnded(71, 1)), "loss is nan"), ((RankEnded(71, 4),), "exit code 4")],
)
@pytest.mark.parametrize("between", [30.0, 60.0, 61.0])
def test_what_a_thread_raised_up_to_a_minute_before_is_told(end, says, between):
    """The first of them: the others may follow from it."""
    host = running().at(5.0, of_thread("long ago")).at(100.0, of_thread("pin"))
    host.at(120.0, of_thread("later")).at(100.0 + between, *end)
    (failed,) = host.told()
    assert says in failed.failure.headline
    seconds = between if between <= 60 else between - 20
    name = "pin" if between <= 60 else "later"
    assert f'(thread "{name}" raised KeyError: x, {seconds:.0f} s earlier)' in failed.failure.text


def test_what_a_thread_raised_does_not_end_a_rank_and_tells_of_a_kill():
    host = running().at(5.0, of_thread("pin", oom="out of memory"))
    assert host.phase is Running and host.done == []
    other = running().at(5.0, of_thread("pin")).at(6.0, raised(72), RankEnded(72, 1))
    assert "thread" not in other.told()[0].failure.text  # it was another rank's
    host.at(7.0, RankEnded(71, 1))
    assert "; out of memory (thread" in host.told()[0].failure.text


def test_of_a_killed_torchrun_the_reason_is_told():
    oom = "out of memory: the machine recorded an OOM kill (oom_kill)"
    (failed,) = running().at(5.0, TorchrunEnded(-9, oom=oom)).told()
    assert failed.failure.headline.endswith(f"was killed by SIGKILL (signal 9); {oom}")
    host = running(runner="neuron_parallel_compile").at(5.0, ChildEnded(-9, oom))
    assert f"neuron_parallel_compile was killed by SIGKILL (signal 9); {oom}" in (
        host.told()[0].failure.text
    )


def test_the_first_rank_that_ends_with_0_is_told_and_all_of_them_with_a_failure():
    """Ranks of the same host may fail because of it, or ranks of others."""
    host = running(nproc=4)
    assert host.at(5.0, RankEnded(72, 0)).told() == [RanksSucceeded(1, 1, (0.0,))]
    assert host.at(7.0, RankEnded(73, 0)).told() == []
    host.at(8.0, raised(), RankEnded(71, 1))
    ends, failed = host.told()
    assert ends == RanksSucceeded(1, 1, (3.0, 1.0)) and isinstance(failed, Failed)
    # While the coordinator waits for other causes ranks are ended: what they end with says nothing.
    assert host.at(9.0, RankEnded(74, 0)).told() == [RanksSucceeded(1, 1, (4.0, 2.0))]


def test_a_failure_is_told_with_its_age():
    assert running().at(5.0, raised()).due(7.5).told()[0].age == 2.5


@pytest.mark.parametrize(("ends", "age"), [(6.0, 1.0), (600.0, 0.0)])
def test_a_rank_has_left_when_its_script_ended_unless_its_process_ran_on(ends, age):
    host = running().at(5.0, ScriptEnded(72)).at(ends, RankEnded(72, 0))
    assert host.told() == [RanksSucceeded(1, 1, (age,))]


@pytest.mark.parametrize("event", [Signal(TERM), Restart(1, ""), End(FAILED)])
def test_ranks_that_end_because_they_were_told_to_have_not_left(event):
    assert running().at(5.0, event).at(6.0, RankEnded(72, 0)).told() == []


@pytest.mark.parametrize(
    ("code", "how"), [(-11, "was killed by SIGSEGV (signal 11)"), (7, "ended with exit code 7")]
)
def test_a_failure_after_the_script_says_so(code, how):
    host = running().at(5.0, ScriptEnded(71)).at(6.0, RankEnded(71, code))
    (failed,) = host.told()
    assert failed.failure.headline.endswith(f"{how} after its script had ended")
    assert failed.failure.may_restart and failed.failure.exit_code == (
        code if code > 0 else 128 - code
    )


def test_before_that_a_stop_is_a_stop():
    host = running().at(5.0, raised()).at(6.0, Signal(TERM))
    assert host.told() == [Stop(TERM)] and (host.phase, host.why) == (Ending, Why.STOP)
    assert SignalRanks((71, 72), TERM) in host.done


KILLED = "before the stop: algo-1, rank 0 (local rank 0) was killed by SIGKILL (signal 9)"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([RankEnded(71, -9, "")], [f"{KILLED}."]),
        (
            [RankEnded(71, -9, "out of memory"), RankEnded(72, 3)],
            [f"{KILLED}; out of memory, and 1 rank more."],
        ),
        ([raised(), RankEnded(71, 1)], ["before the stop: algo-1, rank 0 (local rank 0) "]),
        ([RankEnded(71, 0)], []),
        # By somebody who stops the ranks, too, or since another host's were stopped before.
        ([RankEnded(71, -TERM)], []),
        ([RankEnded(71, 128 + TERM)], []),
        ([RankEnded(71, -signal.SIGABRT)], []),
        (
            [
                RankExits(
                    71,
                    1,
                    (
                        Link(
                            "RuntimeError",
                            "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
                        ),
                    ),
                ),
                RankEnded(71, 1),
            ],
            [],
        ),
    ],
)
@pytest.mark.parametrize("stop", [End(stopped(TERM)), Signal(TERM)])
def test_a_rank_that_failed_before_a_stop_came_is_said_here_alone(ends, said, stop):
    """The coordinator had decided already, or decides for the stop."""
    host = running(max_restarts=1).at(5.0, *ends).at(5.1, stop)
    if host.phase is Failing:
        host.at(5.2, End(stopped(TERM)))
    assert host.lines[0].startswith("SIGTERM (signal 15): stopping; ")
    assert len(host.lines) == 1 + len(said)
    assert all(line.startswith(start) for line, start in zip(host.lines[1:], said))


def test_a_hosts_own_signal_after_the_stop_of_another_is_only_said_when_it_comes_again():
    host = running().at(5.0, End(stopped(TERM)))
    assert len(host.lines) == 1  # SageMaker signals every host: that is the same stop
    assert host.at(5.1, Signal(TERM)).lines == []
    (line,) = host.at(6.0, Signal(TERM)).lines
    assert line.startswith("SIGTERM (signal 15): the ranks are already stopping")


def test_without_a_word_from_the_coordinator_ranks_are_ended():
    host = running().at(5.0, TorchrunEnded(-9)).due(5.0 + 1.0 + 5)
    assert (host.phase, host.why) == (Ending, Why.FAILURE)
    assert host.done == [SignalRanks((71, 72), TERM)]


def test_ranks_end_while_the_coordinator_waits_if_there_can_be_no_better_cause():
    host = running(nproc=3).at(5.0, raised(), RankEnded(71, 1))
    assert host.phase is Failing and SignalRanks((72, 73), TERM) in host.done
    assert host.at(5.1, RankEnded(72, -TERM)).told() == []  # that is no failure
    host.at(5.3, End(FAILED))
    assert host.why is Why.FAILURE and host.done == []  # once


def test_ranks_are_told_once_and_killed_when_their_time_is_over():
    host = running().at(5.0, End(FAILED))
    assert host.done == [SignalRanks((71, 72), TERM)]
    host.at(6.0, RankEnded(71, 0))
    assert host.done == []
    assert [type(one) for one in host.due(13.0).done] == [RequestPlaces]
    host.at(13.5, PlacesReported({71: "save, a.py:1", 72: "load, data.py:88"}))
    assert host.due(15.0).done == [KillRanks((72,))]
    assert host.lines[0] == "rank 1 has not exited; it is in load, data.py:88."


def test_a_rank_that_said_what_it_raised_is_not_told():
    host = running().at(5.0, raised()).at(5.1, End(FAILED))
    assert host.done == [SignalRanks((72,), TERM)]


@pytest.mark.parametrize("event", [Signal(TERM), End(FAILED), Restart(1, "again")])
def test_a_rank_that_comes_once_ranks_are_to_end_does_not_run(event):
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS)
    host.at(2.0, RankRuns(71, 0, 0)).at(3.0, event)
    assert SignalRanks((71,), TERM) in host.done
    assert host.at(4.0, RankRuns(72, 1, 1)).done == [ReplyToRank(72, lets_go=False)]


@pytest.mark.parametrize("event", [Signal(TERM), End(FAILED), Restart(1, "again")])
def test_the_end_of_a_rank_that_does_not_run_is_waited_for_and_is_no_failure(event):
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS).at(3.0, event)
    host.at(3.1, LeftoversFound((72,)), RankRuns(72, 1, 1), CloseRequested())
    assert not any(isinstance(one, Reply) for one in host.done)
    ended = host.at(3.2, RankEnded(72, 143))
    assert FindLeftovers() in ended.done and Reply(depart=True) in ended.done
    assert not ended.lines and not any(isinstance(one, Failed) for one in host.told())


def test_a_rank_that_does_not_run_and_does_not_end_is_killed():
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS).at(3.0, End(FAILED))
    host.at(3.1, RankRuns(72, 1, 1)).at(12.9, Time())
    assert KillRanks((72,)) in host.at(13.0, Time()).done


def test_a_process_that_ends_before_it_is_a_rank_has_failed():
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS)
    (failed,) = host.at(2.0, RankNotStarted(71, 0, 0, 127)).told()
    assert host.phase is Failing and failed.failure.exit_code == 127 and failed.failure.rank == 0


@pytest.mark.parametrize("connected", [False, True])
def test_without_leave_torchrun_is_killed_at_once(connected):
    host = Host().at(0.0, Start(1)).at(1.0, *[TorchrunRuns()] * connected, Signal(TERM))
    assert host.kills_torchrun
    assert host.lines == [
        "SIGTERM (signal 15): stopping before any rank of algo-1 has started."  # nothing to save
    ]


def test_a_torchrun_that_starts_ranks_sees_that_they_do_not_run():
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS).at(2.0, Signal(TERM))
    host.at(2.0, LeftoversFound(())).at(2.1, RankRuns(71, 0, 0), RankEnded(71, 143))
    assert not host.at(4.1, Time()).kills_torchrun
    assert host.due(7.0).kills_torchrun  # not all have come
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS).at(2.0, Signal(TERM))
    host.at(2.0, LeftoversFound(())).at(2.1, RankRuns(71, 0, 0), RankRuns(72, 1, 1))
    host.at(2.2, RankEnded(71, 143), RankEnded(72, 143)).at(2.2, LeftoversFound(()))
    assert host.due(4.2).kills_torchrun


def ended(host, now, **codes):
    """Have both ranks end, and nothing else be left."""
    host.at(now, RankEnded(71, 0), RankEnded(72, codes.get("code", 0)))
    return host.at(now, LeftoversFound(()))


def test_torchrun_is_answered_when_no_rank_runs():
    host = running().at(5.0, End(FAILED)).at(5.0, CloseRequested())
    assert host.done == []
    ended(host, 6.0)
    assert host.state.torchrun.requests_close is False and not host.kills_torchrun
    assert host.due(8.0).kills_torchrun  # it has not ended


def test_a_torchrun_that_copies_output_has_time_for_it():
    host = ended(running().at(5.0, End(FAILED), CloseRequested(tees=True)), 6.0)
    assert host.due(18.0).kills_torchrun
    host = running().at(9.0, RankEnded(71, 0), RankEnded(72, 0), CloseRequested(tees=True))
    host.at(9.0, LeftoversFound(())).at(10.0, End(FAILED))
    assert not host.kills_torchrun  # another host has failed
    assert host.due(19.0).kills_torchrun


def test_a_torchrun_that_does_not_ask_is_killed():
    host = ended(running().at(5.0, End(FAILED)), 6.0)
    assert host.due(8.0).kills_torchrun and NoRanksHere(1) in host.told()


def test_a_restart_clears_the_attempt_and_waits_for_the_word():
    host = running().at(5.0, Restart(1, "attempt 1 of 2 failed"))
    assert host.lines == ["attempt 1 of 2 failed"] and host.why is Why.RESTART
    host.at(5.3, GpusChecked("")).at(5.5, CloseRequested())
    ended(host, 6.0)
    host.at(6.5, TorchrunEnded(1), ChildEnded(1))
    assert host.phase is Ending
    host.at(6.5, LeftoversFound(()))
    assert host.phase is Restarting and host.told() == [Cleared(1, 0)]
    host.at(7.0, Start(2))
    assert host.phase is Running and not host.state.ranks and host.state.attempt == 2


def restarted(host):
    """Have a host end its ranks for a restart, in a second, with nothing left behind."""
    assert CheckGpus() in host.at(5.0, Restart(1, "")).done
    host.at(5.5, CloseRequested())
    ended(host, 6.0)
    return host.at(6.0, TorchrunEnded(1), ChildEnded(1)).at(6.0, LeftoversFound(()))


def test_a_restart_waits_for_the_driver_of_the_gpus_and_no_longer_than_5_s():
    host = restarted(running())
    assert host.phase is Ending and host.told() == []
    assert host.due(10.0).done == [CancelGpuCheck(), Report(Cleared(1, 0, ""))]
    assert host.at(11.0, GpusChecked("algo-1, GPU 0 is lost")).done == []


def test_which_gpus_are_broken_travels_with_what_is_left():
    host = restarted(running())
    assert host.at(6.5, GpusChecked("algo-1, GPU 3 is lost")).told() == [
        Cleared(1, 0, "algo-1, GPU 3 is lost")
    ]


def test_a_rank_that_says_so_while_ranks_are_ended_counts_as_well():
    host = running().at(5.0, Restart(1, "")).at(5.1, GpusChecked("")).at(5.5, CloseRequested())
    lost = Link("NVMLError_GpuIsLost", "GPU is lost")
    host.at(5.6, RankExits(72, 1, (Link("RuntimeError", "no batch"), lost)))
    ended(host, 6.0, code=1)
    host.at(6.5, TorchrunEnded(1), ChildEnded(1)).at(6.5, LeftoversFound(()))
    assert host.told() == [Cleared(1, 0, "algo-1, rank 1 (local rank 1) reports a lost GPU")]


def test_a_host_whose_ranks_had_succeeded_asks_as_well():
    host = running().at(5.0, RankEnded(71, 0), RankEnded(72, 0), CloseRequested())
    host.at(5.5, TorchrunEnded(0), ChildEnded(0)).at(5.5, LeftoversFound(()))
    assert host.phase is Waiting
    assert CheckGpus() in host.at(6.0, Restart(1, "")).done and NoRanksHere(1) in host.told()
    host.at(6.0, LeftoversFound(()))
    assert host.at(6.2, GpusChecked("")).told() == [Cleared(1, 0)] and host.phase is Restarting


def test_a_stop_does_not_wait_for_the_driver():
    host = restarted(running()).at(7.0, Signal(TERM))
    assert CancelGpuCheck() in host.done and host.phase is Waiting


def test_a_stop_during_a_restart_leaves_the_later_deadline():
    host = running().at(5.0, Restart(1, "")).at(6.0, Signal(TERM))
    assert host.why is Why.STOP and host.state.phase.deadline == 26.0
    assert not any(isinstance(one, SignalRanks) for one in host.done)  # they know


def test_what_survives_sigkill_is_said():
    host = running().at(5.0, Restart(1, ""), GpusChecked(""))
    host.at(6.0, RankEnded(71, 0)).at(6.0, RankEnded(72, 0)).at(6.0, LeftoversFound((99,)))
    assert host.done == [SignalProcesses((99,), TERM)]
    host.at(7.0, TorchrunEnded(1), ChildEnded(1)).at(7.0, LeftoversFound((99,)))
    assert SignalProcesses((99,), KILL) in host.due(15.0).done
    for now in (16.0, 17.0, 18.0, 19.0, 20.0):
        host.at(now, Time())
    assert host.told() == [Cleared(1, 1)] and "survived SIGKILL" in host.lines[0]


def test_what_survives_sigkill_is_counted_though_torchrun_ends_late():
    host = running().at(5.0, Restart(1, ""), GpusChecked(""))
    host.at(6.0, RankEnded(71, 0)).due(13.0).due(15.0)  # 72 is killed
    host.at(15.0, RankEnded(72, -9)).at(15.0, LeftoversFound((99,)))
    assert KillTorchrun() in host.at(17.0, Time()).done
    for now in (17.0, 18.0, 19.0):
        host.at(now, LeftoversFound((99,))).at(now + 1, Time())
    host.at(20.5, TorchrunEnded(-9)).at(20.5, ChildEnded(-9))
    assert host.told() == []  # until it is known what is left, now that torchrun is gone
    assert host.at(20.5, LeftoversFound((99,))).told() == [Cleared(1, 1)]


def test_success_is_told_when_all_ranks_have_ended_with_0():
    host = running().at(9.0, RankEnded(71, 0)).at(9.0, RankEnded(72, 0))
    assert host.told() == [RanksSucceeded(1, 0, (0.0, 0.0)), Succeeded(1)]
    assert host.why is Why.SUCCESS
    assert host.at(9.1, CloseRequested()).done == [Reply()]  # it goes on to its barrier
    host.at(9.2, LeftoversFound((99,)))
    assert host.done == [SignalProcesses((99,), TERM)]  # though torchrun waits for other hosts
    assert SignalProcesses((99,), KILL) in host.due(19.0).done


def test_a_host_that_has_succeeded_takes_part_in_a_restart():
    host = running().at(9.0, RankEnded(71, 0)).at(9.0, RankEnded(72, 0)).at(9.1, CloseRequested())
    host.at(9.2, LeftoversFound(())).at(12.0, Restart(1, ""))
    assert host.kills_torchrun and host.told() == [NoRanksHere(1)]


def test_a_host_that_has_succeeded_is_stopped_while_the_others_go_on():
    host = running().at(9.0, RankEnded(71, 0)).at(9.0, RankEnded(72, 0)).at(9.1, CloseRequested())
    host.at(9.2, LeftoversFound(()))
    assert host.at(12.0, Signal(TERM)).told() == [Stop(TERM)]
    host.at(12.1, End(stopped(TERM)))
    assert host.kills_torchrun and host.why is Why.STOP


def test_a_stop_changes_nothing_when_a_failure_has_ended_the_job():
    host = running().at(5.0, End(FAILED)).at(6.0, Signal(TERM))
    assert host.done == [] and host.why is Why.FAILURE
    assert host.lines == ["SIGTERM (signal 15): the job is already ending."]


@pytest.mark.parametrize(("stop", "result"), [(True, Why.STOP), (False, None)])
def test_sigterm_to_torchrun_by_somebody_else(stop, result):
    host = running().at(5.0, CloseRequested(TERM))
    assert host.phase is Running and not host.done
    if stop:
        assert host.at(5.5, Signal(TERM)).why is result
    else:
        (failed,) = host.due(6.0).told()
        assert (
            "it received SIGTERM (signal 15), which the launcher had not sent"
            in failed.failure.text
        )
        assert not failed.failure.may_restart  # never a restart


def test_torchrun_is_killed_above_its_ranks():
    host = running().at(5.0, TorchrunEnded(-9))
    (failed,) = host.told()
    assert host.phase is Failing and "torchrun was killed by SIGKILL" in failed.failure.text
    assert host.at(6.0, End(FAILED)).done == [SignalRanks((71, 72), TERM)]


def test_a_program_that_runs_torchrun_is_told_before_that_and_after():
    host = Host(runner="compile").at(0.0, Start(1)).at(5.0, Signal(TERM))
    assert SignalChild(TERM) in host.done and not host.kills_torchrun
    host.at(5.0, LeftoversFound(()))
    assert SignalChild(KILL) in host.due(25.0).done
    host = Host(runner="compile").at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS)
    host.at(2.0, *(RankRuns(*rank) for rank in RANKS)).at(9.0, RankEnded(71, 0)).at(
        9.0, RankEnded(72, 0)
    )
    assert host.told() == []  # it works on
    host.at(9.1, TorchrunEnded(0)).at(9.1, LeftoversFound(())).at(20.0, ChildEnded(0))
    assert host.told() == [Succeeded(1)]


def test_it_may_run_torchrun_again():
    host = running(runner="compile").at(5.0, RankEnded(71, 0))
    assert host.told() == []  # these leave nobody
    host.at(5.0, RankEnded(72, 0), CloseRequested())
    host.at(6.0, TorchrunEnded(0)).at(7.0, TorchrunRuns(), STARTS)
    assert host.done == [Reply()] and host.phase is Running
    host.at(8.0, RankRuns(81, 0, 0), RankEnded(81, 3))
    assert host.phase is Failing and host.told()[0].failure.exit_code == 3


def test_its_failure_is_the_hosts():
    host = Host(runner="compile").at(0.0, Start(1)).at(5.0, ChildEnded(3))
    (failed,) = host.told()
    assert (
        failed.failure.text.startswith("algo-1: compile failed") and not failed.failure.may_restart
    )


def test_ctrl_c_reaches_what_a_rank_has_started_that_ignores_it_itself():
    host = running().at(5.0, Signal(2)).at(5.0, Signalled({71: Disposition.IGNORES}))
    assert host.done == [SignalGroup(71, 2)]


def test_what_ranks_leave_at_a_stop_hears_it_only_near_the_end_of_the_grace():
    host = running().at(5.0, Signal(TERM)).at(6.0, RankEnded(71, 0)).at(6.0, RankEnded(72, 0))
    host.at(6.0, CloseRequested()).at(6.0, LeftoversFound((99,)))
    assert host.lines == [
        "1 process left running by ranks; any that remain will be killed in 19 s."
    ]
    host.at(6.1, TorchrunEnded(1), ChildEnded(1)).at(6.1, LeftoversFound((99,)))
    assert host.due(20.0).done == [SignalProcesses((99,), TERM)]
    assert SignalProcesses((99,), KILL) in host.due(25.0).done


def test_a_host_waits_for_the_others_when_nothing_is_left_on_it():
    host = running().at(5.0, RankEnded(71, 3)).due(10.3)
    host.at(11.0, RankEnded(72, 0)).at(11.0, LeftoversFound(())).at(11.1, CloseRequested())
    host.at(11.2, TorchrunEnded(1), ChildEnded(1)).at(11.2, LeftoversFound(()))
    assert host.phase is Waiting
    assert host.at(12.0, End(FAILED)).phase is Done


def test_a_rank_that_survives_sigkill_is_left_though_torchrun_is_gone():
    host = running().at(5.0, TorchrunEnded(-9), ChildEnded(-9)).at(5.5, End(FAILED))
    host.at(15.5, Time()).at(16.5, Time()).at(16.5, LeftoversFound(())).at(20.5, Time())
    assert host.phase is Done and "survived SIGKILL" in host.lines[-1]


def test_a_torchrun_that_survives_sigkill_is_left():
    host = Host().at(0.0, Start(1)).at(1.0, TorchrunRuns(), STARTS).at(2.0, End(FAILED))
    assert host.at(2.0, LeftoversFound(())).due(4.0).due(7.0).kills_torchrun
    assert host.due(12.0).phase is Done


def test_what_the_third_interrupt_finds_after_others_is_killed_at_once_too():
    host = running().at(5.0, Signal(2)).at(5.1, RankEnded(71, 0), RankEnded(72, 0))
    host.at(5.1, LeftoversFound((98,))).at(5.3, Signal(2)).at(5.6, Signal(2))
    assert SignalProcesses((98,), KILL) in host.done
    assert SignalProcesses((98, 99), KILL) in host.at(5.7, LeftoversFound((98, 99))).done
    assert host.at(5.8, LeftoversFound((98, 99))).done == []


def test_what_is_left_later_is_killed_though_ranks_have_been():
    host = running(runner="neuron_parallel_compile").at(5.0, End(FAILED)).due(13.0).due(15.0)
    host.at(15.1, RankEnded(71, -9), RankEnded(72, -9)).at(15.1, LeftoversFound(()))
    host.at(25.0, ChildEnded(-9)).at(25.0, LeftoversFound((99,)))
    assert host.done[0] == SignalProcesses((99,), KILL)


def test_a_program_is_killed_whose_torchrun_survives_sigkill():
    host = running(runner="neuron_parallel_compile").at(5.0, End(FAILED))
    ended(host, 6.0)
    assert host.due(8.0).kills_torchrun
    assert any(isinstance(one, SignalChild) for one in host.due(13.0).done)


@pytest.mark.parametrize("why", [Why.SUCCESS, Why.FAILURE])
def test_a_stop_is_told_while_no_result_is_known(why):
    port = 0 if why is Why.SUCCESS else 29401
    host = running(runner="neuron_parallel_compile", peer_port=port)
    if why is Why.SUCCESS:  # and the program goes on
        host.at(9.0, RankEnded(71, 0), RankEnded(72, 0))
    else:  # and the coordinator says nothing
        host.at(9.0, TorchrunEnded(-9)).at(15.0, Time())
    assert host.why is why
    assert Stop(TERM) in host.at(20.0, Signal(TERM)).told()
