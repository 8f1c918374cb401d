"""The first host decides for all: who has joined, what must agree, which failure counts, restarts.

    state, actions = step(state, event, now)

*One host decides.* Hosts report what happens to them, and the coordinator alone decides how the job
ends and whether it restarts; what it decides is a command to all hosts, and to this host's own run.
A host that is alone coordinates itself. EVENTS and MESSAGES have the function that takes an event;
it branches on the phase.

*The cause is not what is known first.* One failure brings others about, on every host: connections
break, collectives are aborted. So a first failure is held (Deciding) for as long as a better cause
may still come (Cause.patience in causes.py); of two equally good ones the first counts. A lost host
is one of these failures, and is found by its connection (channel.py).

*One way to end, for every reason.* `End` has all hosts end their ranks (Clearing); its number is
that of their replies. When all that are not lost have cleared, the next attempt starts, or all
leave. Only failures of ranks, and hangs, restart, while restarts remain, no hardware is broken and
there is a store for the next attempt. A restart can still be replaced by an end: by a stop, a lost
host, one that does not clear. An end with a result stays: later failures and stops change nothing.

*Of a stop and a failure the first counts that arrives here.* After a stop all hosts end with 128 +
its number and no failure file; after a failure that does not restart its exit code and text are
those of all hosts, and a host that is stopped saves all the same.

*What bounds each wait.* Joining: the start timeout. Running lasts as long as the job. Deciding: the
patience with its cause. Clearing: `_bound`. Ended: 5 s, in which the others leave before this host,
whose torchrun and stores they use.

*What holds always.*
- A report of another attempt changes nothing, but that of a launcher which failed before it
  received the start (host_failed); nor does `Cleared` with the number of an earlier End.
- No times of two hosts' clocks are compared: hosts report ages.

Times are on the clock System.now(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable

from launcher.job.job import Job
from launcher.peers import ends, events, messages
from launcher.peers.state import Clearing, Deciding, Ended, JobState, JobStep, Joining, Running
from launcher.result import causes
from launcher.result.causes import SUCCESS, Cause, Failure, Result, of_host, of_lost_host
from launcher.text.words import Log, join_and_count, lasted, ordinal, short, shortened, some_of
from launcher.watch import judge, stacks

LOG_MISSING_SECONDS = 30  # between two lines on who is missing
_MOST_REFUSALS_LOGGED = 20
# For hosts to join that are to learn why the job ends before it starts.
_LATE_HOSTS_SECONDS = 3.0
# For ranks that have had their grace, and for the kernel to end what it holds; for messages.
_KILL_SECONDS, _REPLY_SECONDS = 5.0, 5.0
_LEAVE_SECONDS = 5.0  # for the other hosts to leave


def begin(job: Job, now: float) -> JobStep:
    """Return the state at the launcher's start, and the actions to carry out."""
    own = messages.hello(job)
    joining = Joining(now + job.options.start_timeout, now + LOG_MISSING_SECONDS)
    state = JobState(job, joining, own, frozenset(job.members), own.grace)
    if not job.members:
        return _start_attempt(state, 1, 0, now)
    if not job.fingerprint:
        state = _await_reason(state, job.current_host, now)
    return state, ()


def due(state: JobState) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    phase = state.phase
    if isinstance(phase, Joining):
        at = min(phase.deadline, phase.log_missing_at)
    elif isinstance(phase, Running):
        at = judge.due(state.watch)
    else:
        at = phase.leave_at if isinstance(phase, Ended) else phase.deadline
    return min(at, state.gathering.deadline)


def step(state: JobState, event: Any, now: float) -> JobStep:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, events.Received):
        return MESSAGES[type(event.message)](state, event.host, event.message, now)
    return EVENTS[type(event)](state, event, now)


# Until all have joined.


def host_arrived(state: JobState, event: events.Arrived, now: float) -> JobStep:
    """Let a host of this job join; start once all have, end the job if they do not agree."""
    job, other = state.job, event.hello
    why = _reason_to_refuse(state, other)
    if why:
        state = state._replace(refused=state.refused + 1)
        at = f"from {event.address} to port {job.options.peer_port}"
        line = Log(f"refused a connection {at}: {why}.")
        refuse = events.Refuse(event.connection)
        return state, (line, refuse) if state.refused <= _MOST_REFUSALS_LOGGED else (refuse,)
    state = state._replace(
        members={**state.members, other.host: event.address},
        absent=state.absent - {other.host},
        grace=max(state.grace, other.grace),
    )
    phase, more = state.phase, tuple[events.Action, ...]()
    if isinstance(phase, (Clearing, Ended)):
        more = (events.Send((other.host,), messages.End(state.number, phase.result)),)
        if isinstance(phase, Ended):
            more = (*more, events.Send((other.host,), messages.Leave()))
    elif not other.fingerprint:
        state = _await_reason(state, other.host, now)
    elif difference := _difference(state, other):
        state, more = _end(state, of_host(difference).result, now)
    elif isinstance(phase, Joining) and len(state.members) == len(job.members):
        state, more = _start_attempt(state, 1, 0, now)
        more = (*more, events.EndListening())
    return state, (
        events.Admit(event.connection, other.host),
        events.Send((other.host,), messages.Welcome()),
        *more,
    )


def _reason_to_refuse(state: JobState, other: messages.Hello) -> str:
    """Return why a host is refused, for this host's own log: a stranger is told nothing."""
    job, host = state.job, other.host
    if other.job != job.cluster.job_name:
        return f"this is job {job.cluster.job_name}, not {short(other.job, 60)}"
    if host not in job.members:
        return f"{short(host, 60)} is not one of this job's other hosts"
    if host in state.members:
        return f"{host} has already joined, from {state.members[host]}"
    return "all hosts have already joined" if state.attempt else ""


def _difference(state: JobState, other: messages.Hello) -> str:
    """Return what must agree between that host and this one, but does not; "" if it does."""
    for what, value in state.hello.fingerprint.items():
        different = other.fingerprint.get(what)
        if different != value:
            return (
                f"launcher: {state.job.current_host} and {other.host} differ in their {what}: "
                f"{short(value)} and {short(different)}; expected the same on every host."
            )
    return ""


def _await_reason(state: JobState, host: str, now: float) -> JobState:
    """Wait for what a host that cannot start is about to report: a better cause than this."""
    why = of_host(f"{host} cannot start, and did not report why", cause=Cause.SECONDARY)
    return _note(state, why, now)


def cannot_listen(state: JobState, event: events.CannotListen, now: float) -> JobStep:
    """End the job, for a cause that this host has reported, if there is one."""
    if not event.may_tell:
        state = state._replace(absent=frozenset())
    if isinstance(state.phase, (Clearing, Ended)):
        return _if_cleared(state, now)
    state = _note(state, of_host(f"launcher: {event.why}"), now)
    assert isinstance(state.phase, Deciding)
    return _end(state, state.phase.failure.result, now)


def time_is_up(state: JobState, event: events.Time, now: float) -> JobStep:
    """Do what is due: decide, since no better cause has come, go on without hosts that are late."""
    phase = state.phase
    if now >= state.gathering.deadline:
        return _show_stacks(state)
    if now < due(state):
        return state, ()
    if isinstance(phase, Joining):
        return _miss_hosts(state, phase, now)
    if isinstance(phase, Running):
        return _judge_progress(state, now)
    if isinstance(phase, Deciding):
        return _after_failure(state, phase, now)
    if isinstance(phase, Ended):
        return _leave_here(state, phase)
    if phase.reason:
        return _restart_is_late(state, phase, now)
    return _leave(state, phase.result, now)


def _miss_hosts(state: JobState, phase: Joining, now: float) -> JobStep:
    """Log who is missing; end the job without them at the start timeout."""
    job = state.job
    absent = [host for host in job.members if host not in state.members]
    named = some_of(absent)
    missing = join_and_count(named, len(absent) - len(named))
    if now >= phase.deadline:
        how = f"did not join within {job.options.start_timeout:g} s"
        return _end(state, of_lost_host(missing, how).result, now)
    state = state._replace(phase=phase._replace(log_missing_at=now + LOG_MISSING_SECONDS))
    return state, (
        Log(f"waiting for {missing}."),
        events.Send(tuple(state.members), messages.Missing(missing)),
    )


# While ranks run.


def host_failed(state: JobState, host: str, message: messages.Failed, now: float) -> JobStep:
    """Wait for a better cause, as long as the cause's patience."""
    phase, failure = state.phase, message.failure
    # A launcher that fails while it waits for a start may not have received it.
    crosses = message.attempt == state.attempt - 1 and not failure.may_restart
    if not (message.attempt == state.attempt or crosses) or isinstance(phase, Ended):
        return state, ()  # of an attempt that is over, or too late: the job has ended
    if isinstance(phase, Clearing):
        if failure.broken and phase.reason:
            why = causes.broken_hosts(failure.broken)
            return _end(state, causes.no_restart(phase.reason, why).result, now)
        # What ranks do meanwhile belongs to the same restart; without torchrun there is none.
        if failure.may_restart or not phase.reason:
            return state, ()
        # Of a launcher: its own, or that it has lost the coordinator, which stood still (SIGSTOP).
        is_cause = failure.cause in (Cause.OWN, Cause.HOST_LOST)
        if not is_cause:
            failure = causes.no_restart(phase.reason, failure.headline)
        return _end(state, failure.result, now)
    return _note(state, failure, now, message.age), ()


def ranks_succeeded(
    state: JobState, host: str, message: messages.RanksSucceeded, now: float
) -> JobStep:
    """Note which ranks have ended with 0: that may break the collective of another one."""
    if message.attempt != state.attempt or not isinstance(state.phase, (Running, Deciding)):
        return state, ()
    return state._replace(ends={**state.ends, host: ends.received(message, now)}), ()


def host_lost(state: JobState, event: events.Lost, now: float) -> JobStep:
    """Wait for a better cause; a job that has lost a host does not restart, in any case."""
    members = {host: at for host, at in state.members.items() if host != event.host}
    state, phase = state._replace(members=members), state.phase
    failure = of_lost_host(event.host, f"was lost: {event.why}")
    if isinstance(phase, Ended):
        is_last = not members and phase.leave_at < math.inf
        return _leave_here(state, phase) if is_last else (state, ())
    if isinstance(phase, Clearing):
        return _end(state, failure.result, now) if phase.reason else _if_cleared(state, now)
    return _note(state, failure, now), ()


def _note(state: JobState, failure: Failure, now: float, age: float = 0.0) -> JobState:
    """Note a failure, `age` seconds old, and the deadline of a better cause."""
    phase = state.phase
    if not isinstance(phase, Deciding):
        succeeded = phase.succeeded if isinstance(phase, Running) else frozenset()
        phase = Deciding(math.inf, failure, now - age, succeeded)
    if failure.cause < phase.failure.cause:
        phase = phase._replace(failure=failure, failed_at=now - age)
    phase = phase._replace(
        deadline=min(phase.deadline, now + failure.cause.patience),
        failures=phase.failures + failure.may_restart,
        may_restart=phase.may_restart and failure.may_restart,
        broken=phase.broken or failure.broken,
    )
    return state._replace(phase=phase)


def _after_failure(state: JobState, deciding: Deciding, now: float) -> JobStep:
    """Restart if every failure is one of ranks, and restarts remain; else end the job."""
    count = deciding.failures if deciding.failure.may_restart else 1
    failure = causes.first_of(deciding.failure, count)
    seen = judge.reason_of_wait(state.watch, failure.rank, now)
    if failure.cause >= Cause.ABORTED and seen:
        failure = failure._replace(text=f"{shortened(seen, 500)}\n{failure.text}"[: causes.LIMIT])
    elif failure.cause is Cause.SECONDARY:
        departed = ends.named(state.ends, deciding.failed_at)
        failure = causes.explained(failure, departed) if departed else failure
    obstacle = _obstacle(state, deciding)
    if obstacle is not None:
        failure = causes.no_restart(failure, obstacle) if obstacle else failure
        return _end(state, failure.result, now)
    attempt, most = state.attempt, state.job.options.max_restarts + 1
    took = now - state.attempt_began
    why = f"attempt {attempt} of {most} failed after {lasted(took)}: {failure.headline.rstrip('.')}"
    kind = deciding.failure.kind
    before = state.kinds.count(kind)
    if before:
        why += f" (for the {ordinal(before + 1)} time)"
    state = state._replace(kinds=(*state.kinds, kind))
    return _end(state, SUCCESS, now, failure, f"{why}; restarting all ranks.")


def _obstacle(state: JobState, deciding: Deciding) -> str | None:
    """Return what keeps the job from a restart, "" if none is left or wanted; None: nothing."""
    if not (deciding.may_restart and 1 <= state.attempt <= state.job.options.max_restarts):
        return ""
    if deciding.broken:
        return causes.broken_hosts(deciding.broken)
    return state.store.why if state.store and not state.store.port else None


def store_made(state: JobState, event: events.StoreMade, now: float) -> JobStep:
    """Note the next attempt's store; a restart that waits for it can start, or cannot."""
    state, phase = state._replace(store=event), state.phase
    if isinstance(phase, Clearing) and phase.reason and not event.port:
        return _end(state, causes.no_restart(phase.reason, event.why).result, now)
    return _if_cleared(state, now)


def host_stopped(state: JobState, host: str, message: messages.Stop, now: float) -> JobStep:
    """Stop all hosts, unless a failure came first that a restart cannot fix."""
    phase = state.phase
    if isinstance(phase, Ended) or (isinstance(phase, Clearing) and not phase.reason):
        return state, ()
    if isinstance(phase, Deciding) and _obstacle(state, phase) is not None:
        return state, ()
    return _end(state, causes.stopped(message.number), now)


def host_succeeded(state: JobState, host: str, message: messages.Succeeded, now: float) -> JobStep:
    """Count the host: the job has succeeded when all hosts have."""
    phase = state.phase
    if message.attempt != state.attempt or not isinstance(phase, (Running, Deciding)):
        return state, ()
    state = state._replace(watch=judge.host_succeeded(state.watch, host))
    succeeded = phase.succeeded | {host}
    has_failed = isinstance(phase, Deciding) and (
        phase.failures or phase.failure.cause is Cause.OWN
    )
    if len(succeeded) == len(state.job.members) + 1 and not has_failed:
        return _end(state, SUCCESS, now)
    return state._replace(phase=phase._replace(succeeded=succeeded)), ()


def progress_reported(
    state: JobState, host: str, message: messages.NoProgressReport, now: float
) -> JobStep:
    """Note which ranks of a host make no progress."""
    if message.attempt != state.attempt or not isinstance(state.phase, Running):
        return state, ()  # what was known when a rank failed is why it did
    watch = judge.host_reported(state.watch, host, message.ranks, now, message.others)
    return state._replace(watch=watch), ()


def _judge_progress(state: JobState, now: float) -> JobStep:
    """Log a stall, and fail the attempt when the user's limit for it is over."""
    watch, lines, is_new = judge.check(state.watch, now)
    logs, requests = tuple(Log(line) for line in lines), tuple[events.Action, ...]()
    state = state._replace(watch=watch)
    if is_new:
        state, requests = _gather_stacks(state, "", now)
    if watch.hang:
        hang = causes.of_hang(watch.hang.text, may_restart=watch.hang.may_restart)
        state = _note(state, hang, now)
    return state, logs + requests


def stacks_requested(
    state: JobState, host: str, message: messages.StacksRequest, now: float
) -> JobStep:
    """Gather stacks for somebody at a host."""
    return _gather_stacks(state, host, now)


def _gather_stacks(state: JobState, host: str, now: float) -> JobStep:
    """Request of all hosts where their ranks are, for somebody at a host, or for the log ("").

    For the log alone no rank gets a signal, unless the user has this stall end the job anyway.
    """
    may_signal = bool(host) or state.job.options.hang_timeout < math.inf
    gathering = stacks.requested(state.gathering, host, now, may_signal=may_signal)
    before, state = state.gathering.number, state._replace(gathering=gathering)
    if gathering.number == before:
        return state, ()  # it has been requested just now
    return _command_all(state, messages.CollectStacks(gathering.number, gathering.may_signal))


def stacks_reported(
    state: JobState, host: str, message: messages.HostStacks, now: float
) -> JobStep:
    """Show the stacks when all hosts' are here."""
    gathering = stacks.received(state.gathering, host, message.number, message.ranks)
    state = state._replace(gathering=gathering)
    hosts = {state.job.current_host, *state.members}
    if math.isinf(gathering.deadline) or hosts - set(gathering.received):
        return state, ()
    return _show_stacks(state)


def _show_stacks(state: JobState) -> JobStep:
    """Show them to all that have requested them."""
    gathering, job = state.gathering, state.job
    state = state._replace(gathering=stacks.Gathering(gathering.number))
    lines = stacks.shown(gathering, {job.current_host, *state.members})
    logs = tuple(Log(line) for line in lines) if "" in gathering.requested_by else ()
    hosts = tuple(host for host in job.cluster.hosts if host in gathering.requested_by)
    return state, (*logs, *((events.Send(hosts, messages.AllStacks(lines)),) if hosts else ()))


# The end of an attempt, and of the job.


def _end(
    state: JobState, result: Result, now: float, reason: Failure | None = None, restart: str = ""
) -> JobStep:
    """Have all hosts end their ranks, for a result, or for a restart: `restart` says why."""
    clearing = Clearing(result, now + _bound(state, is_restart=bool(reason)), reason)
    state = state._replace(phase=clearing, number=state.number + 1)
    return _command_all(state, messages.End(state.number, result, restart))


def _bound(state: JobState, *, is_restart: bool) -> float:
    """Return how many seconds all hosts have to clear. A host alone has no restart timeout."""
    if not state.attempt:
        return _LATE_HOSTS_SECONDS  # no rank has started
    job = state.job
    bound = state.grace + _KILL_SECONDS + _REPLY_SECONDS + job.options.host_timeout
    return min(bound, job.restart_timeout) if is_restart and job.members else bound


def host_cleared(state: JobState, host: str, message: messages.Cleared, now: float) -> JobStep:
    """Note that a host has ended all of its ranks."""
    phase = state.phase
    if message.number != state.number or not isinstance(phase, Clearing):
        return state, ()
    if message.survivors and phase.reason:  # they hold what the next attempt needs: a GPU, a port
        why = f"{message.survivors} of {host}'s processes survived SIGKILL"
        return _end(state, causes.no_restart(phase.reason, why).result, now)
    return _if_cleared(state._replace(phase=phase._replace(cleared=phase.cleared | {host})), now)


def _if_cleared(state: JobState, now: float) -> JobStep:
    """Start the next attempt, or have all leave, if all hosts have cleared."""
    phase = state.phase
    if not isinstance(phase, Clearing) or _behind(state, phase):
        return state, ()
    if not phase.reason:
        return _leave(state, phase.result, now)
    if not state.store:
        return state, ()
    return _start_attempt(state, state.attempt + 1, state.store.port, now)


def _behind(state: JobState, clearing: Clearing) -> set[str]:
    """Return the hosts that have not cleared; what is left on hosts that are lost is not known."""
    return {state.job.current_host, *state.members, *state.absent} - clearing.cleared


def _restart_is_late(state: JobState, clearing: Clearing, now: float) -> JobStep:
    """End the job since a restart takes too long; name the hosts that are behind, or the store."""
    job, reason = state.job, clearing.reason
    assert reason
    within = f"within {_bound(state, is_restart=True):g} s of the restart"
    behind = sorted(_behind(state, clearing), key=job.cluster.hosts.index)
    if not behind:
        why = f"{job.current_host} did not make the next attempt's store {within}"
        return _end(state, causes.no_restart(reason, why).result, now)
    named = some_of(behind)
    how = f"did not clean up attempt {state.attempt} {within}"
    result = of_lost_host(join_and_count(named, len(behind) - len(named)), how).result
    before = shortened(f"reason for the restart: {state.kinds[-1]}", 300)
    return _end(state, result._replace(text=f"{result.text}{before}\n"), now)


def _start_attempt(state: JobState, attempt: int, port: int, now: float) -> JobStep:
    options, hosts = state.job.options, frozenset(state.job.cluster.hosts)
    state = state._replace(
        phase=Running(),
        attempt=attempt,
        attempt_began=now,
        store=None,
        ends={},
        watch=judge.Stalls(options.hang_notify, options.hang_timeout, options.watch, busy=hosts),
        gathering=stacks.Gathering(state.gathering.number),  # a restart cuts off who requested it
    )
    state, start = _command_all(state, messages.Start(attempt, port))
    make = events.Send((state.job.current_host,), events.MakeStore())
    return state, (*start, make) if attempt <= options.max_restarts else start


def _leave(state: JobState, result: Result, now: float) -> JobStep:
    """Have the other hosts leave, then this one; after a success at once."""
    if result == SUCCESS or not state.members:
        return _command_all(state._replace(phase=Ended(result, math.inf)), messages.Leave())
    state = state._replace(phase=Ended(result, now + _LEAVE_SECONDS))
    return state, (events.Send(tuple(state.members), messages.Leave()),)


def _leave_here(state: JobState, ended: Ended) -> JobStep:
    state = state._replace(phase=ended._replace(leave_at=math.inf))
    return state, (events.Send((state.job.current_host,), messages.Leave()),)


def _command_all(state: JobState, message: messages.FromCoordinator) -> JobStep:
    """Give a command to all hosts that have joined, and to this host's own run."""
    return state, (events.Send((*state.members, state.job.current_host), message),)


EVENTS: Mapping[type, Callable[[JobState, Any, float], JobStep]] = {
    events.Arrived: host_arrived,
    events.CannotListen: cannot_listen,
    events.StoreMade: store_made,
    events.Lost: host_lost,
    events.Time: time_is_up,
}
MESSAGES: Mapping[type, Callable[[JobState, str, Any, float], JobStep]] = {
    messages.Failed: host_failed,
    messages.RanksSucceeded: ranks_succeeded,
    messages.Stop: host_stopped,
    messages.Succeeded: host_succeeded,
    messages.NoProgressReport: progress_reported,
    messages.StacksRequest: stacks_requested,
    messages.HostStacks: stacks_reported,
    messages.Cleared: host_cleared,
}
