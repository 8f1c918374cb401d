"""The first host decides for all: who has joined, what must agree, what failed first, restarts.

    state, actions = step(state, event, now)

*One host decides.* Hosts report events to the coordinator, which alone decides how the job ends and
whether it restarts. Its decisions are commands to all hosts, and to this host's own run. A host
that is alone coordinates itself. EVENTS and MESSAGES map each event to its function, which branches
on the phase.

*The first failure that we hear of is often not the cause.* One failure leads to others, on every
host: connections break, collectives are aborted. So a failure that may be such a consequence is
held (Deciding) while a better cause may still arrive (Cause.patience in causes.py), and no rank
that could report it is ended. No cause is better than a rank's own: then ranks are ended at once.
Of two equally good causes the first wins. A lost host is such a failure, too; its connection shows
the loss (channel.py).

*One way to end, for every reason.* `End` has all hosts end their ranks (Clearing); their replies
carry its number. When all hosts that are not lost have cleared, the next attempt starts, or all
leave. Only then is the reason final: hosts may still report failures from before the end. Only
failures of ranks, and hangs, restart, if restarts remain, no hardware is broken and there is a
store for the next attempt (_verdict). A stop, or a lost host, still replaces a restart.

*Between a stop and a failure that does not restart, whichever arrives here first wins.* After a
stop all hosts end with 128 + its number and no failure file; after such a failure all end with its
exit code and text, and a host that is stopped still saves.

*Timeouts.* Joining: the start timeout. Running: none, it lasts as long as the job. Deciding: the
patience with its cause. Clearing: `_bound`. Ended: 5 s for the other hosts to leave before this
one, whose torchrun and stores they use.

*Invariants.*
- What a host reports of its ranks is of this attempt: once a host has cleared an attempt, that host
  reports nothing more about the attempt. `Cleared` with the number of an earlier End changes
  nothing.
- Times of two hosts' clocks are never compared: hosts report ages.

Times are on the clock System.now(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Union

from launcher.job.job import Job
from launcher.peers import events, messages, sentences
from launcher.peers.messages import Cleared, End, Hello, Succeeded
from launcher.result import causes
from launcher.result.causes import SUCCESS, Cause, Failure, Result, of_host, of_lost_host
from launcher.text.words import Log, Note, lasted, listed, short
from launcher.watch import judge
from launcher.watch.waits import NoProgressReport, StacksRequest

# For late hosts to join, and to learn why the job ends before it starts.
_LATE_HOSTS_SECONDS = 3.0
_KILL_SECONDS = 5.0  # for processes stuck in the kernel, after the ranks' grace
_REPLY_SECONDS = 5.0  # for messages
_LEAVE_SECONDS = 5.0  # for the other hosts to leave
NOBODY: Mapping[str, Cleared] = {}

# Phases, and the state.


class Joining(NamedTuple):
    """Hosts join; the coordinator compares what must agree."""

    deadline: float
    log_missing_at: float


class Running(NamedTuple):
    """All hosts have joined and run an attempt."""


# Why an attempt fails: what was reported, in order, each with the time when it occurred.
Failures = tuple[tuple[Failure, float], ...]


class Deciding(NamedTuple):
    """A host has failed or is lost; a better cause may come until the deadline.

    It `is_stopped` if a host was stopped meanwhile. The failure still counts; but that a torchrun
    ends its ranks is no cause then: it may do so because of the stop.
    """

    deadline: float
    failures: Failures
    is_stopped: bool = False


class Clearing(NamedTuple):
    """All hosts end their ranks, by the last End.

    Then the job ends, or the next attempt starts if the End says so and nothing prevents it. With
    `failures`, the result is computed from them again at the end (_settled): the End's is
    preliminary.
    """

    end: End
    deadline: float
    failures: Failures = ()
    cleared: Mapping[str, Cleared] = {}  # by host


class Ended(NamedTuple):
    """The other hosts were told to leave; this one leaves at `leave_at`. Infinite: it was told."""

    result: Result
    leave_at: float


JobPhase = Union[Joining, Running, Deciding, Clearing, Ended]


class JobState(NamedTuple):
    """The coordinator's state."""

    job: Job
    phase: JobPhase
    absent: frozenset[str]  # hosts that have not joined yet
    longest_grace: float = 0.0  # of all hosts that have joined
    attempt: int = 0  # 0: not all hosts have joined yet
    attempt_began: float = 0.0
    joined: Mapping[str, str] = {}  # that have joined and are not lost, with their addresses
    number: int = 0  # of the last End
    store: events.StoreMade | None = None  # of the next attempt
    failed: tuple[str, ...] = ()  # who had failed in earlier attempts, and how
    succeeded: tuple[tuple[float, str, Succeeded], ...] = ()  # when a rank ended, and where
    watch: judge.Stalls = judge.Stalls()  # ranks without progress, and where ranks are

    @property
    def others(self) -> list[str]:
        """The other hosts that have joined, and are not lost."""
        return [host for host in self.joined if host != self.job.current_host]

    @property
    def result(self) -> Result | None:
        """How the job ends, if decided."""
        phase = self.phase
        if isinstance(phase, Clearing):
            return None if phase.end.restart else phase.end.result
        return phase.result if isinstance(phase, Ended) else None


JobStep = tuple[JobState, tuple[events.Action, ...]]


# The machine.


def begin(job: Job, now: float) -> JobState:
    """Return the state at the launcher's start."""
    joining = Joining(now + job.options.start_timeout, now + events.LOG_MISSING_SECONDS)
    return JobState(job, joining, frozenset(job.cluster.hosts))


def due(state: JobState) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    phase = state.phase
    if isinstance(phase, Joining):
        at = min(phase.deadline, phase.log_missing_at)
    elif isinstance(phase, Running):
        at = math.inf
    else:
        at = phase.leave_at if isinstance(phase, Ended) else phase.deadline
    return min(at, _watch_due(state))


def _watch_due(state: JobState) -> float:
    return judge.due(state.watch, is_running=isinstance(state.phase, Running))


def step(state: JobState, event: Any, now: float) -> JobStep:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, events.Received):
        return MESSAGES[type(event.message)](state, event.host, event.message, now)
    return EVENTS[type(event)](state, event, now)


# Until all have joined.


def host_arrived(state: JobState, event: events.Arrived, now: float) -> JobStep:
    """Welcome a host of this job; start once all have joined, or end the job if they disagree."""
    other, phase = event.hello, state.phase
    state = state._replace(
        joined={**state.joined, other.host: event.address},
        absent=state.absent - {other.host},
        longest_grace=max(state.longest_grace, other.longest_grace),
    )
    is_own, more = other.host == state.job.current_host, tuple[events.Action, ...]()
    welcome = () if is_own else _send(messages.Welcome(), other.host)
    if state.result:
        more = _send(End(state.number, state.result), other.host)
        if isinstance(phase, Ended):
            more += _send(messages.Leave(state.result), other.host)
    elif not other.fingerprint:
        state, more = _await_reason(state, other.host, now)
    elif difference := _difference(state, other):
        state, more = _end_all(state, of_host(difference).result, now)
    elif isinstance(phase, Joining) and not state.absent:
        state, more = _start_attempt(state, 1, 0, now)
    return state, welcome + more


def refusal(state: JobState, other: Hello) -> str:
    """Return why a host may not join, for this host's own log; "" if it may."""
    job, host = state.job, other.host
    if other.job != job.cluster.job_name:
        return f"this is job {job.cluster.job_name}, not {short(other.job, 60)}"
    if host not in job.members:
        return f"{short(host, 60)} is not one of this job's other hosts"
    if host in state.joined:
        return f"{host} has already joined, from {state.joined[host]}"
    return "all hosts have already joined" if state.attempt else ""


def _difference(state: JobState, other: Hello) -> str:
    """Return the values on which that host and this one disagree; "" if they agree."""
    for what, value in messages.hello(state.job).fingerprint.items():
        different = other.fingerprint.get(what)
        if different != value:
            return (
                f"launcher: {state.job.current_host} and {other.host} differ in their {what}: "
                f"{short(value)} and {short(different)}; expected the same on every host."
            )
    return ""


def _await_reason(state: JobState, host: str, now: float) -> JobStep:
    """Wait for the report of a host that cannot start: a better cause than this."""
    why = of_host(f"{host} cannot start, and did not report why", cause=Cause.SECONDARY)
    return _fail(state, why, now)


def time_is_up(state: JobState, event: events.Time, now: float) -> JobStep:
    """Act on a timeout: decide, as no better cause has come, or continue without late hosts."""
    phase = state.phase
    if isinstance(phase, Deciding) and now >= phase.deadline:
        return _decide(state, phase, now)
    if now >= _watch_due(state):
        return _watched(state, judge.time_is_up(state.watch, set(state.joined), now), now)
    if now < due(state):
        return state, ()
    if isinstance(phase, Joining):
        return _miss_hosts(state, phase, now)
    if isinstance(phase, Ended):
        return _leave_here(state, phase)
    assert isinstance(phase, Clearing)  # while ranks run only the watch has times
    if phase.end.restart:
        return _restart_is_late(state, phase, now)
    return _leave(state, _settled(state, phase) or phase.end.result, now)


def _miss_hosts(state: JobState, phase: Joining, now: float) -> JobStep:
    """Log who is missing; end the job without them at the start timeout."""
    job = state.job
    missing = listed([host for host in job.members if host not in state.joined])
    if now >= phase.deadline:
        how = f"did not join within {job.options.start_timeout:g} s"
        return _end_all(state, of_lost_host(missing, how).result, now)
    state = state._replace(phase=phase._replace(log_missing_at=now + events.LOG_MISSING_SECONDS))
    return state, (
        Log(f"waiting for {missing}."),
        *_send(messages.Welcome(missing), *state.others),
    )


# While ranks run.


def host_failed(state: JobState, host: str, failure: Failure, now: float) -> JobStep:
    """Count a failure."""
    return _fail(state, failure, now)


def host_lost(state: JobState, event: events.Lost, now: float) -> JobStep:
    """Count a lost host; a job that has lost a host never restarts.

    After the end of the job it has only left; this host leaves after the last of them.
    """
    joined = {host: at for host, at in state.joined.items() if host != event.host}
    state, phase = state._replace(joined=joined), state.phase
    if isinstance(phase, Ended):
        is_last = not state.others and phase.leave_at < math.inf
        return _leave_here(state, phase) if is_last else (state, ())
    state, actions = _fail(state, of_lost_host(event.host, f"was lost: {event.why}"), now)
    if not actions:
        state, actions = _if_cleared(state, now)
    return state, (Note("lost", cause=event.why, host=event.host), *actions)


def _fail(state: JobState, failure: Failure, now: float) -> JobStep:
    """Count a failure; wait for a better cause, as long as its patience."""
    phase, reported = state.phase, ((failure, now - failure.age),)
    if isinstance(phase, Ended):
        return state, ()
    if isinstance(phase, Clearing):
        if not (phase.failures and (failure.may_restart or phase.end.restart)):
            return state, ()  # the job ends for another reason, or anyway
        if not failure.may_restart and failure.cause <= Cause.HOST_LOST:
            return _end_restart(state, failure, now)  # a lost host, or a launcher's own error
        return state._replace(phase=phase._replace(failures=phase.failures + reported)), ()
    deciding = Deciding(now + failure.cause.patience, reported)
    if isinstance(phase, Deciding):
        if phase.is_stopped and failure.cause is Cause.TORCHRUN_ENDS:
            return state, ()  # it may follow from the stop
        deadline = min(phase.deadline, deciding.deadline)
        deciding = phase._replace(deadline=deadline, failures=phase.failures + reported)
    state = state._replace(phase=deciding)
    if now >= deciding.deadline:
        return _decide(state, deciding, now)
    if failure.cause < Cause.TIMED_OUT:
        return state, ()
    return _watched(state, judge.failed(state.watch, now), now)


def _end_restart(state: JobState, failure: Failure, now: float) -> JobStep:
    """End the job during a restart; its text names the reason for the restart, too."""
    return _end_all(state, failure._replace(restart=state.failed[-1]).result, now)


def _decide(state: JobState, deciding: Deciding, now: float) -> JobStep:
    """Add the reason to a cause that may follow from another rank; then restart, or end the job."""
    failures = deciding.failures
    failure, failed_at = _cause(failures)
    if failure.cause >= Cause.TIMED_OUT:  # it may follow from what another rank did
        reason = judge.reason_of_wait(state.watch, failure.rank, failure.headline, now)
        if not reason and failure.cause is not Cause.ABORTED:
            # Who ends after a broken connection may have broken it; not so after a time-out.
            until = failed_at if failure.cause is Cause.TIMED_OUT else math.inf
            ended = [one for one in state.succeeded if one[0] < until]
            reason = sentences.first_to_end(ended, failed_at, failure.rank)
        failure = failure._replace(reason=reason)
        failures = ((failure, failed_at), *failures)  # the first of equally good causes
    result = _verdict(state, failures)
    if result:
        return _end_all(state, result, now, failures)
    attempt, most = state.attempt, state.job.options.max_restarts + 1
    took = now - state.attempt_began
    why = f"attempt {attempt} of {most} failed after {lasted(took)}: {failure.headline.rstrip('.')}"
    before = state.failed.count(failure.what)
    if before:
        why += f" ({before + 1} times so far)"
    state = state._replace(failed=(*state.failed, failure.what))
    return _end_all(state, SUCCESS, now, failures, f"{why}; restarting all ranks.")


def _cause(failures: Failures) -> tuple[Failure, float]:
    """Return the best cause; of equally good ones the first."""
    return min(failures, key=lambda one: one[0].cause)


def _verdict(
    state: JobState, failures: Failures, cleared: Mapping[str, Cleared] = NOBODY
) -> Result | None:
    """Return how the job ends, by all that is known so far; None: it restarts."""
    cause, _ = _cause(failures)
    obstacles = [one.obstacle for one, _ in failures]
    for host, message in cleared.items():
        if message.survivors:  # they hold a GPU or a port that the next attempt needs
            obstacles.append(f"{message.survivors} of {host}'s processes survived SIGKILL")
    obstacle = next(filter(None, (*obstacles, state.store and state.store.why)), "")
    has_restarts = 1 <= state.attempt <= state.job.options.max_restarts
    if has_restarts and not obstacle:
        return None
    if cause.may_restart:
        count = sum(one.may_restart and one.cause is Cause.OWN for one, _ in failures)
        cause = cause._replace(failures=count, no_restart=obstacle if has_restarts else "")
    return cause.result


def store_made(state: JobState, event: events.StoreMade, now: float) -> JobStep:
    """Note the next attempt's store; a restart that waits for it can start, or cannot."""
    return _if_cleared(state._replace(store=event), now)


def host_stopped(state: JobState, host: str, message: messages.Stop, now: float) -> JobStep:
    """Stop all hosts, unless a failure that ends the job came first.

    That torchrun ends its ranks may follow from the stop: so it is no cause, even if it came first.
    """
    phase = state.phase
    failures = phase.failures if isinstance(phase, (Deciding, Clearing)) else ()
    failures = tuple(one for one in failures if one[0].cause is not Cause.TORCHRUN_ENDS)
    is_final = isinstance(phase, Ended) or (isinstance(phase, Clearing) and not phase.end.restart)
    if is_final or (failures and _verdict(state, failures)):
        if isinstance(phase, Deciding):
            state = state._replace(phase=phase._replace(failures=failures, is_stopped=True))
        return state, ()
    return _end_all(state, causes.stopped(message.number), now)


def host_succeeded(state: JobState, host: str, message: Succeeded, now: float) -> JobStep:
    """Note which ranks have ended with 0; the job has succeeded when all of all hosts have.

    The end of a rank may break a collective of other ranks.
    """
    phase = state.phase
    if not isinstance(phase, (Running, Deciding)):
        return state, ()
    state = state._replace(succeeded=(*state.succeeded, (now - message.age, host, message)))
    if not message.are_all:
        return state, ()
    reports = [report for _, _, report in state.succeeded if report.are_all]
    are_all = len(reports) == len(state.job.cluster.hosts)
    has_failed = isinstance(phase, Deciding) and _cause(phase.failures)[0].may_restart
    if not are_all or has_failed:
        return state, ()
    isolated = [report.isolated for report in reports]
    is_said = state.job.options.notes and all(isolated) and sum(isolated) > 1
    notes = [Log(sentences.nothing_exchanged(sum(isolated)))] if is_said else []
    state, actions = _end_all(state, SUCCESS, now)
    return state, (*notes, *actions)


def progress_reported(state: JobState, host: str, message: NoProgressReport, now: float) -> JobStep:
    """Note which ranks of a host make no progress, or where all of its ranks are.

    After a rank's failure only requested reports count.
    """
    is_late = not (isinstance(state.phase, Running) or message.number)
    if is_late or message.attempt != state.attempt:
        return state, ()
    return _watched(state, judge.reported(state.watch, host, message, set(state.joined), now), now)


def stacks_requested(state: JobState, host: str, message: StacksRequest, now: float) -> JobStep:
    """Gather stacks for a user at a host."""
    return _watched(state, judge.collect(state.watch, now, may_signal=True), now)


def _watched(state: JobState, seen: judge.Step, now: float) -> JobStep:
    """Act on the watch's findings; fail the attempt when a stall has reached the user's limit."""
    watch, wanted = seen
    state, actions = state._replace(watch=watch), list[events.Action]()
    for one in wanted:
        if isinstance(one, (Log, Note)):
            actions.append(one)
        else:
            actions += _command_all(state, one)[1]
    if watch.hang and isinstance(state.phase, Running):
        state, more = _fail(state, watch.hang, now)
        actions += more
    return state, tuple(actions)


# The end of an attempt, and of the job.


def _end_all(
    state: JobState, result: Result, now: float, failures: Failures = (), restart: str = ""
) -> JobStep:
    """Command all hosts to end their ranks, for a result or a restart; `restart` says why."""
    end = End(state.number + 1, result, restart)
    clearing = Clearing(end, now + _bound(state, is_restart=bool(restart)), failures)
    return _command_all(state._replace(phase=clearing, number=end.number), end)


def _bound(state: JobState, *, is_restart: bool) -> float:
    """Return how many seconds all hosts have to clear. A single host has no restart timeout."""
    if not state.attempt:
        return _LATE_HOSTS_SECONDS  # no rank has started
    job = state.job
    # A host that is cut off counts as lost only after the host timeout.
    bound = state.longest_grace + _KILL_SECONDS + _REPLY_SECONDS + job.options.host_timeout
    return min(bound, job.restart_timeout) if is_restart and job.members else bound


def host_cleared(state: JobState, host: str, message: Cleared, now: float) -> JobStep:
    """Note that a host has ended all of its ranks."""
    phase = state.phase
    if message.number != state.number or not isinstance(phase, Clearing):
        return state, ()
    phase = phase._replace(cleared={**phase.cleared, host: message})
    return _if_cleared(state._replace(phase=phase), now)


def _if_cleared(state: JobState, now: float) -> JobStep:
    """Start the next attempt, or command all to leave, if all hosts have cleared."""
    phase = state.phase
    if not isinstance(phase, Clearing) or _behind(state, phase):
        return state, ()
    result = _settled(state, phase)
    if not result:
        if state.store:
            return _start_attempt(state, state.attempt + 1, state.store.port, now)
        return state, ()  # until that is made
    # A lost host may have saved something, too.
    are_all = len(phase.cleared) == len(state.job.cluster.hosts)
    is_noted = are_all and state.job.options.notes
    said = sentences.last_lines(result, phase.cleared.values()) if is_noted else ()
    state, actions = _leave(state, result, now)
    return state, (*map(Log, said), *actions)


def _settled(state: JobState, clearing: Clearing) -> Result | None:
    """Return how the job ends, when Clearing is over; None: it restarts."""
    if not clearing.failures:
        return clearing.end.result
    return _verdict(state, clearing.failures, clearing.cleared)


def _behind(state: JobState, clearing: Clearing) -> set[str]:
    """Return the hosts that have not cleared; not the lost ones, whose processes nobody sees."""
    return {*state.joined, *state.absent} - set(clearing.cleared)


def _restart_is_late(state: JobState, clearing: Clearing, now: float) -> JobStep:
    """End the job because a restart takes too long; name the late hosts, or the store."""
    if result := _settled(state, clearing):  # a failure that has come since prevents it
        return _end_all(state, result, now, clearing.failures)
    job = state.job
    within = f"within {_bound(state, is_restart=True):g} s of the restart"
    behind = sorted(_behind(state, clearing), key=job.cluster.hosts.index)
    if not behind:
        why = f"{job.current_host} did not make the next attempt's store {within}"
        return store_made(state, events.StoreMade(0, why), now)
    how = f"did not clean up attempt {state.attempt} {within}"
    return _end_restart(state, of_lost_host(listed(behind), how), now)


def _start_attempt(state: JobState, attempt: int, port: int, now: float) -> JobStep:
    working = NoProgressReport(attempt, ())
    state = state._replace(
        phase=Running(),
        attempt=attempt,
        attempt_began=now,
        store=None,
        succeeded=(),
        # A restart drops pending requests for stacks.
        watch=judge.Stalls(state.job.options, dict.fromkeys(state.job.cluster.hosts, working)),
    )
    return _command_all(state, messages.Start(attempt, port))


def _leave(state: JobState, result: Result, now: float) -> JobStep:
    """Have the other hosts leave, then this one; after a success at once."""
    leave = messages.Leave(result)
    if result == SUCCESS or not state.others:
        return _command_all(state._replace(phase=Ended(result, math.inf)), leave)
    state = state._replace(phase=Ended(result, now + _LEAVE_SECONDS))
    return state, _send(leave, *state.job.members)


def _leave_here(state: JobState, ended: Ended) -> JobStep:
    state = state._replace(phase=ended._replace(leave_at=math.inf))
    return state, _send(messages.Leave(ended.result), state.job.current_host)


def _command_all(state: JobState, message: messages.FromCoordinator) -> JobStep:
    """Give a command to all connected hosts, and to this host's own run.

    Silent ones, which are lost, are still connected: if they continue, they read how the job ended.
    """
    return state, _send(message, *state.job.members, state.job.current_host)


def _send(message: messages.FromCoordinator, *hosts: str) -> tuple[events.Send]:
    return (events.Send(hosts, message),)


EVENTS: Mapping[type, Callable[[JobState, Any, float], JobStep]] = {
    events.Arrived: host_arrived,
    events.StoreMade: store_made,
    events.Lost: host_lost,
    events.Time: time_is_up,
}
MESSAGES: Mapping[type, Callable[[JobState, str, Any, float], JobStep]] = {
    Failure: host_failed,
    messages.Stop: host_stopped,
    Succeeded: host_succeeded,
    NoProgressReport: progress_reported,
    StacksRequest: stacks_requested,
    Cleared: host_cleared,
}
