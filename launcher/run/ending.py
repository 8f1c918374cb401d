"""How processes are ended: ranks, leftover processes, torchrun, and what runs it. Pure.

There is one way for all reasons, and it looks at the state alone, not at what has changed. Each of
PARTS is one thing that is to be done, and says when it is due by what is known now: at once, at a
time, or not at all. `advance` does what is due, in their order, until nothing is; `deadline` is
when the next is, if nothing happens before. So every wait here has a bound, and what bounds it
stands where it is waited.
"""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Iterable, Iterator
from typing import Callable, NamedTuple

from launcher.errors import Disposition
from launcher.peers.messages import Cleared, NoRanksHere
from launcher.result.causes import broken_hardware, headline, stopped
from launcher.run.events import (
    Actions,
    CancelGpuCheck,
    CheckGpus,
    FindLeftovers,
    GpusChecked,
    KillRanks,
    KillTorchrun,
    LeftoversFound,
    Reply,
    Report,
    RequestPlaces,
    SignalChild,
    SignalGroup,
    Signalled,
    SignalProcesses,
    SignalRanks,
)
from launcher.run.ranks import Rank
from launcher.run.state import (
    CLOSE_REQUEST_SECONDS,
    GPU_CHECK_SECONDS,
    KILL_AGAIN_SECONDS,
    MARGIN_SECONDS,
    PLACES_SECONDS,
    Done,
    Ending,
    Failing,
    GpuCheck,
    Kill,
    Restarting,
    State,
    Step,
    Waiting,
    Why,
)
from launcher.text.words import NAMED, Log, plural

Act = Callable[[float], Step]  # of the time
NOW, NEVER = -math.inf, math.inf


class Part(NamedTuple):
    """One thing that is to be done; `at` is NEVER if nothing but an event can make it due."""

    at: float
    act: Act


def advance(state: State, ending: Ending, now: float) -> Step:
    """Do all that is due; go on when nothing remains that could be ended."""
    actions: Actions = ()
    state = state._replace(phase=ending)
    while isinstance(state.phase, Ending):
        due = next((part for part in _parts(state, state.phase) if now >= part.at), None)
        if due is None:
            break
        state, more = due.act(now)
        actions += more
    return state, actions


def begun(state: State, why: Why, now: float, number: int = signal.SIGTERM) -> Ending:
    """Return how processes are ended from now on; ranks of a failed host may have a signal."""
    signalled = state.phase.signalled if isinstance(state.phase, Failing) else frozenset[int]()
    return Ending(why, now, now + state.grace(why), number, signalled)


def deadline(state: State, ending: Ending) -> float:
    """Return when something is due next if nothing happens before."""
    return min((part.at for part in _parts(state, ending)), default=NEVER)


def _parts(state: State, ending: Ending) -> Iterator[Part]:
    return (part for of in PARTS if (part := of(state, ending)))


def instead(state: State, ending: Ending, why: Why, now: float) -> Ending:
    """Return how processes are ended now, after they were for another reason.

    What got a signal gets no other, and keeps the later deadline for a stop alone. A host that had
    succeeded has not reported yet that no rank runs here.
    """
    later = now + state.grace(why)
    if ending.why is Why.SUCCESS:
        return Ending(why, now, later, signalled=ending.signalled, leftovers=ending.leftovers)
    if why is not Why.STOP:
        return ending._replace(why=why)
    ending = ending._replace(why=why, places_requested=False, kill=Kill())
    return ending._replace(deadline=max(ending.deadline, later))


# Ranks: each one's own process gets the signal once, and its group is killed at the deadline.


def _signal_ranks(state: State, ending: Ending) -> Part | None:
    """Those that have reported what they raised end by themselves: they get a stop alone."""
    pids = tuple(
        rank.pid
        for rank in state.alive
        if rank.pid not in ending.signalled
        and (ending.why is Why.STOP or not rank.failure)
        and not rank.is_refused
    )
    if not pids or ending.why in (Why.SUCCESS, Why.INTERRUPT):
        return None

    def act(now: float) -> Step:
        after = ending._replace(signalled=ending.signalled | set(pids))
        return state._replace(phase=after), (SignalRanks(pids, ending.number),)

    return Part(NOW, act)


def _request_places(state: State, ending: Ending) -> Part | None:
    """Shortly before ranks are killed: where they are, for the log."""
    if ending.why in (Why.SUCCESS, Why.INTERRUPT) or ending.places_requested or not state.alive:
        return None

    def act(now: float) -> Step:
        after = state._replace(phase=ending._replace(places_requested=True))
        return after, (RequestPlaces(),) if now < ending.deadline else ()

    return Part(ending.deadline - min(PLACES_SECONDS, state.grace(ending.why) / 2), act)


def _kill_ranks(state: State, ending: Ending) -> Part | None:
    if ending.why is Why.SUCCESS or not state.alive:
        return None

    def act(now: float) -> Step:
        actions: Actions = ()
        if math.isinf(ending.kill.began):
            actions = tuple(Log(line) for line in _why_killed(state, ending))
        else:  # the kernel holds them: what others have left behind is not to wait for that
            if ending.leftovers.pids:
                actions = (SignalProcesses(ending.leftovers.pids, signal.SIGKILL),)
            actions += (FindLeftovers(),)
        pids = tuple(rank.pid for rank in state.alive)
        return state._replace(phase=_killing(ending, now)), (*actions, KillRanks(pids))

    return Part(max(ending.deadline, ending.kill.again_at), act)


def _killing(ending: Ending, now: float) -> Ending:
    kill = ending.kill._replace(
        began=min(ending.kill.began, now), again_at=now + KILL_AGAIN_SECONDS
    )
    return ending._replace(kill=kill)


def _why_killed(state: State, ending: Ending) -> list[str]:
    """Return why ranks are killed."""
    if ending.why is Why.INTERRUPT:
        return []
    where = [rank for rank in state.alive if rank.place][:NAMED]
    lines = [f"rank {rank.rank} has not exited; it is in {rank.place}." for rank in where]
    failed = [rank for rank in state.alive if rank.failure and rank.counts]
    for rank in failed:
        grace = f"{state.grace(Why.FAILURE):g}"
        lines.append(
            f"rank {rank.rank} has failed but is still running {grace} s later: killing it "
            "with SIGKILL (--launcher-failure-grace sets this delay)."
        )
    others = len(state.alive) - len(failed)
    if others:
        lines.append(
            f"{plural(others, 'rank')} still running at the end of the grace period: "
            "killing with SIGKILL."
        )
    return lines


def died_of_stop(number: int) -> tuple[int, ...]:
    """Return the exit codes of a rank that has died of a stop, unsaved.

    Or of a restart's SIGTERM, which may have come to it just before.
    """
    return (-number, -signal.SIGTERM)


def ended_by_itself_at_stop(number: int) -> tuple[int, ...]:
    """Return those of a rank that has handled a stop, or that SIGTERM.

    It has saved, as far as anybody can know.
    """
    return (0, 128 + number, 128 + signal.SIGTERM)


def ended_while_ending(state: State, ending: Ending, rank: Rank) -> Actions:
    """Log a failure during a stop, which changes no result.

    What died unsaved may have started what can save: the rest of its group is sent the stop.
    """
    number = ending.number
    if ending.why is not Why.STOP:
        return ()
    if rank.pid not in ending.signalled:
        return failed_before(state, (rank,), number)
    if rank.exit_code in died_of_stop(number):
        # Python's own handler of SIGINT saves nothing.
        if rank.disposition is not Disposition.HANDLES or number == signal.SIGINT:
            return (SignalGroup(rank.pid, number),)
    elif rank.failure and rank.exit_code not in ended_by_itself_at_stop(number):
        return (Log(f"during the stop: {headline(rank.failure, state.job.current_host)}."),)
    return ()


def failed_before(state: State, ranks: Iterable[Rank], number: int) -> Actions:
    """Say which ranks failed by themselves before a stop came here: nobody else says it.

    Not those that whoever stops the job has signalled as well, nor what follows from others' ends.
    """
    stops = (*died_of_stop(number), *ended_by_itself_at_stop(number))
    failed = [
        rank.failure
        for rank in ranks
        if rank.failure and not rank.failure.is_secondary and rank.exit_code not in (None, *stops)
    ]
    if not failed:
        return ()
    first, *others = sorted(failed, key=lambda failure: failure.time)
    more = f", and {plural(len(others), 'rank')} more" if others else ""
    return (Log(f"before the stop: {headline(first, state.job.current_host)}{more}."),)


def ranks_signalled(state: State, event: Signalled, now: float) -> Step:
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


# No rank runs any more, and none can start.


def _no_ranks_at(state: State) -> float:
    """Return from when on that is so."""
    return NEVER if state.alive else NOW


def _note_no_ranks(state: State, ending: Ending) -> Part | None:
    if ending.no_ranks_since < math.inf:
        return None

    def act(now: float) -> Step:
        leftovers = ending.leftovers._replace(pids=None)
        after = ending._replace(no_ranks_since=now, leftovers=leftovers)
        return state._replace(phase=after), (FindLeftovers(),)

    return Part(_no_ranks_at(state), act)


def _report_no_ranks(state: State, ending: Ending) -> Part | None:
    """Once torchrun leaves its store alone, too.

    Until it requests the close, it signs in there, and logs a stack trace if the store has gone.
    """
    if ending.why is Why.SUCCESS or ending.no_ranks_reported:
        return None
    torchrun, at = state.torchrun, _no_ranks_at(state)
    uses_store = torchrun.has_permission and not (torchrun.requests_close or torchrun.in_barrier)
    if uses_store and not (torchrun.has_ended or torchrun.child_has_ended or torchrun.was_killed):
        at = max(at, _requests_close_by(state, ending))

    def act(now: float) -> Step:
        after = ending._replace(no_ranks_reported=True)
        return state._replace(phase=after), (Report(NoRanksHere(state.attempt)),)

    return Part(at, act)


# Leftover processes: SIGTERM, and SIGKILL at the deadline. After a stop they (an upload, say) have
# the rest of the grace, and SIGTERM comes only near its end.


def _leftovers_end_at(state: State, ending: Ending) -> float:
    if ending.why is not Why.STOP:
        return NOW
    return ending.deadline - min(MARGIN_SECONDS, state.grace(ending.why) / 4)


def _say_leftovers(state: State, ending: Ending) -> Part | None:
    """They have time, of which people read."""
    pids, end_at = ending.leftovers.pids, _leftovers_end_at(state, ending)
    if not pids or ending.leftovers.is_said or end_at == NOW:
        return None

    def act(now: float) -> Step:
        after = ending._replace(leftovers=ending.leftovers._replace(is_said=True))
        seconds = ending.deadline - now
        processes = plural(len(pids), "process", "es")
        line = f"{processes} left running by ranks; "
        line += f"any that remain will be killed in {seconds:.0f} s."
        return state._replace(phase=after), (Log(line),) if now < end_at else ()

    return Part(_no_ranks_at(state), act)


def _signal_leftovers(state: State, ending: Ending) -> Part | None:
    pids = tuple(pid for pid in ending.leftovers.pids or () if pid not in ending.signalled)
    if not pids:
        return None

    def act(now: float) -> Step:
        after = state._replace(phase=ending._replace(signalled=ending.signalled | set(pids)))
        if now >= ending.deadline:
            return after, ()  # they are killed
        whose = "the previous attempt" if ending.why is Why.RESTART else "the job"
        lines = tuple(Log(f"stopping process {pid}, which {whose} left running.") for pid in pids)
        return after, (*lines, SignalProcesses(pids, signal.SIGTERM))

    return Part(max(_no_ranks_at(state), _leftovers_end_at(state, ending)), act)


def _kill_leftovers(state: State, ending: Ending) -> Part | None:
    pids = ending.leftovers.pids
    if not pids:
        return None

    def act(now: float) -> Step:
        actions = (SignalProcesses(pids, signal.SIGKILL), FindLeftovers())
        after = _killing(ending, now)
        after = after._replace(kill=after.kill._replace(leftovers=frozenset(pids)))
        return state._replace(phase=after), actions

    again_at = ending.kill.again_at if ending.kill.leftovers.issuperset(pids) else NOW
    return Part(max(_no_ranks_at(state), ending.deadline, again_at), act)


def _note_killed(state: State, ending: Ending) -> Part | None:
    """All that was killed has ended: what is found later has its own time to."""
    if state.alive or ending.leftovers.pids != () or math.isinf(ending.kill.began):
        return None
    after = ending._replace(kill=ending.kill._replace(began=math.inf))
    return Part(NOW, lambda now: (state._replace(phase=after), ()))


def leftovers_found(state: State, event: LeftoversFound, now: float) -> Step:
    """Note the leftover processes."""
    if not isinstance(state.phase, Ending):
        return state, ()
    leftovers = state.phase.leftovers._replace(pids=tuple(event.pids))
    return advance(state, state.phase._replace(leftovers=leftovers), now)


# Torchrun: it gets its reply when no rank runs, and is killed if it does not go on by itself.


def _end_torchrun(state: State, ending: Ending) -> Part | None:
    torchrun, kill = state.torchrun, functools.partial(_kill_torchrun, state)
    if torchrun.has_ended or torchrun.was_killed or (state.program.name and not torchrun.runs):
        return None
    if ending.why is Why.SUCCESS:
        return _pass_barrier(state)
    if ending.why is Why.INTERRUPT or not torchrun.has_permission:
        return Part(NOW, kill)
    if state.alive:
        return Part(ending.kill.began + MARGIN_SECONDS, kill)
    at = ending.no_ranks_since
    if torchrun.keeps_store and not state.no_ranks_anywhere:
        # Ranks of other hosts may have been stopped, and have the grace of that.
        longest = max(state.grace(Why.STOP), state.grace(Why.FAILURE))
        at = max(at, max(ending.deadline, ending.since + longest) + MARGIN_SECONDS)
    if torchrun.requests_close:
        return Part(at, functools.partial(_reply, state, depart=True))
    if torchrun.in_barrier:
        return Part(max(at, torchrun.exit_deadline), kill)
    line = "no rank is running any more, but torchrun has not ended: killing it with SIGKILL."
    request_by = _requests_close_by(state, ending)
    if state.is_starting:  # it waits for processes that are not let go
        line = (
            "torchrun is still starting ranks, which must not run any more: killing it "
            "with SIGKILL."
        )
        request_by = ending.since + MARGIN_SECONDS
    at = max(at, request_by, torchrun.exit_deadline)
    return Part(at, functools.partial(kill, line=line))


def _requests_close_by(state: State, ending: Ending) -> float:
    """Return by when torchrun sees that no rank runs: the last may have been one that came late."""
    ends = [state.times.attempt + rank.ended_at for rank in state.ranks.values() if not rank.runs]
    return max([ending.no_ranks_since, *ends]) + CLOSE_REQUEST_SECONDS


def _pass_barrier(state: State) -> Part | None:
    """After a success torchrun goes to its barrier, where it waits for the other hosts'."""
    torchrun = state.torchrun
    if torchrun.requests_close:
        return Part(NOW, functools.partial(_reply, state, depart=False))
    if state.others_are_unheard:  # they may train on: torchrun's own time-out counts
        return None
    line = "all hosts have succeeded, but torchrun has not ended: killing it with SIGKILL."
    at = max(torchrun.barrier_deadline, torchrun.exit_deadline)
    return Part(at, functools.partial(_kill_torchrun, state, line=line))


def _reply(state: State, now: float, *, depart: bool) -> Step:
    """Have torchrun end at once, or go to its barrier; to copy output it has the failure grace."""
    until = now + (CLOSE_REQUEST_SECONDS if depart else 0)
    until += state.grace(Why.FAILURE) if state.torchrun.tees else 0
    torchrun = state.torchrun._replace(requests_close=False, exit_deadline=until)
    torchrun = torchrun._replace(in_barrier=torchrun.in_barrier or not depart)
    return state._replace(torchrun=torchrun), (Reply(depart=depart),)


def _kill_torchrun(state: State, now: float, line: str = "") -> Step:
    state = state._replace(torchrun=state.torchrun._replace(killed_at=now))
    return state, (*((Log(line),) if line else ()), KillTorchrun())


# The program that runs torchrun, if one does: it may work before torchrun runs, and after it.


def _end_program(state: State, ending: Ending) -> Part | None:
    """If this end has ended torchrun, the program has the failure grace to end by itself."""
    torchrun, program = state.torchrun, state.program
    is_over = torchrun.child_has_ended or program.killed_at < math.inf
    if not program.name or is_over or ending.why is Why.SUCCESS:
        return None
    works_at = NOW if torchrun.has_ended or not torchrun.runs else torchrun.stuck_at
    ends_itself = torchrun.has_ended and torchrun.ended_at >= ending.since
    at = max(ending.deadline, torchrun.ended_at + state.grace(Why.FAILURE) if ends_itself else NOW)
    if ending.why is Why.INTERRUPT:
        at = NOW

    def act(now: float) -> Step:
        if now >= at:
            killed = program._replace(killed_at=now)
            return state._replace(program=killed), (SignalChild(signal.SIGKILL),)
        after = state._replace(program=program._replace(signalled=True))
        return after, (SignalChild(ending.number),)

    is_told = program.signalled or ends_itself
    return Part(max(works_at, at) if is_told else works_at, act)


# The driver of the GPUs, before a restart: which of them are broken.


def _check_gpus(state: State, ending: Ending) -> Part | None:
    """Once; a driver that blocks is not waited for."""
    gpus = ending.gpus
    if gpus.is_open:
        restarts = ending.why is Why.RESTART
        after = ending._replace(gpus=GpuCheck(broken="" if restarts else None))
        at = gpus.deadline if restarts else NOW
        return Part(at, lambda now: (state._replace(phase=after), (CancelGpuCheck(),)))
    if ending.why is not Why.RESTART or gpus.broken is not None:
        return None

    def act(now: float) -> Step:
        after = ending._replace(gpus=GpuCheck(now + GPU_CHECK_SECONDS))
        return state._replace(phase=after), (CheckGpus(),)

    return Part(NOW, act)


def gpus_checked(state: State, event: GpusChecked, now: float) -> Step:
    """Note which GPUs are broken."""
    if not isinstance(state.phase, Ending):
        return state, ()
    gpus = state.phase.gpus._replace(broken=event.broken)
    return advance(state, state.phase._replace(gpus=gpus), now)


def _broken(state: State, ending: Ending) -> str:
    """Return which hardware is broken: what a rank has reported meanwhile counts, too."""
    host = state.job.current_host
    failures = [rank.failure for rank in state.ranks.values() if rank.failure]
    reported = (broken_hardware(failure, host) for failure in failures)
    return ending.gpus.broken or next(filter(None, reported), "")


# Nothing remains that could be ended.


def _conclude(state: State, ending: Ending) -> Part | None:
    """What survives SIGKILL for 5 s is given up."""
    if ending.leftovers.pids is None or ending.gpus.is_open:
        return None
    killed_at = state.program.killed_at if state.program.name else state.torchrun.killed_at
    at = NOW if state.torchrun.child_has_ended else killed_at + MARGIN_SECONDS
    survivors = len({rank.pid for rank in state.alive} | set(ending.leftovers.pids))
    if survivors:
        at = max(at, ending.kill.began + MARGIN_SECONDS)

    def act(now: float) -> Step:
        child = not state.torchrun.child_has_ended
        return _nothing_remains(state, ending, survivors + child, now)

    return Part(at, act)


def _nothing_remains(state: State, ending: Ending, survivors: int, now: float) -> Step:
    lines: Actions = ()
    if survivors:
        lines = (
            Log(
                f"{plural(survivors, 'process', 'es')} of the job survived SIGKILL for "
                f"{MARGIN_SECONDS:g} s (stuck in the kernel); giving up on them."
            ),
        )
    state = state._replace(times=state.times._replace(ended=now))
    if ending.why is Why.INTERRUPT:
        result = state.result or stopped(signal.SIGINT)
        return state._replace(phase=Done(), result=result), lines
    if ending.why is Why.RESTART and state.result is None:
        cleared = Report(Cleared(state.attempt, survivors, _broken(state, ending)))
        return state._replace(phase=Restarting()), (*lines, cleared)
    return state._replace(phase=Done() if state.result else Waiting()), lines


# In the order in which they are done where several are due.
PARTS: tuple[Callable[[State, Ending], Part | None], ...] = (
    _signal_ranks,
    _request_places,
    _kill_ranks,
    _note_no_ranks,
    _report_no_ranks,
    _say_leftovers,
    _signal_leftovers,
    _kill_leftovers,
    _note_killed,
    _end_torchrun,
    _end_program,
    _check_gpus,
    _conclude,
)
