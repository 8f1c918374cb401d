"""How processes are ended: ranks, what they left behind, torchrun, and what runs it. Pure.

There is one way for all reasons. It looks at what is known each time, not at what has changed.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable

from launcher.errors import Disposition
from launcher.peers.messages import Cleared, NoRanksHere
from launcher.result.causes import broken_hardware, headline, stopped
from launcher.run.events import (
    Actions,
    Answer,
    CancelGpuCheck,
    CheckGpus,
    FindLeftovers,
    GpusChecked,
    KillRanks,
    KillTorchrun,
    LeftoversFound,
    RequestPlaces,
    SignalChild,
    SignalGroup,
    Signalled,
    SignalProcesses,
    SignalRanks,
    Tell,
)
from launcher.run.ranks import Rank
from launcher.run.state import (
    CLOSE_REQUEST_SECONDS,
    EXIT_BARRIER_SECONDS,
    GPU_CHECK_SECONDS,
    KILL_AGAIN_SECONDS,
    MARGIN_SECONDS,
    PLACES_SECONDS,
    Done,
    Ending,
    Restarting,
    State,
    Step,
    Torchrun,
    Waiting,
    Why,
)
from launcher.text.words import NAMED, Log, plural


def instead(ending: Ending, why: Why, now: float, grace: float) -> Ending:
    """Return how processes are ended now, after they were for another reason.

    What was told to end is not told again, and keeps the later deadline for a stop alone. A host
    that had succeeded has told nobody yet that no rank runs here.
    """
    if ending.why is Why.SUCCESS:
        return Ending(why, now, now + grace, told=ending.told, left=ending.left)
    if why is not Why.STOP:
        return ending._replace(why=why)
    ending = ending._replace(asked=False, killed_at=math.inf, kill_again_at=-math.inf)
    return ending._replace(why=why, by=max(ending.by, now + grace))


class _Clock:
    """The time, and the next time at which something has to be looked at again."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.due = math.inf

    def has_come(self, at: float) -> bool:
        """Tell whether a time has come, and wait for it if not."""
        if self.now >= at:
            return True
        self.due = min(self.due, at)
        return False


def advance(state: State, ending: Ending, now: float) -> Step:
    """Do all that can be done now to end processes; go on when nothing is left."""
    clock = _Clock(now)
    ending, actions = _end_ranks(state, ending, clock)
    torchrun_is_stuck = clock.has_come(state.torchrun.killed_at + MARGIN_SECONDS)
    if not state.alive and (torchrun_is_stuck or not state.torchrun.may_have_ranks):
        if math.isinf(ending.no_ranks_since):
            ending = ending._replace(no_ranks_since=now, left=None)
            actions += (FindLeftovers(),)
        ending, more = _tell_no_ranks(state, ending, clock)
        actions = more + actions  # before FindLeftovers, which may clear the attempt at once
        ending, more = _end_left(state, ending, clock)
        actions += more
    if ending.left == () and not state.alive:
        ending = ending._replace(killed_at=math.inf)  # what was killed has ended
    gives_up = clock.has_come(ending.killed_at + MARGIN_SECONDS)
    torchrun, more = _end_torchrun(state, ending, clock, gives_up=gives_up)
    state = state._replace(torchrun=torchrun)
    ending, program = _end_program(state, ending, clock)
    ending, asks = _ask_gpus(state, ending, clock)
    actions += more + program + asks
    survivors = len({rank.pid for rank in state.alive} | set(ending.left or ()))
    child_killed_at = ending.program_killed_at if state.runner else torchrun.killed_at
    gone = torchrun.child_has_ended or clock.has_come(child_killed_at + MARGIN_SECONDS)
    state = state._replace(phase=ending._replace(due=clock.due))
    is_known = math.isinf(ending.answer_by) or ending.broken is not None
    if gone and is_known and ending.left is not None and (gives_up or not survivors):
        survivors += not torchrun.child_has_ended
        state, more = _nothing_is_left(state, ending, survivors, now)
        return state, actions + more
    return state, actions


def _end_ranks(state: State, ending: Ending, clock: _Clock) -> tuple[Ending, Actions]:
    """Tell each rank's own process once, and kill its group when its time is over.

    A rank that has said what it raised is ending by itself, and only a stop is told to it.
    """
    actions: Actions = ()
    if ending.why is Why.SUCCESS or not state.alive:
        return ending, ()
    stops = ending.why is Why.STOP
    new = [rank.pid for rank in state.alive if rank.pid not in ending.told]
    to_tell = [pid for pid in new if stops or not state.ranks[pid].failure]
    if ending.why is Why.INTERRUPT:
        to_tell = []
    if to_tell:
        grace = state.job.grace if stops else state.job.failure_grace
        by = max(ending.by, clock.now + grace)  # also for ranks that started after the others
        ending = ending._replace(told=ending.told | set(to_tell), by=by)
        actions = (SignalRanks(tuple(to_tell), ending.number),)
    if not ending.asked and clock.has_come(_to_ask_at(state, ending)):
        ending = ending._replace(asked=True)
        actions += (RequestPlaces(),) if clock.now < ending.by else ()
    if not clock.has_come(ending.by) or not clock.has_come(ending.kill_again_at):
        return ending, actions
    if math.isinf(ending.killed_at):
        actions += tuple(Log(line) for line in _hanging(state, ending))
        ending = ending._replace(killed_at=clock.now)
    else:  # the kernel holds them: what others have left behind is not to wait for that
        actions += (SignalProcesses(ending.left, signal.SIGKILL),) if ending.left else ()
        actions += (FindLeftovers(),)
    ending = ending._replace(kill_again_at=clock.now + KILL_AGAIN_SECONDS)
    clock.has_come(ending.kill_again_at)
    return ending, (*actions, KillRanks(tuple(rank.pid for rank in state.alive)))


def _to_ask_at(state: State, ending: Ending) -> float:
    """Return when ranks are asked where they are: shortly before they are killed."""
    if ending.why is Why.INTERRUPT:
        return math.inf
    grace = state.job.grace if ending.why is Why.STOP else state.job.failure_grace
    return ending.by - min(PLACES_SECONDS, grace / 2)


def remaining(state: State, event: LeftoversFound, now: float) -> Step:
    """Note what ranks have left behind."""
    if not isinstance(state.phase, Ending):
        return state, ()
    return advance(state, state.phase._replace(left=tuple(event.pids)), now)


def _hanging(state: State, ending: Ending) -> list[str]:
    """Return why ranks are killed."""
    if ending.why is Why.INTERRUPT:
        return []
    where = [rank for rank in state.alive if rank.place][:NAMED]
    lines = [f"rank {rank.rank} does not end; it is in {rank.place}." for rank in where]
    failed = [rank for rank in state.alive if rank.failure and rank.counts]
    for rank in failed:
        grace = f"{state.job.failure_grace:g}"
        lines.append(
            f"rank {rank.rank} has failed but still runs {grace} s later: killing it with "
            "SIGKILL (--launcher-failure-grace sets its time to end)."
        )
    others = len(state.alive) - len(failed)
    if others:
        lines.append(f"{others} ranks still run at the end of their grace: killing them.")
    return lines


def ended_while_ending(state: State, ending: Ending, rank: Rank) -> Actions:
    """Say it if a rank failed while it saved; what died unsaved may have started what can save."""
    number = ending.number
    if ending.why is not Why.STOP:
        return ()
    if rank.pid not in ending.told:
        return failed_before(state, (rank,), number)
    # A restart's SIGTERM may have come to it just before the stop.
    if rank.exit_code in (-number, -signal.SIGTERM):
        # Python's own handler of SIGINT saves nothing.
        if rank.disposition is not Disposition.HANDLES or number == signal.SIGINT:
            return (SignalGroup(rank.pid, number),)
    elif rank.failure and rank.exit_code not in (0, 128 + number):
        return (Log(f"while stopping: {headline(rank.failure, state.job.current_host)}."),)
    return ()


def failed_before(state: State, ranks: Iterable[Rank], number: int) -> Actions:
    """Say which ranks failed by themselves before a stop came here: nobody else says it.

    Not those that whoever stops the job has told as well, nor what follows from other ranks' ends.
    """
    stops = (0, -number, 128 + number, -signal.SIGTERM, 128 + signal.SIGTERM)
    failed = [
        rank.failure
        for rank in ranks
        if rank.failure and not rank.failure.is_secondary and rank.exit_code not in (None, *stops)
    ]
    if not failed:
        return ()
    first, *others = sorted(failed, key=lambda failure: failure.time)
    more = f", and {plural(len(others), 'rank')} more" if others else ""
    return (Log(f"before the stop came: {headline(first, state.job.current_host)}{more}."),)


def ranks_signalled(state: State, event: Signalled) -> Step:
    """Pass Ctrl-C on to what a rank has started, if the rank itself ignores it.

    os.system ignores it while it waits for another program, which should get it.
    """
    noted = {
        pid: rank._replace(disposition=event.disposition.get(pid, rank.disposition))
        for pid, rank in state.ranks.items()
    }
    state = state._replace(ranks=noted)
    if not isinstance(state.phase, Ending) or state.phase.why is not Why.STOP:
        return state, ()
    number = state.phase.number
    if number not in (signal.SIGINT, signal.SIGQUIT):
        return state, ()
    ignoring = [pid for pid, what in event.disposition.items() if what is Disposition.IGNORES]
    return state, tuple(SignalGroup(pid, number) for pid in ignoring)


def _tell_no_ranks(state: State, ending: Ending, clock: _Clock) -> tuple[Ending, Actions]:
    """Tell the coordinator that no rank runs here, once torchrun leaves its store alone, too.

    Until it asks, torchrun signs in there, and logs a stack trace if the store has gone.
    """
    torchrun = state.torchrun
    if ending.why is Why.SUCCESS or ending.no_ranks_told:
        return ending, ()
    uses_store = torchrun.leave and not (torchrun.asks or torchrun.in_barrier)
    has_ended = torchrun.has_ended or torchrun.child_has_ended or torchrun.killed_at < math.inf
    if (
        uses_store
        and not has_ended
        and not clock.has_come(ending.no_ranks_since + CLOSE_REQUEST_SECONDS)
    ):
        return ending, ()
    return ending._replace(no_ranks_told=True), (Tell(NoRanksHere(state.attempt)),)


def _end_left(state: State, ending: Ending, clock: _Clock) -> tuple[Ending, Actions]:
    """End what ranks left behind with SIGTERM, and with SIGKILL when its time is over.

    After a stop, what ranks have left (an upload, say) has the rest of the grace, and SIGTERM comes
    only near its end.
    """
    left = ending.left
    if not left:
        return ending, ()
    if clock.has_come(ending.by):
        if not clock.has_come(ending.kill_again_at):
            return ending, ()
        killed_at = min(ending.killed_at, clock.now)
        ending = ending._replace(killed_at=killed_at, kill_again_at=clock.now + KILL_AGAIN_SECONDS)
        clock.has_come(ending.kill_again_at)
        return ending, (SignalProcesses(left, signal.SIGKILL), FindLeftovers())
    tell_at = -math.inf
    if ending.why is Why.STOP:
        tell_at = ending.by - min(MARGIN_SECONDS, state.job.grace / 4)
    if not clock.has_come(tell_at):
        if ending.left_said:
            return ending, ()
        seconds = ending.by - clock.now
        line = f"{len(left)} processes that ranks left behind have {seconds:.0f} s to end."
        return ending._replace(left_said=True), (Log(line),)
    new = tuple(pid for pid in left if pid not in ending.told)
    if not new:
        return ending, ()
    whose = "the last attempt" if ending.why is Why.RESTART else "the job"
    lines = tuple(Log(f"ending process {pid}, which {whose} left behind.") for pid in new)
    ending = ending._replace(told=ending.told | set(new))
    return ending, (*lines, SignalProcesses(new, signal.SIGTERM))


def _end_torchrun(
    state: State, ending: Ending, clock: _Clock, *, gives_up: bool
) -> tuple[Torchrun, Actions]:
    """Answer torchrun when no rank runs, and kill it if it does not go on by itself."""
    torchrun = state.torchrun
    if torchrun.has_ended or torchrun.killed_at < math.inf or (state.runner and not torchrun.runs):
        return torchrun, ()
    killed = torchrun._replace(killed_at=clock.now)
    if ending.why is Why.SUCCESS:
        return _end_in_barrier(state, ending, clock)
    kill = "no rank runs any more, but torchrun does not end: killing it with SIGKILL."
    if ending.why is Why.INTERRUPT or (gives_up and state.alive) or not torchrun.leave:
        return killed, (KillTorchrun(),)
    if torchrun.may_have_ranks:
        if clock.has_come(ending.since + MARGIN_SECONDS):
            kill = "torchrun does not say which ranks it has started: killing it with SIGKILL."
            return killed, (Log(kill), KillTorchrun())
        return torchrun, ()
    if math.isinf(ending.no_ranks_since):
        return torchrun, ()
    if torchrun.keeps_store and not state.no_ranks_left:
        # Ranks of other hosts may have been stopped, and have the grace of that.
        longest = max(state.job.grace, state.job.failure_grace)
        if not clock.has_come(max(ending.by, ending.since + longest) + MARGIN_SECONDS):
            return torchrun, ()
    if torchrun.asks:
        torchrun = _answered(state, clock.now + CLOSE_REQUEST_SECONDS)
        clock.has_come(torchrun.has_until)
        return torchrun, (Answer(leave=True),)
    by = -math.inf if torchrun.in_barrier else ending.no_ranks_since + CLOSE_REQUEST_SECONDS
    if not clock.has_come(max(by, torchrun.has_until)):
        return torchrun, ()
    return killed, ((KillTorchrun(),) if torchrun.in_barrier else (Log(kill), KillTorchrun()))


def _answered(state: State, until: float) -> Torchrun:
    """Return torchrun after an answer, with the failure grace if it copies what ranks wrote."""
    until += state.job.failure_grace if state.torchrun.tees else 0
    return state.torchrun._replace(asks=False, has_until=until)


def _end_in_barrier(state: State, ending: Ending, clock: _Clock) -> tuple[Torchrun, Actions]:
    """Let torchrun go to its barrier after a success, where it waits for the other hosts'."""
    torchrun = state.torchrun
    # Where others are not heard of, they may train on: torchrun's own time-out counts.
    if not state.others_are_unheard and clock.has_come(
        max(ending.decided_at + EXIT_BARRIER_SECONDS, torchrun.has_until)
    ):
        line = Log("all hosts have succeeded, but torchrun does not end: killing it with SIGKILL.")
        return torchrun._replace(killed_at=clock.now), (line, KillTorchrun())
    if torchrun.asks:
        return _answered(state, clock.now)._replace(in_barrier=True), (Answer(),)
    return torchrun, ()


def _end_program(state: State, ending: Ending, clock: _Clock) -> tuple[Ending, Actions]:
    """Have the program that runs torchrun end: it may work before torchrun runs, and after it.

    If this end has ended torchrun, the program has the failure grace to end by itself.
    """
    torchrun = state.torchrun
    is_stuck = clock.has_come(torchrun.killed_at + MARGIN_SECONDS)
    works = not torchrun.runs or torchrun.has_ended or is_stuck
    if not state.runner or torchrun.child_has_ended or ending.why is Why.SUCCESS or not works:
        return ending, ()
    by = ending.by
    if torchrun.has_ended and torchrun.ended_at >= ending.since:
        by = max(by, torchrun.ended_at + state.job.failure_grace)
    if ending.program_killed_at < math.inf:
        return ending, ()
    if ending.why is Why.INTERRUPT or clock.has_come(by):
        return ending._replace(program_killed_at=clock.now), (SignalChild(signal.SIGKILL),)
    if ending.program_told or (torchrun.has_ended and torchrun.ended_at >= ending.since):
        return ending, ()
    return ending._replace(program_told=True), (SignalChild(ending.number),)


def _ask_gpus(state: State, ending: Ending, clock: _Clock) -> tuple[Ending, Actions]:
    """Before a restart ask once which GPUs are broken; a driver that hangs is not waited for."""
    if ending.why is not Why.RESTART:
        waits = not math.isinf(ending.answer_by) and ending.broken is None
        return ending._replace(answer_by=math.inf), (CancelGpuCheck(),) if waits else ()
    if ending.broken is not None:
        return ending, ()
    if math.isinf(ending.answer_by):
        ending = ending._replace(answer_by=clock.now + GPU_CHECK_SECONDS)
        clock.has_come(ending.answer_by)
        return ending, (CheckGpus(),)
    if clock.has_come(ending.answer_by):
        return ending._replace(broken=""), (CancelGpuCheck(),)
    return ending, ()


def gpus_said(state: State, event: GpusChecked, now: float) -> Step:
    """Note which GPUs are broken."""
    if not isinstance(state.phase, Ending):
        return state, ()
    return advance(state, state.phase._replace(broken=event.broken), now)


def _broken(state: State, ending: Ending) -> str:
    """Return which hardware is broken: what a rank has said meanwhile counts, too."""
    host = state.job.current_host
    failures = [rank.failure for rank in state.ranks.values() if rank.failure]
    said = (broken_hardware(failure, host) for failure in failures)
    return ending.broken or next(filter(None, said), "")


def _nothing_is_left(state: State, ending: Ending, survivors: int, now: float) -> Step:
    """Go on: nothing runs that could be ended."""
    lines: Actions = ()
    if survivors:
        lines = (
            Log(
                f"{survivors} processes of the job have survived SIGKILL for {MARGIN_SECONDS:g} s "
                "(stuck in the kernel); leaving them."
            ),
        )
    state = state._replace(times=state.times._replace(ended=now))
    if ending.why is Why.INTERRUPT:
        result = state.result or stopped(signal.SIGINT)
        return state._replace(phase=Done(), result=result), lines
    if ending.why is Why.RESTART and state.result is None:
        cleared = Tell(Cleared(state.attempt, survivors, _broken(state, ending)))
        return state._replace(phase=Restarting()), (*lines, cleared)
    return state._replace(phase=Done() if state.result else Waiting()), lines
