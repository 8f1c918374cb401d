"""The first host decides for all: who has joined, what must agree, which failure counts, restarts.

    state, actions = step(state, event, now)

*One host decides.* Hosts report what happens to them, and the coordinator alone decides how the job
ends and whether it restarts; what it decides is a command to all hosts, and to this host's own run.
A host that is alone coordinates itself. EVENTS and MESSAGES have the function that takes an event;
it branches on the phase. rows.py has all changes of phase, and every step of a test is checked
against it.

*The cause is not what is known first.* One failure brings others about, on every host: connections
break, collectives are aborted, torchruns end. So a first failure is held (JobFailing) for as long
as a better cause may still come (Cause.patience in causes.py); of two equally good ones the first
counts. A lost host is one of these failures, and is found by its connection (channel.py).

*Of a stop and a failure the first counts that arrives here.* After a stop all hosts end with 128 +
its number and no failure file; a failure changes nothing any more, and its own host logs it
("before the stop", "during the stop": run/ending.py) unless the stop may be its reason. After a
failure that does not restart its exit code and text are those of all hosts, and a host that is
stopped saves all the same.

*A restart is all hosts'.* Only failures of ranks, and hangs, restart, while restarts remain and no
hardware is broken. The next attempt starts when all hosts have cleared this one, so that nothing of
two attempts runs at once; whoever is lost, or does not clear, ends the job.

*What bounds each wait.* JobJoining: the start timeout. JobRunning lasts as long as the job, but
after a restart the torchruns have to complete their rendezvous by the same deadline that
JobRestarting has, the restart timeout after the decision to restart. JobFailing: the patience with
its cause. JobEnded: nothing; each host ends by itself.

*What holds always.*
- `JobEnded` is the last phase, with the result that every host gets: those that have joined at
  once, those that join later as they come.
- A report of another attempt changes nothing, but that of a launcher which failed before it
  received the start (host_failed).
- No times of two hosts' clocks are compared: hosts report ages.

Times are on the clock time.monotonic(), waits in seconds. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Callable

from launcher.job.job import Job
from launcher.peers import ends
from launcher.peers.events import (
    Action,
    Admit,
    AllKnow,
    Arrived,
    CannotListen,
    Command,
    Disconnect,
    EndListening,
    Listen,
    Lost,
    Received,
    Refuse,
    Send,
    Time,
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
    Missing,
    NoProgressReport,
    NoRanksAnywhere,
    NoRanksHere,
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
from launcher.peers.state import (
    JobEnded,
    JobFailing,
    JobJoining,
    JobRestarting,
    JobRunning,
    JobState,
    JobStep,
)
from launcher.result import causes
from launcher.result.causes import (
    SUCCESS,
    Cause,
    Failure,
    Result,
    change_port,
    first_of,
    of_host,
    of_lost_host,
    stopped,
)
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

LOG_MISSING_SECONDS = 30  # between two lines on who is missing
_MOST_REFUSALS_LOGGED = 20


def begin(job: Job, now: float) -> JobStep:
    """Return the state at the launcher's start, and the actions to carry out."""
    joining = JobJoining(now + job.options.start_timeout, now + LOG_MISSING_SECONDS)
    state = JobState(job, joining, hello(job))
    if not job.members:
        return _start_attempt(state, 1, now)
    if not job.fingerprint:
        state = _await_reason(state, job.current_host, now)
    return state, (Listen(),)


def due(state: JobState) -> float:
    """Return when the event Time is due; infinite: never, as while ranks run."""
    phase, stacks_due = state.phase, state.gathering.deadline
    if isinstance(phase, JobJoining):
        return min(phase.deadline, phase.log_missing_at, stacks_due)
    if isinstance(phase, JobRunning):
        return min(judge.due(state.watch), phase.rendezvous_deadline, stacks_due)
    if isinstance(phase, (JobFailing, JobRestarting)):
        return min(phase.deadline, stacks_due)
    return stacks_due


def step(state: JobState, event: Any, now: float) -> JobStep:
    """Return the state after an event, and the actions to carry out."""
    if isinstance(event, Received):
        receive = MESSAGES.get(type(event.message))
        if receive is not None:
            return receive(state, event.host, event.message, now)
        event = event.message
    take = EVENTS.get(type(event))
    if take is None:
        return state, (Log(f"the coordinator does not know {type(event).__name__}."),)
    return take(state, event, now)


# Until all have joined.


def host_arrived(state: JobState, event: Arrived, now: float) -> JobStep:
    """Let a host of this job join; start once all have, end the job if they do not agree."""
    job, other = state.job, event.hello
    why = _reason_to_refuse(state, other)
    if why:
        state = state._replace(refused=state.refused + 1)
        line = (
            f"refused a connection from {event.address} to port {job.options.peer_port}: {why[1]}."
        )
        refuse = Refuse(event.conn, Refused(why[0]))
        return state, (Log(line), refuse) if state.refused <= _MOST_REFUSALS_LOGGED else (refuse,)
    state = state._replace(arrived=state.arrived | {other.host})
    actions = (Admit(event.conn, other.host), Send((other.host,), Welcome()))
    if isinstance(state.phase, JobEnded):
        end = Send((other.host,), End(state.phase.result))
        return state, (*actions, end, Disconnect(other.host), *_if_all_know(state))
    state = state._replace(members={**state.members, other.host: event.address})
    if not other.fingerprint:
        return _await_reason(state, other.host, now), actions
    difference = _difference(state, other)
    if difference:
        state, more = _end_job(state, of_host(difference).result)
    elif isinstance(state.phase, JobJoining) and len(state.members) == len(job.members):
        state, more = _start_attempt(state, 1, now)
        more = (*more, EndListening())
    else:
        more = ()
    return state, actions + more


def _reason_to_refuse(state: JobState, other: Hello) -> tuple[Refusal, str] | None:
    """Return why a host is refused, and that in words for this host's own log; None: it is not."""
    job, host = state.job, other.host
    if other.job != job.cluster.job_name:
        return (
            Refusal.ANOTHER_JOB,
            f"this is job {job.cluster.job_name}, not {short(other.job, 60)}",
        )
    if host not in job.members:
        return Refusal.NO_HOST, f"{short(host, 60)} is not one of this job's other hosts"
    if host in state.members:
        return Refusal.HAS_JOINED, f"{host} has already joined, from {state.members[host]}"
    return (Refusal.ALL_HAVE_JOINED, "all hosts have already joined") if state.attempt else None


def _difference(state: JobState, other: Hello) -> str:
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


def cannot_listen(state: JobState, event: CannotListen, now: float) -> JobStep:
    """End the job on this host, for a cause of its own that it has reported, if there is one."""
    if isinstance(state.phase, JobEnded):
        return state, ()
    seen = (
        f"{state.job.current_host} cannot listen on port {state.job.options.peer_port} for the "
        f"launchers of the other hosts ({event.why})"
    )
    state = _note(state, of_host(f"launcher: {change_port(seen)}"), now)
    assert isinstance(state.phase, JobFailing)
    state, actions = _end_job(state, state.phase.failure.result)
    return state, (*actions, Command(AllKnow()))  # no other host can learn it


def too_few_files(state: JobState, event: TooFewFiles, now: float) -> JobStep:
    """End all hosts: this one cannot hold a connection to each."""
    if isinstance(state.phase, JobEnded):
        return state, ()
    text = (
        f"launcher: {state.job.current_host} can have {event.files} files open (ulimit -n), "
        f"but the connections of {state.job.cluster.nnodes} hosts need {event.needs}; raise "
        f"that limit, or turn the launcher channel off with {flag('peers')} false."
    )
    return _end_job(state, of_host(text).result)


def time_is_up(state: JobState, event: Time, now: float) -> JobStep:
    """Log who is missing, end the job without them, or decide since no better cause has come."""
    phase, job = state.phase, state.job
    if now >= state.gathering.deadline:
        return _show_stacks(state)
    if isinstance(phase, JobFailing) and now >= phase.deadline:
        return _after_failure(state, phase, now)
    if isinstance(phase, JobRestarting) and now >= phase.deadline:
        # The coordinator's torchrun may clear last, since it keeps the store: a host without ranks
        # counts as done while another one still has some.
        done = phase.cleared | state.no_ranks
        is_clear = done.issuperset(job.cluster.hosts)
        return _takes_too_long(state, phase.cleared if is_clear else done, "clean up")
    if isinstance(phase, JobRunning):
        if now >= phase.rendezvous_deadline:
            return _takes_too_long(state, phase.at_rendezvous, "complete the rendezvous of")
        return _judge_progress(state, now)
    if not isinstance(phase, JobJoining) or now < due(state):
        return state, ()
    absent = [host for host in job.members if host not in state.members]
    named = tuple(some_of(absent))
    missing = Missing(named, len(absent) - len(named))
    if now >= phase.deadline:
        how = f"did not join within {job.options.start_timeout:g} s"
        return _end_job(state, of_lost_host(missing.words, how).result)
    state = state._replace(phase=phase._replace(log_missing_at=now + LOG_MISSING_SECONDS))
    return state, (Log(f"waiting for {missing.words}."), Send(tuple(state.members), missing))


# While ranks run.


def host_failed(state: JobState, host: str, message: Failed, now: float) -> JobStep:
    """Wait for a better cause, as long as the cause's patience."""
    phase = state.phase
    # A launcher that fails while it waits for a start may not have received it.
    crosses = message.attempt == state.attempt - 1 and not message.failure.may_restart
    if not (message.attempt == state.attempt or crosses) or isinstance(phase, JobEnded):
        return state, ()  # of an attempt that is over, or too late: the job has ended
    if isinstance(phase, JobRestarting):
        # What ranks do meanwhile belongs to the same restart; without torchrun there is none.
        if message.failure.may_restart:
            return state, ()
        # Of a launcher: its own, or that it has lost the coordinator, which stood still (SIGSTOP).
        is_cause = message.failure.cause in (Cause.OWN, Cause.HOST_LOST)
        failure = checked(message.failure, host) if is_cause else phase.failure
        return _end_job(state, failure.result)
    return _note(state, checked(message.failure, host), now, message.age), ()


def ranks_succeeded(state: JobState, host: str, message: RanksSucceeded, now: float) -> JobStep:
    """Note which ranks have ended with 0: that may break the collective of another one."""
    if message.attempt != state.attempt or not isinstance(state.phase, (JobRunning, JobFailing)):
        return state, ()
    return state._replace(ends=ends.received(state.ends, host, message, now)), ()


def host_lost(state: JobState, event: Lost, now: float) -> JobStep:
    """Wait for a better cause; a job that has lost a host does not restart, in any case."""
    members = {host: at for host, at in state.members.items() if host != event.host}
    state = state._replace(members=members)
    failure = of_lost_host(event.host, f"was lost: {event.why}")
    if isinstance(state.phase, JobEnded):
        return _if_no_ranks(state)
    if isinstance(state.phase, JobRestarting):
        state, actions = _end_job(state, failure.result)
        state, more = _if_no_ranks(state)
        return state, actions + more
    return _note(state, failure, now), ()


def _note(state: JobState, failure: Failure, now: float, age: float = 0.0) -> JobState:
    """Note a failure, `age` seconds old, and the deadline of a better cause."""
    phase, deadline = state.phase, now + failure.cause.patience
    if isinstance(phase, JobFailing):
        is_better = failure.cause < phase.failure.cause
        phase = phase._replace(
            deadline=min(phase.deadline, deadline),
            failure=failure if is_better else phase.failure,
            failures=phase.failures + failure.may_restart,
            may_restart=phase.may_restart and failure.may_restart,
            failed_at=now - age if is_better else phase.failed_at,
            broken=phase.broken or failure.broken,
        )
    else:
        succeeded = phase.succeeded if isinstance(phase, JobRunning) else frozenset()
        may_restart, broken = failure.may_restart, failure.broken
        phase = JobFailing(
            *(deadline, failure, int(may_restart), may_restart, succeeded, now - age, broken)
        )
    return state._replace(phase=phase)


def _after_failure(state: JobState, failing: JobFailing, now: float) -> JobStep:
    """Restart if every failure is one of ranks, and restarts remain; else end the job."""
    count = failing.failures if failing.failure.may_restart else 1
    failure = first_of(failing.failure, count)
    seen = judge.reason_of_wait(state.watch, failure.rank, now)
    if failure.cause >= Cause.ABORTED and seen:
        failure = failure._replace(text=f"{shortened(seen, 500)}\n{failure.text}"[: causes.LIMIT])
    elif failure.cause is Cause.SECONDARY:
        departed = ends.named(state.ends, failing.failed_at)
        failure = causes.explained(failure, departed) if departed else failure
    if not _may_restart(state, failing):
        return _end_job(state, failure.result)
    if failing.broken:
        return _end_job(state, causes.not_restarted(failure, failing.broken).result)
    attempt, most = state.attempt, state.job.options.max_restarts + 1
    took = now - state.attempt_began
    why = f"attempt {attempt} of {most} failed after {lasted(took)}: {failure.headline.rstrip('.')}"
    own = failing.failure.kind
    before = state.kinds.count(own)
    if before:
        why += f" (for the {ordinal(before + 1)} time)"
    deadline = now + state.job.restart_timeout if state.job.members else math.inf
    state = state._replace(phase=JobRestarting(failure, deadline), kinds=(*state.kinds, own))
    return _command_all(state, Restart(attempt, f"{why}; restarting all ranks."))


def _may_restart(state: JobState, failing: JobFailing) -> bool:
    job = state.job
    remains = 1 <= state.attempt <= job.options.max_restarts
    return failing.may_restart and remains


def host_stopped(state: JobState, host: str, message: Stop, now: float) -> JobStep:
    """Stop all hosts, unless a failure came first that a restart cannot fix."""
    phase = state.phase
    if isinstance(phase, JobEnded):
        return state, ()
    if isinstance(phase, JobFailing) and (phase.broken or not _may_restart(state, phase)):
        return state, ()
    return _end_job(state, stopped(message.number))


def host_succeeded(state: JobState, host: str, message: Succeeded, now: float) -> JobStep:
    """Count the host: the job has succeeded when all hosts have."""
    phase = state.phase
    if message.attempt != state.attempt or not isinstance(phase, (JobRunning, JobFailing)):
        return state, ()
    state = state._replace(watch=judge.host_succeeded(state.watch, host))
    succeeded = phase.succeeded | {host}
    has_failed = isinstance(phase, JobFailing) and phase.failures
    if len(succeeded) == len(state.job.members) + 1 and not has_failed:
        return _end_job(state, SUCCESS)
    return state._replace(phase=phase._replace(succeeded=succeeded)), ()


def at_rendezvous(state: JobState, host: str, message: AtRendezvous, now: float) -> JobStep:
    """Note whose torchrun waits in its rendezvous after a restart, until that is complete."""
    phase = state.phase
    if message.attempt != state.attempt or not isinstance(phase, JobRunning):
        return state, ()
    if message.is_complete:
        return state._replace(phase=phase._replace(rendezvous_deadline=math.inf)), ()
    return state._replace(phase=phase._replace(at_rendezvous=phase.at_rendezvous | {host})), ()


def _takes_too_long(state: JobState, done: Collection[str], what: str) -> JobStep:
    """End the job since a restart does not come to its end; name the hosts that are behind."""
    job, attempt = state.job, state.attempt
    behind = [host for host in job.cluster.hosts if host not in done] or list(job.cluster.hosts)
    named = some_of(behind)
    how = f"did not {what} attempt {attempt} within {job.restart_timeout:g} s of the restart"
    result = of_lost_host(join_and_count(named, len(behind) - len(named)), how).result
    before = shortened(f"reason for the restart: {state.kinds[-1]}", 300)
    return _end_job(state, result._replace(text=f"{result.text}{before}\n"))


def progress_reported(state: JobState, host: str, message: NoProgressReport, now: float) -> JobStep:
    """Note which ranks of a host make no progress."""
    if message.attempt != state.attempt or not isinstance(state.phase, JobRunning):
        return state, ()  # what was known when a rank failed is why it did
    watch = judge.host_reported(state.watch, host, message.ranks, now, message.others)
    return state._replace(watch=watch), ()


def _judge_progress(state: JobState, now: float) -> JobStep:
    """Log a stall, and fail the attempt when the user's limit for it is over."""
    watch, lines, is_new = judge.check(state.watch, now)
    logs, requests = tuple(Log(line) for line in lines), tuple[Action, ...]()
    state = state._replace(watch=watch)
    if is_new:
        state, requests = _gather_stacks(state, "", now)
    if watch.hang:
        hang = causes.of_hang(watch.hang.text, may_restart=watch.hang.may_restart)
        state = _note(state, hang, now)
    return state, logs + requests


def stacks_requested(state: JobState, host: str, message: StacksRequest, now: float) -> JobStep:
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
    return _command_all(state, CollectStacks(gathering.number, gathering.may_signal))


def stacks_reported(state: JobState, host: str, message: HostStacks, now: float) -> JobStep:
    """Show the stacks when all hosts' are here."""
    known = stacks.received(state.gathering, host, message.number, message.ranks)
    state = state._replace(gathering=known)
    if math.isinf(known.deadline) or {state.job.current_host, *state.members} - set(known.received):
        return state, ()
    return _show_stacks(state)


def _show_stacks(state: JobState) -> JobStep:
    """Show them to all that have requested them."""
    known, job = state.gathering, state.job
    state = state._replace(gathering=stacks.Gathering(known.number))
    lines = stacks.shown(known, {job.current_host, *state.members})
    logs = tuple(Log(line) for line in lines) if "" in known.requested_by else ()
    others = tuple(host for host in state.members if host in known.requested_by)
    send = (Send(others, AllStacks(lines)),) if others else ()
    command = (Command(AllStacks(lines)),) if job.current_host in known.requested_by else ()
    return state, (*logs, *send, *command)


def no_ranks(state: JobState, host: str, message: NoRanksHere, now: float) -> JobStep:
    """Once no rank runs on any host, let the torchrun end that keeps their store."""
    if message.attempt != state.attempt:
        return state, ()
    return _if_no_ranks(state._replace(no_ranks=state.no_ranks | {host}))


def _if_no_ranks(state: JobState) -> JobStep:
    """Command it if no rank runs on any host; what runs on hosts that are lost is not known."""
    if {state.job.current_host, *state.members} - state.no_ranks:
        return state, ()
    return _command_all(state, NoRanksAnywhere(state.attempt))


def host_cleared(state: JobState, host: str, message: Cleared, now: float) -> JobStep:
    """Start the next attempt when all hosts have cleared this one."""
    phase = state.phase
    if message.attempt != state.attempt or not isinstance(phase, JobRestarting):
        return state, ()
    if message.broken:
        return _end_job(state, causes.not_restarted(phase.failure, message.broken).result)
    if message.survivors:  # they hold what the next attempt needs: a GPU, a port
        return _end_job(state, phase.failure.result)
    cleared = phase.cleared | {host}
    if len(cleared) < len(state.job.members) + 1:
        return state._replace(phase=phase._replace(cleared=cleared)), ()
    return _start_attempt(state, state.attempt + 1, now, rendezvous_deadline=phase.deadline)


def _start_attempt(
    state: JobState, attempt: int, now: float, *, rendezvous_deadline: float = math.inf
) -> JobStep:
    job = state.job
    state = state._replace(
        phase=JobRunning(rendezvous_deadline=rendezvous_deadline),
        attempt=attempt,
        attempt_began=now,
        no_ranks=frozenset(),
        ends=ends.NONE,
        watch=judge.Stalls(
            job.options.hang_notify,
            job.options.hang_timeout,
            job.options.watch,
            busy=frozenset(job.cluster.hosts),
        ),
        gathering=stacks.Gathering(state.gathering.number),  # a restart cuts off who requested it
    )
    return _command_all(state, Start(attempt))


def _end_job(state: JobState, result: Result) -> JobStep:
    state = state._replace(phase=JobEnded(result))
    state, actions = _command_all(state, End(result))
    return state, (*actions, *_if_all_know(state))


def _if_all_know(state: JobState) -> tuple[Action, ...]:
    return (Command(AllKnow()),) if len(state.arrived) == len(state.job.members) else ()


def _command_all(state: JobState, message: FromCoordinator) -> JobStep:
    """Give a command to all hosts that have joined, and to this host's own run."""
    send = (Send(tuple(state.members), message),) if state.members else ()
    return state, (*send, Command(message))


EVENTS: Mapping[type, Callable[[JobState, Any, float], JobStep]] = {
    Arrived: host_arrived,
    CannotListen: cannot_listen,
    TooFewFiles: too_few_files,
    Lost: host_lost,
    Time: time_is_up,
}
MESSAGES: Mapping[type, Callable[[JobState, str, Any, float], JobStep]] = {
    Failed: host_failed,
    RanksSucceeded: ranks_succeeded,
    Stop: host_stopped,
    Succeeded: host_succeeded,
    AtRendezvous: at_rendezvous,
    NoProgressReport: progress_reported,
    StacksRequest: stacks_requested,
    HostStacks: stacks_reported,
    NoRanksHere: no_ranks,
    Cleared: host_cleared,
}
