"""Rules of the first host until all hosts have joined: who connects, and what must agree.

Pure.
"""

from __future__ import annotations

from launcher.errors import EXIT_USAGE
from launcher.events import AllJoined, Log, Time
from launcher.peers import first_missing, first_pending, messages
from launcher.peers.events import (
    CannotListen,
    Close,
    Closed,
    Connected,
    Fail,
    Full,
    HelloFrom,
    Listening,
    LookedUp,
    NoHello,
    Send,
    TooFewFiles,
)
from launcher.peers.first_state import (
    OPEN,
    SHUT,
    Member,
    P,
    State,
    Step,
    decide,
    expect_why,
    leave_if_told,
    send_all,
    when,
)
from launcher.result.causes import Result
from launcher.result.failure_text import of_lost_host
from launcher.text import flag, short

_REFUSALS = 20  # that the log shows


@when(*OPEN, on=Listening)
def _listening(state: State, event: Listening, now: float) -> Step:
    """Let hosts connect from now on."""
    pending = state.pending._replace(name_leads_here=event.name_leads_here)
    return state._replace(pending=pending), ()


@when(P.JOINING, P.CANCELLING, on=CannotListen, to=(P.LEFT,))
def _cannot_listen(state: State, event: CannotListen, now: float) -> Step:
    """Try again for 3 s if another program has the port; then end this launcher with 2."""
    # Give the other hosts time to find out that something else listens there.
    if event.taken and now < state.pending.listen_by:
        return _retry(state, now), ()
    text = (
        f"{state.job.current_host} cannot listen on port {state.job.port} for the launchers of the "
        f"other hosts ({event.why}); choose another with {flag('peer_port')}, the same one on "
        "every host."
    )
    return state._replace(phase=P.LEFT), (Fail(text, EXIT_USAGE),)


@when(P.CANCELLED, on=CannotListen)
def _listen_later(state: State, event: CannotListen, now: float) -> Step:
    """Try again in a second, to tell hosts that connect the result."""
    return _retry(state, now), ()


def _retry(state: State, now: float) -> State:
    return state._replace(pending=first_pending.retry(state.pending, now))


@when(P.JOINING, on=TooFewFiles, to=(P.CANCELLED,))
@when(P.CANCELLING, on=TooFewFiles, to=(P.CANCELLED, P.LEFT))
def _too_few_files(state: State, event: TooFewFiles, now: float) -> Step:
    """End all hosts: this one cannot hold a connection to each."""
    text = (
        f"launcher: {state.job.current_host} can have {event.files} files open (ulimit -n), but "
        f"the connections of {len(state.job.hosts)} hosts need {event.needs}; raise that limit, or "
        f"do without these connections with {flag('peers')} false.\n"
    )
    return decide(state, Result(EXIT_USAGE, text))


@when(*OPEN, on=Connected)
def _connected(state: State, event: Connected, now: float) -> Step:
    """Give the connection 4 s to say hello."""
    return state._replace(pending=first_pending.connected(state.pending, event, now)), ()


@when(*SHUT, on=Connected)
def _too_late(state: State, event: Connected, now: float) -> Step:
    """Close the connection: all hosts have joined."""
    return state, (Close(event.conn, "all have joined"),)


@when(*OPEN, on=Full)
def _full(state: State, event: Full, now: float) -> Step:
    """Accept nothing for 0.05 s, then tell the pending connections to try again later."""
    return state._replace(pending=first_pending.pause(state.pending, now)), ()


@when(*OPEN, on=Closed)
def _forget(state: State, event: Closed, now: float) -> Step:
    """Forget the pending connection."""
    return state._replace(pending=first_pending.without(state.pending, event.conn)), ()


@when(*OPEN, on=NoHello)
def _turn_away(state: State, event: NoHello, now: float) -> Step:
    """Close the connection: it is not from a host of this job."""
    pending = first_pending.without(state.pending, event.conn)
    return state._replace(pending=pending), (Close(event.conn, "sent no valid hello"),)


@when(P.JOINING, on=HelloFrom, to=(P.CANCELLING, P.CANCELLED, P.JOINED))
@when(P.CANCELLING, on=HelloFrom, to=(P.CANCELLED, P.LEFT))
def _join(state: State, event: HelloFrom, now: float) -> Step:
    """Let a host of this job join; start once all have, end the job if they do not agree."""
    why = _why_not(state, event)
    if why:
        return _refuse(state, event, why)
    one = state.pending.connections[event.conn]
    state = state._replace(
        pending=first_pending.without(state.pending, event.conn),
        joined={**state.joined, event.host: Member(event.conn, one.address)},
        hosts={**state.hosts, event.conn: event.host},
        told=state.told | {event.host},
    )
    welcome = Send(event.conn, messages.WELCOME)
    difference = _difference(state, event)
    if difference:
        state, actions = decide(state, Result(EXIT_USAGE, difference))
        return state, (welcome, *actions)
    if not event.fingerprint:
        return expect_why(state, event.host, now), (welcome,)
    if state.phase is P.CANCELLING or len(state.joined) < len(state.job.others):
        return state, (welcome,)
    pending, closed = first_pending.shut(state.pending)
    all_joined = AllJoined(one.own_address, pending.name_leads_here)
    state = state._replace(phase=P.JOINED, pending=pending)
    return state, (welcome, send_all(state, messages.ALL_JOINED), *closed, all_joined)


@when(P.CANCELLED, on=HelloFrom, to=(P.LEFT,))
def _tell_late(state: State, event: HelloFrom, now: float) -> Step:
    """Tell a host of this job the result, and close its connection."""
    why = _why_not(state, event)
    if why:
        return _refuse(state, event, why)
    pending = first_pending.without(state.pending, event.conn)
    state = state._replace(pending=pending, told=state.told | {event.host})
    assert state.result
    sent = (messages.WELCOME, messages.result(state.result))
    actions = [Send(event.conn, message) for message in sent]
    return leave_if_told(state, *actions, Close(event.conn, "it knows the result"))


def _why_not(state: State, hello: HelloFrom) -> str:
    """Return why a host is refused, "" if it is not."""
    if hello.job != state.job.name:
        return f"this is job {state.job.name}, not {short(hello.job, 60)}"
    if hello.host not in state.job.others:
        return f"{short(hello.host, 60)} is not another host of this job"
    if hello.host in state.joined:
        return f"{hello.host} has joined already, from {state.joined[hello.host].address}"
    return ""


def _refuse(state: State, event: HelloFrom, why: str) -> Step:
    port, address = state.job.port, state.pending.connections[event.conn].address
    line = Log(f"refused a connection from {address} to port {port}: {why}.")
    pending = first_pending.without(state.pending, event.conn)
    state = state._replace(pending=pending, refused=state.refused + 1)
    actions = (Send(event.conn, {"refused": why}), Close(event.conn, "refused"))
    return state, (line, *actions) if state.refused <= _REFUSALS else actions


def _difference(state: State, hello: HelloFrom) -> str:
    """Return what must agree between that host and this one, but does not; "" if it does."""
    if not hello.fingerprint:
        return ""
    for what, value in state.job.fingerprint.items():
        theirs = hello.fingerprint.get(what)
        if theirs != value:
            return (
                f"launcher: {state.job.current_host} and {hello.host} differ in their {what}: "
                f"{short(value)} and {short(theirs)}; expected the same on every host.\n"
            )
    return ""


@when(P.JOINING, on=LookedUp)
def _looked_up(state: State, event: LookedUp, now: float) -> Step:
    """Note whether the name of a missing host resolves."""
    reminder = first_missing.answered(state.reminder, event.host, event.resolves)
    return state._replace(reminder=reminder), ()


@when(P.JOINING, on=Time, to=(P.CANCELLED,))
def _remind(state: State, event: Time, now: float) -> Step:
    """Every 30 s say who is missing; past the start timeout, end all hosts."""
    pending, actions = first_pending.tick(state.pending, now)
    state = state._replace(pending=pending)
    reminder = state.reminder
    if now < reminder.due:
        return state, actions
    absent = [host for host in state.job.hosts[1:] if host not in state.joined]
    if now >= reminder.look_up_at:
        reminder, look_up = first_missing.look_up(reminder, absent)
        actions += (look_up,)
    who = first_missing.missing(reminder, absent)
    if now >= reminder.start_by:
        how = f"did not arrive within {state.job.start_timeout} s"
        state, decided = decide(state, of_lost_host(who.words, how).result)
        return state, actions + decided
    if now >= reminder.line_at:
        reminder = first_missing.later(reminder, now)
        sent = send_all(state, messages.missing(who.resolve, who.more))
        actions += (sent, Log(f"waiting for {who.words}."))
    return state._replace(reminder=reminder), actions
