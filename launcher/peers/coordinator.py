"""The host that decides for all: who has joined, what must agree, which failure counts, restarts.

    state, actions = step(state, event, now)

What it tells all hosts also reaches this host's own run, as an action Tell. A host that is alone
coordinates itself. Times are on the clock time.monotonic(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Union

from launcher.peers import ends
from launcher.peers.events import (
    Admit,
    AllKnow,
    Arrived,
    CannotListen,
    HangUp,
    Listen,
    Lost,
    Received,
    Refuse,
    Send,
    StopListening,
    Tell,
    TooFewFiles,
)
from launcher.peers.messages import (
    AllStacks,
    AtRendezvous,
    Cleared,
    CollectStacks,
    End,
    Failed,
    FromCoordinator,
    Hello,
    HostStacks,
    Job,
    Missing,
    NoRanksAnywhere,
    NoRanksHere,
    ProgressReport,
    RanksSucceeded,
    Refusal,
    Refused,
    Restart,
    StacksRequest,
    Start,
    Stop,
    Succeeded,
    Welcome,
    checked,
    hello,
)
from launcher.result import causes
from launcher.result.causes import Cause, Failure, Result, first_of, of_host, of_lost_host, stopped
from launcher.text.words import (
    Log,
    flag,
    join_and_count,
    lasted,
    ordinal,
    short,
    shortened,
    some_of,
)
from launcher.watch import judge, stacks

LINE_EVERY = 30  # s between two lines on who is missing
_REFUSALS = 20  # that the log shows


# Phases.


class Joining(NamedTuple):
    """Hosts join; what must agree is compared."""

    start_by: float
    line_at: float


class Running(NamedTuple):
    """All hosts have joined and run an attempt.

    `meet_by`: until then their torchruns are to meet again, after a restart; those `waiting` do.
    """

    succeeded: frozenset[str] = frozenset()
    meet_by: float = math.inf
    waiting: frozenset[str] = frozenset()


class Failing(NamedTuple):
    """A host has failed or is lost; a better cause may come until `by`."""

    by: float
    failure: Failure  # the best cause that is known
    failures: int  # of ranks
    may_restart: bool
    succeeded: frozenset[str]
    failed_at: float  # when that cause was one
    broken: str = ""  # hardware, in words: then there is no restart


class Restarting(NamedTuple):
    """Hosts end this attempt's ranks, for the next one to start when all have.

    `by`: until then all hosts are to have done so, and their torchruns to have met again.
    """

    failure: Failure
    by: float
    cleared: frozenset[str] = frozenset()


class Ended(NamedTuple):
    """All hosts that have joined have been told how the job ends."""

    result: Result


Phase = Union[Joining, Running, Failing, Restarting, Ended]


class State(NamedTuple):
    """All that is known."""

    job: Job
    phase: Phase
    hello: Hello  # what this host would say
    attempt: int = 0  # 0: not all hosts have joined yet
    attempt_since: float = 0.0
    members: Mapping[str, str] = {}  # that have joined and are not lost, with their addresses
    arrived: frozenset[str] = frozenset()  # that have joined, or know how the job ends
    no_ranks: frozenset[str] = frozenset()  # hosts on which no rank of this attempt runs
    kinds: tuple[str, ...] = ()  # of failures, of the attempts before
    refused: int = 0  # connections
    ends: ends.Known = ends.NONE  # of ranks that have ended with 0
    watch: judge.State = judge.State()  # ranks without progress
    shows: stacks.Gathering = stacks.Gathering()  # where ranks are


Step = tuple[State, tuple[Any, ...]]


def begin(job: Job, now: float) -> Step:
    """Return the state at the launcher's start, and the actions to carry out."""
    state = State(job, Joining(now + job.start_timeout, now + LINE_EVERY), hello(job))
    if not job.members:
        return _start(state, 1, now)
    if not job.fingerprint:
        state = _expect_why(state, job.current_host, now)
    return state, (Listen(),)


def due(state: State) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    phase, by = state.phase, state.shows.deadline
    if isinstance(phase, Joining):
        return min(phase.start_by, phase.line_at, by)
    if isinstance(phase, Running):
        return min(judge.due(state.watch), phase.meet_by, by)
    return min(phase.by, by) if isinstance(phase, (Failing, Restarting)) else by


def step(state: State, event: Any, now: float) -> Step:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, Received):
        if isinstance(event.message, Failed):
            return host_failed(state, event.host, event.message, now)
        if isinstance(event.message, RanksSucceeded):
            return ranks_ended(state, event.host, event.message, now)
        if isinstance(event.message, Stop):
            return host_stopped(state, event.message)
        if isinstance(event.message, ProgressReport):
            return host_watched(state, event.host, event.message, now)
        if isinstance(event.message, StacksRequest):
            return _gather_stacks(state, event.host, now)
        if isinstance(event.message, HostStacks):
            return host_showed_stacks(state, event.host, event.message)
        if isinstance(event.message, Succeeded):
            return host_succeeded(state, event.host, event.message)
        if isinstance(event.message, AtRendezvous):
            return host_meets(state, event.host, event.message)
        if isinstance(event.message, NoRanksHere):
            return no_ranks(state, event.host, event.message.attempt)
        return host_cleared(state, event.host, event.message, now)
    if isinstance(event, Lost):
        return host_lost(state, event, now)
    if isinstance(event, Arrived):
        return host_arrived(state, event, now)
    if isinstance(event, CannotListen):
        return cannot_listen(state, event, now)
    if isinstance(event, TooFewFiles):
        return too_few_files(state, event)
    return time_is_up(state, now)


# Until all have joined.


def host_arrived(state: State, event: Arrived, now: float) -> Step:
    """Let a host of this job join; start once all have, end the job if they do not agree."""
    job, theirs = state.job, event.hello
    why = _why_not(state, theirs)
    if why:
        state = state._replace(refused=state.refused + 1)
        line = f"refused a connection from {event.address} to port {job.peer_port}: {why[1]}."
        refuse = Refuse(event.conn, Refused(why[0]))
        return state, (Log(line), refuse) if state.refused <= _REFUSALS else (refuse,)
    state = state._replace(arrived=state.arrived | {theirs.host})
    actions = (Admit(event.conn, theirs.host), Send((theirs.host,), Welcome()))
    if isinstance(state.phase, Ended):
        end = Send((theirs.host,), End(state.phase.result))
        return state, (*actions, end, HangUp(theirs.host), *_if_all_know(state))
    state = state._replace(members={**state.members, theirs.host: event.address})
    if not theirs.fingerprint:
        return _expect_why(state, theirs.host, now), actions
    difference = _difference(state, theirs)
    if difference:
        state, more = _end(state, of_host(difference).result)
    elif isinstance(state.phase, Joining) and len(state.members) == len(job.members):
        state, more = _start(state, 1, now)
        more = (*more, StopListening())
    else:
        more = ()
    return state, actions + more


def _why_not(state: State, theirs: Hello) -> tuple[Refusal, str] | None:
    """Return why a host is refused, and that in words for this host's own log; None: it is not."""
    job, host = state.job, theirs.host
    if theirs.job != job.name:
        return Refusal.ANOTHER_JOB, f"this is job {job.name}, not {short(theirs.job, 60)}"
    if host not in job.members:
        return Refusal.NO_HOST, f"{short(host, 60)} is not another host of this job"
    if host in state.members:
        return Refusal.HAS_JOINED, f"{host} has joined already, from {state.members[host]}"
    return (Refusal.ALL_HAVE_JOINED, "all hosts have joined") if state.attempt else None


def _difference(state: State, theirs: Hello) -> str:
    """Return what must agree between that host and this one, but does not; "" if it does."""
    for what, value in state.hello.fingerprint.items():
        other = theirs.fingerprint.get(what)
        if other != value:
            return (
                f"launcher: {state.job.current_host} and {theirs.host} differ in their {what}: "
                f"{short(value)} and {short(other)}; expected the same on every host."
            )
    return ""


def _expect_why(state: State, host: str, now: float) -> State:
    """Wait for what a host that cannot start is about to say: a better cause than this one."""
    why = of_host(f"{host} cannot start, and did not say why", cause=Cause.SECONDARY)
    return _note(state, why, now)


def cannot_listen(state: State, event: CannotListen, now: float) -> Step:
    """End the job on this host, for a cause of its own that it has told before, if there is one."""
    if isinstance(state.phase, Ended):
        return state, ()
    text = (
        f"{state.job.current_host} cannot listen on port {state.job.peer_port} for the launchers "
        f"of the other hosts ({event.why}); choose another with {flag('peer_port')}, the same one "
        "on every host."
    )
    state = _note(state, of_host(f"launcher: {text}"), now)
    assert isinstance(state.phase, Failing)
    state, actions = _end(state, state.phase.failure.result)
    return state, (*actions, Tell(AllKnow()))  # there is nobody whom it could tell


def too_few_files(state: State, event: TooFewFiles) -> Step:
    """End all hosts: this one cannot hold a connection to each."""
    if isinstance(state.phase, Ended):
        return state, ()
    text = (
        f"launcher: {state.job.current_host} can have {event.files} files open (ulimit -n), but "
        f"the connections of {len(state.job.hosts)} hosts need {event.needs}; raise that limit, or "
        f"do without these connections with {flag('peers')} false."
    )
    return _end(state, of_host(text).result)


def time_is_up(state: State, now: float) -> Step:
    """Say who is missing, end the job without them, or decide since no better cause has come."""
    phase, job = state.phase, state.job
    if now >= state.shows.deadline:
        return _show_stacks(state)
    if isinstance(phase, Failing) and now >= phase.by:
        return _decide(state, phase, now)
    if isinstance(phase, Restarting) and now >= phase.by:
        # The first host keeps the store for ranks of others: that is not what is waited for.
        done = phase.cleared | state.no_ranks
        is_clear = done.issuperset(job.hosts)
        return _takes_too_long(state, phase.cleared if is_clear else done, "clear")
    if isinstance(phase, Running):
        if now >= phase.meet_by:
            return _takes_too_long(state, phase.waiting, "complete the rendezvous of")
        return _say_who_waits(state, now)
    if not isinstance(phase, Joining) or now < due(state):
        return state, ()
    absent = [host for host in job.members if host not in state.members]
    named = tuple(some_of(absent))
    missing = Missing(named, len(absent) - len(named))
    if now >= phase.start_by:
        how = f"did not arrive within {job.start_timeout:g} s"
        return _end(state, of_lost_host(missing.words, how).result)
    state = state._replace(phase=phase._replace(line_at=now + LINE_EVERY))
    return state, (Log(f"waiting for {missing.words}."), Send(tuple(state.members), missing))


# While ranks run.


def host_failed(state: State, host: str, event: Failed, now: float) -> Step:
    """Wait for a better cause, 0.3 s to 3 s by the cause."""
    phase = state.phase
    # A launcher that fails while it waits for a start may not have heard of it.
    crosses = event.attempt == state.attempt - 1 and not event.failure.of_rank
    if not (event.attempt == state.attempt or crosses) or isinstance(phase, Ended):
        return state, ()  # of an attempt that is over
    if isinstance(phase, Restarting):
        # What ranks do meanwhile belongs to the same restart; without torchrun there is none.
        if event.failure.of_rank:
            return state, ()
        # Of a launcher; or of this one, which was stopped so long that others have ended for it.
        is_cause = event.failure.cause in (Cause.OWN, Cause.HOST_LOST)
        return _end(state, (checked(event.failure, host) if is_cause else phase.failure).result)
    return _note(state, checked(event.failure, host), now, event.age), ()


def ranks_ended(state: State, host: str, event: RanksSucceeded, now: float) -> Step:
    """Note which ranks have ended with 0: that may break the collective of another one."""
    if event.attempt != state.attempt or not isinstance(state.phase, (Running, Failing)):
        return state, ()
    return state._replace(ends=ends.heard(state.ends, host, event, now)), ()


def host_lost(state: State, event: Lost, now: float) -> Step:
    """Wait 0.5 s for a better cause than a lost host; without it there is no restart."""
    members = {host: at for host, at in state.members.items() if host != event.host}
    state = state._replace(members=members)
    failure = of_lost_host(event.host, f"was lost: {event.why}")
    if isinstance(state.phase, Ended):
        return _if_no_ranks(state)
    if isinstance(state.phase, Restarting):
        state, actions = _end(state, failure.result)
        state, more = _if_no_ranks(state)
        return state, actions + more
    return _note(state, failure, now), ()


def _note(state: State, failure: Failure, now: float, age: float = 0.0) -> State:
    """Note a failure, `age` seconds old, and by when a better cause has to come."""
    phase, by = state.phase, now + failure.cause.patience
    if isinstance(phase, Failing):
        is_better = failure.cause < phase.failure.cause
        phase = phase._replace(
            by=min(phase.by, by),
            failure=failure if is_better else phase.failure,
            failures=phase.failures + failure.of_rank,
            may_restart=phase.may_restart and failure.of_rank,
            failed_at=now - age if is_better else phase.failed_at,
            broken=phase.broken or failure.broken,
        )
    else:
        succeeded = phase.succeeded if isinstance(phase, Running) else frozenset()
        count, may_restart = int(failure.of_rank), failure.of_rank
        phase = Failing(by, failure, count, may_restart, succeeded, now - age, failure.broken)
    return state._replace(phase=phase)


def _decide(state: State, failing: Failing, now: float) -> Step:
    """Restart if every failure is one of ranks, and restarts are left; else end the job."""
    count = failing.failures if failing.failure.of_rank else 1
    failure = first_of(failing.failure, count)
    seen = judge.reason_of_wait(state.watch, failure.rank, now)
    if failure.cause >= Cause.ABORTED and seen:
        failure = failure._replace(text=f"{shortened(seen, 500)}\n{failure.text}"[: causes.LIMIT])
    elif failure.cause is Cause.SECONDARY and (left := ends.named(state.ends, failing.failed_at)):
        failure = causes.explained(failure, left)
    if not _restarts(state, failing):
        return _end(state, failure.result)
    if failing.broken:
        return _end(state, causes.not_restarted(failure, failing.broken).result)
    attempt, most, took = state.attempt, state.job.max_restarts + 1, now - state.attempt_since
    why = f"attempt {attempt} of {most} failed after {lasted(took)}: {failure.headline.rstrip('.')}"
    own = failing.failure.kind
    before = state.kinds.count(own)
    if before:
        why += f", for the {ordinal(before + 1)} time, {lasted(took)} after its start"
    by = now + state.job.start_timeout if state.job.members else math.inf
    state = state._replace(phase=Restarting(failure, by), kinds=(*state.kinds, own))
    return _tell_all(state, Restart(attempt, f"{why}; restarting all ranks."))


def _restarts(state: State, failing: Failing) -> bool:
    job = state.job
    is_left = 1 <= state.attempt <= job.max_restarts
    return failing.may_restart and is_left and not job.torchrun_restarts


def host_stopped(state: State, event: Stop) -> Step:
    """Stop all hosts, unless a failure came first that a restart cannot fix."""
    phase = state.phase
    if isinstance(phase, Ended):
        return state, ()
    if isinstance(phase, Failing) and (phase.broken or not _restarts(state, phase)):
        return state, ()
    return _end(state, stopped(event.number))


def host_succeeded(state: State, host: str, event: Succeeded) -> Step:
    """Count the host: the job has succeeded when all hosts have."""
    phase = state.phase
    if event.attempt != state.attempt or not isinstance(phase, (Running, Failing)):
        return state, ()
    state = state._replace(watch=judge.host_succeeded(state.watch, host))
    succeeded = phase.succeeded | {host}
    has_failed = isinstance(phase, Failing) and phase.failures
    if len(succeeded) == len(state.job.members) + 1 and not has_failed:
        return _end(state, Result(0))
    return state._replace(phase=phase._replace(succeeded=succeeded)), ()


def host_meets(state: State, host: str, event: AtRendezvous) -> Step:
    """Note whose torchrun waits for the others' after a restart, until they have met."""
    phase = state.phase
    if event.attempt != state.attempt or not isinstance(phase, Running):
        return state, ()
    if event.has_met:
        return state._replace(phase=phase._replace(meet_by=math.inf)), ()
    return state._replace(phase=phase._replace(waiting=phase.waiting | {host})), ()


def _takes_too_long(state: State, done: Collection[str], what: str) -> Step:
    """End the job since a restart does not come to its end; name the hosts that are behind."""
    job, attempt = state.job, state.attempt
    behind = [host for host in job.hosts if host not in done] or list(job.hosts)
    named = some_of(behind)
    how = f"did not {what} attempt {attempt} within {job.start_timeout:g} s of the restart"
    result = of_lost_host(join_and_count(named, len(behind) - len(named)), how).result
    before = shortened(f"what was restarted had failed: {state.kinds[-1]}", 300)
    return _end(state, result._replace(text=f"{result.text}{before}\n"))


def host_watched(state: State, host: str, event: ProgressReport, now: float) -> Step:
    """Take in of which ranks of a host nothing moves."""
    if event.attempt != state.attempt or not isinstance(state.phase, Running):
        return state, ()  # what was known when a rank failed says why it did
    watch = judge.host_reported(state.watch, host, event.ranks, now, event.others)
    return state._replace(watch=watch), ()


def _say_who_waits(state: State, now: float) -> Step:
    """Say that nothing moves, and end the job when the user's time for that is over."""
    watch, lines, is_new = judge.check(state.watch, now)
    logs, asks = tuple(Log(line) for line in lines), tuple[Any, ...]()
    state = state._replace(watch=watch)
    if is_new:
        state, asks = _gather_stacks(state, "", now)
    if watch.hang:
        hang = causes.of_hang(watch.hang.text, may_restart=watch.hang.may_restart)
        state = _note(state, hang, now)
    return state, logs + asks


def _gather_stacks(state: State, host: str, now: float) -> Step:
    """Ask all hosts where their ranks are, for somebody at a host, or for the log ("").

    For the log alone no rank gets a signal, unless the user has this stall end the job anyway.
    """
    may_signal = bool(host) or state.job.hang_timeout < math.inf
    shows = stacks.requested(state.shows, host, now, may_signal=may_signal)
    before, state = state.shows.number, state._replace(shows=shows)
    if shows.number == before:
        return state, ()  # they have been asked just now
    return _tell_all(state, CollectStacks(shows.number, shows.may_signal))


def host_showed_stacks(state: State, host: str, event: HostStacks) -> Step:
    """Show the stacks when all hosts' are here."""
    known = stacks.received(state.shows, host, event.number, event.ranks)
    state = state._replace(shows=known)
    if math.isinf(known.deadline) or {state.job.current_host, *state.members} - set(known.received):
        return state, ()
    return _show_stacks(state)


def _show_stacks(state: State) -> Step:
    """Show them to all that want them."""
    known, job = state.shows, state.job
    state = state._replace(shows=stacks.Gathering(known.number))
    lines = stacks.shown(known, {job.current_host, *state.members})
    logs = tuple(Log(line) for line in lines) if "" in known.requested_by else ()
    others = tuple(host for host in state.members if host in known.requested_by)
    send = (Send(others, AllStacks(lines)),) if others else ()
    tell = (Tell(AllStacks(lines)),) if job.current_host in known.requested_by else ()
    return state, (*logs, *send, *tell)


def no_ranks(state: State, host: str, attempt: int) -> Step:
    """Once no rank runs on any host, let the torchrun go that keeps their store."""
    if attempt != state.attempt:
        return state, ()
    return _if_no_ranks(state._replace(no_ranks=state.no_ranks | {host}))


def _if_no_ranks(state: State) -> Step:
    """Tell all hosts that no rank is left, if so; what runs on hosts that are lost is not known."""
    if {state.job.current_host, *state.members} - state.no_ranks:
        return state, ()
    return _tell_all(state, NoRanksAnywhere(state.attempt))


def host_cleared(state: State, host: str, event: Cleared, now: float) -> Step:
    """Start the next attempt when nothing of this one is left on any host."""
    phase = state.phase
    if event.attempt != state.attempt or not isinstance(phase, Restarting):
        return state, ()
    if event.broken:
        return _end(state, causes.not_restarted(phase.failure, event.broken).result)
    if event.survivors:  # they hold what the next attempt needs: a GPU, a port
        return _end(state, phase.failure.result)
    cleared = phase.cleared | {host}
    if len(cleared) < len(state.job.members) + 1:
        return state._replace(phase=phase._replace(cleared=cleared)), ()
    return _start(state, state.attempt + 1, now, meet_by=phase.by)


def _start(state: State, attempt: int, now: float, *, meet_by: float = math.inf) -> Step:
    job = state.job
    state = state._replace(
        phase=Running(meet_by=meet_by),
        attempt=attempt,
        attempt_since=now,
        no_ranks=frozenset(),
        ends=ends.NONE,
        watch=judge.State(job.hang_notify, job.hang_timeout, job.watch, busy=frozenset(job.hosts)),
        shows=stacks.Gathering(state.shows.number),  # a restart cuts off those who asked
    )
    return _tell_all(state, Start(attempt))


def _end(state: State, result: Result) -> Step:
    state = state._replace(phase=Ended(result))
    state, actions = _tell_all(state, End(result))
    return state, (*actions, *_if_all_know(state))


def _if_all_know(state: State) -> tuple[Any, ...]:
    return (Tell(AllKnow()),) if len(state.arrived) == len(state.job.members) else ()


def _tell_all(state: State, message: FromCoordinator) -> Step:
    """Tell all hosts that have joined, and this one."""
    send = (Send(tuple(state.members), message),) if state.members else ()
    return state, (*send, Tell(message))
