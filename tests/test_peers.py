"""What the hosts of a job agree on: the state machines of the coordinator and of a member.

Both are driven by events, and need no sockets: those are in test_transport.py.
"""

import json
import math

import pytest
from jobs import job_of

from launcher.peers import coordinator, member
from launcher.peers.connection import LINE_LIMIT
from launcher.peers.events import (
    Admit,
    AllKnow,
    Arrived,
    CannotListen,
    Command,
    Connect,
    Connected,
    Disconnect,
    EndListening,
    Listen,
    Lost,
    Received,
    Refuse,
    Report,
    Send,
    Time,
    TooFewFiles,
    Unreachable,
)
from launcher.peers.messages import (
    Alive,
    AllStacks,
    AtRendezvous,
    Cleared,
    CollectStacks,
    End,
    Failed,
    HostStacks,
    Later,
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
    from_coordinator,
    from_member,
    from_stranger,
    hello,
    to_wire,
)
from launcher.result.causes import LIMIT, Cause, Failure, Result
from launcher.text.protocol import decoded, encoded
from launcher.text.words import Log
from launcher.watch.progress import Group, StalledRank

HOSTS = FIRST, SECOND, THIRD = ("algo-1", "algo-2", "algo-3")
SAME = {"version of torch": "2.13", "script": "script train.py"}
STOPPED = Result(143, "", 15)
ALL_KNOW = Command(AllKnow())
DIED = "its launcher died"


def job(host, hosts=HOSTS, **more):
    values = {"start_timeout": 100, "peer_port": 29401, "fingerprint": SAME}
    return job_of(host, hosts, **{**values, **more})


def failed(text="loss is nan\n", attempt=1, code=1, cause=Cause.OWN, may_restart=True):
    return Failed(attempt, Failure(cause, code, text, may_restart))


CANNOT = failed("algo-3: no such file\n", attempt=0, code=2, may_restart=False)


class Host:
    """A state machine whose other hosts are played by the test; times are in seconds."""

    def __init__(self, host, hosts=HOSTS, **more):
        self.job = job(host, hosts, **more)
        self.machine = coordinator if host == hosts[0] else member
        self.state, self.began = self.machine.begin(self.job, 0)

    def step(self, event, now=0):
        self.state, actions = self.machine.step(self.state, event, now)
        return actions

    def hears(self, host, message, now=0):
        """Hear what a host says, which may be this one."""
        return self.step(Received(host, message), now)

    def hears_hello(self, host, now=0, **more):
        said = hello(job(host, **{"hosts": self.job.cluster.hosts, **more}))
        return self.step(Arrived(7, "10.0.0.2", said), now)

    def waits_until(self, due):
        """Return what is done at a time, before which nothing was due."""
        assert self.due == pytest.approx(due)
        assert self.step(Time(), due - 0.01) == ()
        return self.step(Time(), self.due)

    @property
    def due(self):
        return self.machine.due(self.state)


def ready(**more):
    """Return a coordinator that all hosts have joined."""
    first = Host(FIRST, **more)
    for host in HOSTS[1:]:
        first.hears_hello(host)
    assert first.state.phase == coordinator.JobRunning()
    return first


@pytest.fixture
def first():
    return Host(FIRST)


@pytest.fixture
def second():
    return Host(SECOND)


def joins(host):
    return (Admit(7, host), Send((host,), Welcome()))


def everywhere(message, *others):
    return (Send(others or HOSTS[1:], message), Command(message))


def lost(host, how="was lost: its launcher died"):
    return Result(69, f"{host} {how}\nexit code 69\n")


# The coordinator, until all have joined.


def test_all_start_when_the_last_has_joined(first):
    assert first.began == (Listen(),)
    assert first.hears_hello(THIRD, 20) == joins(THIRD)
    assert isinstance(first.state.phase, coordinator.JobJoining)
    start = everywhere(Start(1), THIRD, SECOND)
    assert first.hears_hello(SECOND, 21) == (*joins(SECOND), *start, EndListening())
    assert first.state.phase == coordinator.JobRunning() and first.due == math.inf


def test_who_is_missing_is_said_every_30_seconds_until_the_start_time_out(first):
    first.hears_hello(SECOND, 1)
    for now in (30, 60, 90):
        line, missing = first.waits_until(now)
        assert line == Log("waiting for algo-3.")
        assert missing == Send((SECOND,), Missing((THIRD,), 0))
    end = End(lost(THIRD, "did not join within 100 s"))
    assert first.waits_until(100) == everywhere(end, SECOND)
    assert first.state.phase == coordinator.JobEnded(end.result) and first.due == math.inf


def test_many_missing_hosts_with_long_names_are_counted():
    first = Host(FIRST, (FIRST, *(f"host-{number:04}-{'x' * 240}" for number in range(1998))))
    (tell,) = first.step(Time(), 100)
    text = tell.message.result.text
    assert text.startswith("host-0000-x") and len(text) <= LIMIT
    assert " and 1996 more did not join within 100 s\n" in text


LONG = ["x" * 2500] * 100  # SageMaker takes so many hyperparameters of that length


@pytest.mark.parametrize(
    ("ours", "theirs", "hosts", "differ"),
    [
        (SAME, {**SAME, "script": "x"}, HOSTS, "script: 'script train.py' and 'x'"),
        (SAME, {"script": "script train.py"}, HOSTS, "version of torch: '2.13' and None"),
        (SAME, SAME, HOSTS[::2], "list of hosts: ['algo-1', 'algo-2', 'algo-3'] and ['algo-1', "),
        ({"words": LONG}, {"words": [*LONG, "y"]}, HOSTS, "words: '[\"xxx"),
    ],
)
def test_all_end_if_what_must_agree_differs(ours, theirs, hosts, differ):
    first = Host(FIRST, fingerprint=ours)
    first.hears_hello(SECOND, fingerprint=ours)
    *joined, _, tell, all_know = first.hears_hello(THIRD, fingerprint=theirs, hosts=hosts)
    assert (*joined, all_know) == (*joins(THIRD), ALL_KNOW)
    code, text, _ = tell.message.result
    assert code == 2 and len(text) < 600
    assert text.startswith(f"launcher: algo-1 and algo-3 differ in their {differ}")
    assert text.endswith("; expected the same on every host.\n")
    assert len(encoded(to_wire(hello(job(THIRD, fingerprint=theirs))))) < LINE_LIMIT


@pytest.mark.parametrize(
    ("host", "name", "told", "why"),
    [
        (THIRD, "another", "ANOTHER_JOB", "this is job job, not 'another'"),
        ("algo-9\x1b\n", "job", "NO_HOST", r"'algo-9\x1b\n' is not one of this job's other hosts"),
        (FIRST, "job", "NO_HOST", "'algo-1' is not one of this job's other hosts"),
        (SECOND, "job", "HAS_JOINED", "algo-2 has already joined, from 10.0.0.2"),
    ],
)
def test_a_host_that_is_not_waited_for_is_refused_and_told_no_name(first, host, name, told, why):
    first.hears_hello(SECOND)
    refuse = Refuse(7, Refused(Refusal[told]))
    assert "algo" not in str(wire(refuse.message)) and "job job" not in refuse.message.why.value
    line = Log(f"refused a connection from 10.0.0.2 to port 29401: {why}.")
    for number in range(30):  # the log shows 20 of them
        actions = (line, refuse) if number < 20 else (refuse,)
        assert first.hears_hello(host, name=name) == actions
    assert first.hears_hello(THIRD)[-1] == EndListening()
    first.step(Lost(THIRD, DIED))
    assert first.hears_hello(THIRD)[-1] == Refuse(7, Refused(Refusal.ALL_HAVE_JOINED))


def test_a_host_that_cannot_start_is_awaited_with_its_reason(first):
    first.hears_hello(SECOND)
    assert first.hears_hello(THIRD, 10, fingerprint={}) == joins(THIRD)
    silent = End(Result(2, "algo-3 cannot start, and did not report why\n"))
    assert coordinator.step(first.state, Time(), 13)[1][1] == Command(silent)
    assert first.hears(THIRD, CANNOT, 10) == ()
    end = End(Result(2, CANNOT.failure.text))
    assert first.waits_until(10.3) == (*everywhere(end), ALL_KNOW)


def test_hosts_that_come_late_learn_why_the_coordinator_cannot_start():
    first = Host(FIRST, fingerprint={})
    assert first.began == (Listen(),)
    first.hears(FIRST, CANNOT)
    end = End(Result(2, CANNOT.failure.text))
    assert first.waits_until(0.3) == (Command(end),)
    told = (Send((SECOND,), end), Disconnect(SECOND))
    assert first.hears_hello(SECOND, 1) == (*joins(SECOND), *told)
    told = (Send((THIRD,), end), Disconnect(THIRD), ALL_KNOW)
    assert first.hears_hello(THIRD, 2) == (*joins(THIRD), *told)


@pytest.mark.parametrize(
    ("event", "text", "more"),
    [
        (TooFewFiles(200, 323), "the connections of 3 hosts need 323; raise that limit, ", ()),
        (CannotListen("in use"), "the other hosts (in use); choose another ", (ALL_KNOW,)),
    ],
)
def test_a_coordinator_without_room_or_port_ends_the_job(first, event, text, more):
    tell, *others = first.step(event)
    assert tuple(others) == more  # hosts that come later can be told, if they can come
    assert tell.message.result.exit_code == 2 and text in tell.message.result.text
    assert first.step(event) == ()


def test_a_stop_before_all_have_joined_is_told_to_those_that_come(first):
    first.hears_hello(SECOND)
    assert first.hears(SECOND, Stop(15)) == everywhere(End(STOPPED), SECOND)
    first.step(Lost(SECOND, DIED))  # it knows
    assert first.hears_hello(THIRD)[2:] == (
        Send((THIRD,), End(STOPPED)),
        Disconnect(THIRD),
        ALL_KNOW,
    )


@pytest.mark.parametrize(
    ("event", "at", "result"),
    [
        (Lost(SECOND, DIED), 10.5, lost(SECOND)),
        # There is nothing to restart, whatever it says: who knows the job's name can say this.
        (Received(SECOND, failed(attempt=0)), 10.3, Result(1, "loss is nan\n")),
    ],
)
def test_a_host_that_is_lost_or_fails_before_all_have_joined_ends_the_job(event, at, result):
    first = Host(FIRST, max_restarts=1)
    first.hears_hello(SECOND)
    first.step(event, 10)
    assert first.waits_until(at)[-1] == Command(End(result))


def test_a_failure_that_crosses_the_start_counts():
    first = ready()
    first.hears(SECOND, CANNOT, 1)
    assert first.waits_until(1.3)[1] == Command(End(Result(2, "algo-3: no such file\n")))


# The coordinator of a job that runs: how it ends.

SUCCESS, NAN, KILLED = Result(0), Result(1, "loss is nan\n"), Result(134, "killed\n")
STOP, SURVIVORS = Stop(15), Cleared(1, 2)
LOST = "algo-3, GPU 3 (GPU-5a) has uncorrectable ECC errors"
NOT_AGAIN = f"no restart: {LOST}; SageMaker checks and replaces the hosts of a failed job\n"
GPU_LOST = failed("x: GPU is lost\nexit code 7\n", code=7)
GPU_LOST = GPU_LOST._replace(failure=GPU_LOST.failure._replace(broken=LOST))
GPU_FAILS = (10, THIRD, GPU_LOST)
ON_BROKEN = Result(7, f"x: GPU is lost\n{NOT_AGAIN}exit code 7\n")
NAN_ON_BROKEN = Result(1, f"loss is nan\n{NOT_AGAIN}")
ABORTED = failed("killed\n", code=134, cause=Cause.ABORTED, may_restart=False)
SECONDARY = failed("connection reset\n", cause=Cause.SECONDARY, may_restart=False)
TORCHRUN = failed("torchrun failed\n", code=69, cause=Cause.TORCHRUN, may_restart=False)
LATER, NO_WORDS = failed("later\n", may_restart=False), failed(" \n", code=0)
ALL_SUCCEED = [(10, host, Succeeded(1)) for host in (FIRST, THIRD, FIRST, SECOND)]
THREE = [(10, host, failed("loss is nan\nexit code 1\n")) for host in HOSTS]
COUNTED = "loss is nan\nexit code 1; first of 3 failures (not counting ranks that were stopped)\n"
FAILS = (10, SECOND, failed())

# Name: restarts; the seconds, the host, what it says or why it is lost; when all end, and how.
ENDS = {
    "all succeed": (0, ALL_SUCCEED, 10, SUCCESS),
    "a stop of the first": (0, [(10, FIRST, STOP)], 10, STOPPED),
    "a stop of another": (0, [(10, SECOND, STOP)], 10, STOPPED),
    "a host is lost": (0, [(10, THIRD, DIED)], 10.5, lost(THIRD)),
    # The first of the best cause, for which it waits.
    "a failure, and another": (0, [FAILS, (10.1, THIRD, LATER)], 10.3, NAN),
    "three failures": (0, THREE, 10.3, Result(1, COUNTED)),
    "a failure without words": (0, [(10, SECOND, NO_WORDS)], 10.3, Result(1, "algo-2 failed\n")),
    "torchrun fails": (0, [(10, SECOND, TORCHRUN)], 11, TORCHRUN.failure.result),
    "an abort, a worse cause": (0, [(10, SECOND, ABORTED), (12, THIRD, SECONDARY)], 13, KILLED),
    "a better cause": (0, [(10, SECOND, SECONDARY), (11, THIRD, ABORTED)], 13, KILLED),
    "the best cause": (0, [(9, SECOND, SECONDARY), (9.5, THIRD, TORCHRUN), FAILS], 10.3, NAN),
    "a secondary failure": (0, [(10, SECOND, SECONDARY)], 13, SECONDARY.failure.result),
    "a failure and a loss": (0, [FAILS, (10.2, THIRD, DIED)], 10.3, NAN),
    # Stops.
    "a stop after a failure": (0, [FAILS, (10.2, THIRD, STOP)], 10.3, NAN),
    "a stop, restarts left": (1, [FAILS, (10.2, THIRD, STOP)], 10.2, STOPPED),
    "a stop after a loss": (1, [(10, SECOND, DIED), (10.2, THIRD, STOP)], 10.5, lost(SECOND)),
    # Restarts that do not come about.
    "a stop, restarting": (1, [FAILS, (20, THIRD, STOP)], 20, STOPPED),
    "a loss, restarting": (1, [FAILS, (20, THIRD, DIED)], 20, lost(THIRD)),
    "torchrun fails, restarting": (1, [FAILS, (20, THIRD, TORCHRUN)], 20, NAN),
    "survivors": (1, [FAILS, (20, THIRD, SURVIVORS)], 20, NAN),
    # Nor where hardware broke, by what any rank or any driver says.
    "a broken GPU": (1, [FAILS, (20, THIRD, Cleared(1, 0, LOST))], 20, NAN_ON_BROKEN),
    "and survivors": (1, [FAILS, (20, THIRD, Cleared(1, 1, LOST))], 20, NAN_ON_BROKEN),
    "a rank's GPU": (1, [GPU_FAILS], 10.3, ON_BROKEN),
    "another's GPU": (1, [FAILS, (10.2, *GPU_FAILS[1:])], 10.3, NAN_ON_BROKEN),
    "a stop after that": (1, [GPU_FAILS, (10.1, FIRST, STOP)], 10.3, ON_BROKEN),
    "a GPU, and no restart left": (0, [GPU_FAILS], 10.3, GPU_LOST.failure.result),
    "torchrun fails, too": (1, [FAILS, (10.2, THIRD, TORCHRUN)], 10.3, NAN),
    "torchrun fails first": (1, [(9.9, THIRD, TORCHRUN), FAILS], 10.3, NAN),
    "a loss, too": (1, [FAILS, (10.2, THIRD, DIED)], 10.3, NAN),
}


@pytest.mark.parametrize(("restarts", "events", "at", "result"), ENDS.values(), ids=ENDS)
def test_how_a_job_ends(restarts, events, at, result):
    first, told = ready(max_restarts=restarts), []

    def do(now, event):
        for action in first.step(event, now):
            if isinstance(action, (Send, Command)) and isinstance(action.message, (End, AllKnow)):
                told.append((pytest.approx(now), action))

    for now, host, what in [*events, (math.inf, "", "")]:
        while first.due < now:
            do(first.due, Time())
        if host:
            do(now, Lost(host, what) if isinstance(what, str) else Received(host, what))
    here = [host for host in HOSTS[1:] if (host, DIED) not in [event[1:] for event in events]]
    assert told == [(at, action) for action in (*everywhere(End(result), *here), ALL_KNOW)]
    for message in (failed(), Stop(2), Succeeded(1), Cleared(1, 0)):
        assert first.hears(FIRST, message, 99) == ()
    assert first.step(Lost(SECOND, DIED), 99) == ()
    assert first.state.phase == coordinator.JobEnded(result) and first.due == math.inf


def restarts(first, at, attempt, now):
    first.hears(SECOND, failed(attempt=attempt), now - 0.3)
    line = f"attempt {attempt} of 4 failed after {at}; restarting all ranks."
    assert first.waits_until(now) == everywhere(Restart(attempt, line))
    assert first.due == now + 100  # the start time-out
    assert first.hears(THIRD, failed("of this restart\n", attempt=attempt), now) == ()
    for host in (FIRST, SECOND, FIRST):
        assert first.hears(host, NoRanksHere(attempt), now) == ()
        assert first.hears(host, Cleared(attempt, 0), now) == ()
        assert first.hears(THIRD, Cleared(attempt - 1, 0), now) == ()
    assert first.hears(THIRD, Cleared(attempt, 0), now) == everywhere(Start(attempt + 1))
    assert not first.state.no_ranks
    for message in (failed(attempt=attempt), Succeeded(attempt), NoRanksHere(attempt)):
        assert first.hears(SECOND, message, now) == ()
    assert first.due == now + 100
    assert first.hears(SECOND, AtRendezvous(attempt + 1, is_complete=True), now) == ()
    assert first.state.phase == coordinator.JobRunning()


CLOSED = "algo-2, rank 2 (local rank 0) failed with RuntimeError: Connection closed by peer"
BROKEN = failed(f"{CLOSED}\nexit code 1\n", cause=Cause.SECONDARY)
LEFT = (9, THIRD, RanksSucceeded(1, 5, (0.2,)))
# Name: what hosts say, and when; the first line then.
LEAVE = {
    "one": ([LEFT], f"{CLOSED}; algo-3, rank 5 had ended with exit code 0, 1.2 s earlier"),
    "more": (
        [
            LEFT,
            (9.5, FIRST, RanksSucceeded(1, 0, (0.1, 0.1))),
            (9.9, SECOND, RanksSucceeded(1, 3, (5.9, 2))),
        ],
        f"{CLOSED}; algo-2, rank 3 and 4 more had ended with exit code 0, the first 6.0 s earlier",
    ),
    # It is known only later, but was before; and after the failure.
    "later": (
        [(12, THIRD, RanksSucceeded(1, 5, (2.3, 1.9, 0.1)))],
        f"{CLOSED}; algo-3, rank 5 had ended with exit code 0, 0.3 s earlier",
    ),
    "after": (
        [(12, THIRD, RanksSucceeded(1, 5, (1.9,)))],
        f"{CLOSED}; algo-3, rank 5 ended with exit code 0, 0.1 s later",
    ),
    "more after": (
        [(12, THIRD, RanksSucceeded(1, 5, (1.9, 0.5))), (12, FIRST, RanksSucceeded(1, 0, (1,)))],
        f"{CLOSED}; algo-3, rank 5 and 2 more ended with exit code 0, the first 0.1 s later",
    ),
    "of another attempt": ([(9, THIRD, RanksSucceeded(2, 5, (0.0,)))], CLOSED),
    "nobody": ([], CLOSED),
}


def ended(first, at):
    """Return how a job ends that ends at a time."""
    first.waits_until(at)
    return first.state.phase.result


@pytest.mark.parametrize(("events", "line"), LEAVE.values(), ids=LEAVE)
def test_the_rank_is_named_that_had_left_when_a_connection_broke(events, line):
    first = ready()
    for now, host, message in sorted([*events, (10, SECOND, BROKEN)]):
        first.hears(host, message, now)
    assert ended(first, 13).text == f"{line}\nexit code 1\n"


def test_a_failure_that_says_when_it_was_is_compared_with_that_time():
    first = ready()
    first.hears(THIRD, LEFT[2], 9)
    first.hears(SECOND, BROKEN._replace(age=1.3), 10)
    assert "; algo-3, rank 5 ended with exit code 0, 0.1 s later\n" in ended(first, 13).text


@pytest.mark.parametrize("cause", [Cause.OWN, Cause.TORCHRUN, Cause.ABORTED])
def test_a_rank_that_has_left_is_no_reason_for_other_failures(cause):
    first = ready()
    first.hears(THIRD, LEFT[2], 9)
    first.hears(SECOND, failed(cause=cause), 10)
    assert ended(first, 10 + cause.patience) == NAN


@pytest.mark.parametrize(("words", "frames", "kept"), [(700, 4, 4), (440, 8, 7)])
def test_long_words_and_outer_frames_are_cut_for_who_had_left(words, frames, kept):
    first = ready()
    lines = [f'  File "a.py", line {number}, in {40 * "f"}' for number in range(frames)]
    long = "\n".join([f"{words * 'x'} the end", "exit code 1", "Traceback:", *lines, ""])
    assert len(long) < LIMIT
    first.hears(THIRD, LEFT[2], 9)
    first.hears(SECOND, failed(long, cause=Cause.SECONDARY), 10)
    text = ended(first, 13).text
    line, *others = text.splitlines()
    assert line.endswith("xx the end; algo-3, rank 5 had ended with exit code 0, 1.2 s earlier")
    assert len(text) < LIMIT and others == ["exit code 1", "Traceback:", *lines[frames - kept :]]


def test_a_restart_says_who_had_left_and_the_next_attempt_knows_nothing_of_it():
    first = ready(max_restarts=3)
    for attempt, again in ((1, ""), (2, "for the second time")):
        first.hears(THIRD, RanksSucceeded(attempt, 5, (attempt / 10,)), 9)
        first.hears(SECOND, BROKEN._replace(attempt=attempt), 10)
        why = first.waits_until(13)[-1].message.why
        assert "; algo-3, rank 5 had ended with exit code 0, 1." in why and again in why
        for host in HOSTS:
            first.hears(host, Cleared(attempt, 0), 14)
    first.hears(SECOND, BROKEN._replace(attempt=3), 20)
    assert "had ended" not in first.waits_until(23)[-1].message.why


RETURNED = StalledRank(5, 1, 70.0, runs_on='thread "uploader", in upload, train.py:4')
WAITS = StalledRank(0, 0, 70.0, groups=(Group("0,1", last=3, waits=3),))
RUN_ON = (
    "rank 5's script has ended, but its process is still running: "
    'thread "uploader", in upload, train.py:4.'
)


@pytest.mark.parametrize("other", ["waits", "has ended", "trains", "says nothing"])
def test_ranks_that_run_on_end_a_job_only_if_no_other_does_anything_and_never_restart_it(other):
    first = ready(max_restarts=3, watch=5, hang_notify=60, hang_timeout=100)
    first.hears(SECOND, Succeeded(1), 50)
    first.hears(THIRD, NoProgressReport(1, (RETURNED,), 0), 100)
    if other == "has ended":
        first.hears(FIRST, Succeeded(1), 100)
    elif other != "says nothing":
        first.hears(FIRST, NoProgressReport(1, (WAITS,), 1 if other == "trains" else 0), 100)
    assert [one.line for one in first.waits_until(101)] == [RUN_ON]
    if other in ("trains", "says nothing"):
        assert [one.line for one in first.waits_until(30 + 2 * 71)] == [RUN_ON]
        assert first.due > 200
    else:
        # After 100 s and two looks, nothing has moved; and a better cause is waited for.
        first.waits_until(30 + 100 + 2 * 5 + 3)
        assert ended(first, 143.3) == Result(
            75, f"{RUN_ON}\nexit code 75 (--launcher-hang-timeout)\n"
        )


def test_all_start_again_when_nothing_of_the_attempt_is_left_on_any_host():
    first = ready(max_restarts=3)
    first.hears(THIRD, Succeeded(1), 1)
    restarts(first, "38 s: loss is nan", 1, 38)
    restarts(first, "4.0 s: loss is nan (for the second time)", 2, 42)
    restarts(first, "4.0 s: loss is nan (for the third time)", 3, 46)
    for host in HOSTS[:2]:
        assert first.hears(host, Succeeded(4), 47) == ()  # the third, in attempt 1, counts no more
    first.hears(THIRD, failed("of the last attempt\n", attempt=4), 70)
    assert first.waits_until(70.3)[1] == Command(End(Result(1, "of the last attempt\n")))


@pytest.mark.parametrize(
    "line",
    [
        "was killed by SIGABRT (signal 6); see that rank's last lines on stderr, at "
        "12:{:02}:56 UTC",
        'ended with exit code 4 (thread "pin" raised ValueError: bad file, {}.5 s earlier)',
    ],
)
def test_times_within_a_line_do_not_make_another_failure_of_it(line):
    first = ready(max_restarts=3)
    for attempt, again in ((1, False), (2, True)):
        first.hears(SECOND, failed(f"{line.format(attempt)}\n", attempt), 10 * attempt)
        (_, said) = first.waits_until(10 * attempt + 0.3)
        assert (" (for the second time)" in said.message.why) is again
        assert line.format(attempt) in said.message.why
        for host in HOSTS:
            first.hears(host, Cleared(attempt, 0), 10 * attempt + 1)


@pytest.mark.parametrize(
    ("cleared", "waiting", "says"),
    [
        ((FIRST, THIRD), (), "algo-2 did not clean up attempt 1"),
        ((FIRST,), (), "algo-2, algo-3 did not clean up attempt 1"),
        (HOSTS, (FIRST, THIRD), "algo-2 did not complete the rendezvous of attempt 2"),
        (HOSTS, HOSTS, "algo-1, algo-2, algo-3 did not complete the rendezvous of attempt 2"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"start_timeout": 900, "restart_timeout": 100}])
def test_a_restart_has_a_time_out_in_all(cleared, waiting, says, given):
    """Of its own, or that of the start."""
    first = ready(max_restarts=3, **given)
    first.hears(SECOND, failed(), 10)
    first.step(Time(), 10.3)
    for host in cleared:
        first.hears(host, Cleared(1, 0), 60)
    for host in waiting:
        late = AtRendezvous(1, is_complete=True)
        assert first.hears(host, late, 70) == ()  # of the last one
        assert first.hears(host, AtRendezvous(2, is_complete=False), 70) == ()
    text = f"{says} within 100 s of the restart\nexit code 69\n"
    text += "reason for the restart: loss is nan\n"
    assert first.waits_until(110.3)[1] == Command(End(Result(69, text)))


@pytest.mark.parametrize(
    ("without_ranks", "says"), [((FIRST,), SECOND), (HOSTS, f"{FIRST}, {SECOND}")]
)
def test_a_first_host_that_waits_for_the_ranks_of_others_is_not_behind_them(without_ranks, says):
    first = ready(max_restarts=3)
    first.hears(THIRD, failed(), 10)
    first.step(Time(), 10.3)
    for host in without_ranks:
        first.hears(host, NoRanksHere(1), 20)
    first.hears(THIRD, Cleared(1, 0), 20)
    text = f"{says} did not clean up attempt 1 within 100 s of the restart\nexit code 69\n"
    text += "reason for the restart: loss is nan\n"
    assert first.waits_until(110.3)[1] == Command(End(Result(69, text)))


def test_a_launcher_that_fails_before_it_hears_of_the_next_start_ends_the_job():
    first = ready(max_restarts=3)
    first.hears(THIRD, failed(), 10)
    first.step(Time(), 10.3)
    for host in HOSTS:
        first.hears(host, Cleared(1, 0), 20)
    assert first.state.attempt == 2
    assert first.hears(THIRD, failed("too late\n"), 20.1) == ()  # a rank's, of before
    own = failed("algo-3: the launcher itself failed\n", code=70, may_restart=False)
    first.hears(THIRD, own, 20.2)
    assert first.waits_until(20.5)[1] == Command(End(Result(70, own.failure.text)))


def test_a_first_host_that_others_have_lost_at_a_restart_says_what_they_say():
    first = ready(max_restarts=3)
    first.hears(SECOND, failed(), 10)
    first.step(Time(), 10.3)
    text = "algo-1 was lost: its launcher has not answered for 60 s\nexit code 69\n"
    lost = failed(text, code=69, cause=Cause.HOST_LOST, may_restart=False)
    assert first.hears(SECOND, lost, 80)[1] == Command(End(Result(69, text)))


def test_stacks_are_of_the_ranks_that_run_now():
    first = ready(max_restarts=3)
    assert first.hears(SECOND, StacksRequest(), 37) == everywhere(CollectStacks(1, True))
    first.hears(SECOND, failed(), 37.5)
    first.step(Time(), 38)
    for host in HOSTS:
        first.hears(host, Cleared(1, 0), 38)
    assert first.hears(THIRD, StacksRequest(), 38.5) == everywhere(CollectStacks(2, True))
    for host in HOSTS:
        assert first.hears(host, HostStacks(1, (((0,), "  of attempt 1"),)), 38.6) == ()
    for host in (FIRST, SECOND):
        assert first.hears(host, HostStacks(2, ()), 39) == ()
    told = first.hears(THIRD, HostStacks(2, (((0,), "  here"),)), 39)
    assert told == (Send((THIRD,), AllStacks(("rank 0:", "  here"))),)


@pytest.mark.parametrize(("timeout", "may_signal"), [(math.inf, False), (600.0, True)])
def test_for_the_log_ranks_get_no_signal_unless_their_wait_ends_the_job(timeout, may_signal):
    """A signal ends some of C's calls early, which a healthy job may take for an error."""
    first = ready(hang_timeout=timeout, watch=15)
    waits = Group("0-2", last=9, waits=9, op="all_reduce")
    for number, host in enumerate(HOSTS):
        groups = (waits if number else waits._replace(last=8, waits=0),)
        first.hears(host, NoProgressReport(1, (StalledRank(number, 0, 70.0, groups=groups),)), 100)
    line, *asks = first.waits_until(101)
    assert "no progress for 71 s" in line.line
    assert tuple(asks) == everywhere(CollectStacks(1, may_signal))


def test_no_ranks_are_left_when_the_last_host_that_is_here_has_none():
    first = ready()
    first.hears(SECOND, Stop(15))
    for host, attempt in ((FIRST, 1), (THIRD, 0), (SECOND, 1)):
        assert first.hears(host, NoRanksHere(attempt)) == ()
    assert first.step(Lost(THIRD, DIED)) == everywhere(NoRanksAnywhere(1), SECOND)


def test_a_host_alone_coordinates_itself():
    alone = Host(FIRST, (FIRST,), max_restarts=1)
    assert alone.began == (Command(Start(1)),)
    alone.hears(FIRST, failed(), 9.7)
    line = "attempt 1 of 2 failed after 10 s: loss is nan; restarting all ranks."
    assert alone.waits_until(10) == (Command(Restart(1, line)),)
    assert alone.hears(FIRST, NoRanksHere(1), 11) == (Command(NoRanksAnywhere(1)),)
    assert alone.hears(FIRST, Cleared(1, 0), 12) == (Command(Start(2)),)
    assert alone.hears(FIRST, Succeeded(2), 13) == (Command(End(Result(0))), ALL_KNOW)


# A member.

GREETS = Report(hello(job(SECOND)))  # first, when it has connected


def test_a_member_tries_again_and_again_until_the_start_time_out(second):
    waits = [action.seconds for action in second.began]
    for now in (0.01, 0.1, 0.8, 4, 8, 29):
        assert second.due == 30
        waits += [
            action.seconds for action in second.step(Unreachable("nothing is listening there"), now)
        ]
    assert waits == [0, 0.02, 0.02, 0.1, 0.5, 1, 1]
    for now in (30, 60, 90):
        line = Log("waiting for algo-1 (nothing is listening there).")
        assert second.waits_until(now) == (line,)
    text = "algo-1 could not be reached within 100 s (nothing is listening there)\nexit code 69\n"
    assert second.waits_until(100) == (Command(End(Result(69, text))), ALL_KNOW)


def test_a_member_joins_and_follows_the_coordinator(second):
    assert second.step(Connected(), 1) == (GREETS,)
    assert second.hears(FIRST, Welcome(), 1) == ()
    assert second.due == math.inf
    missing = second.hears(FIRST, Missing((THIRD,), 1))
    assert missing == (Log("waiting for algo-3 and 1 more."),)
    for message in (Start(1), Restart(1, "why"), Start(2), NoRanksAnywhere(2)):
        assert second.hears(FIRST, message) == (Command(message),)
    for message in (failed(attempt=2), NoRanksHere(2), Stop(15)):
        assert second.hears(SECOND, message) == (Report(message),)
    end = End(Result(1, "loss is nan\n"))
    assert second.hears(FIRST, end) == (Command(end), ALL_KNOW)
    assert second.hears(FIRST, end) == second.step(Lost(FIRST, DIED)) == ()
    # Its torchrun may keep the store, and be allowed to end.
    assert second.hears(SECOND, NoRanksHere(2)) == (Report(NoRanksHere(2)),)
    assert second.hears(FIRST, NoRanksAnywhere(2)) == (Command(NoRanksAnywhere(2)),)


ANSWERS = "launcher: the program that answers on port 29401 of algo-1 "
NO_LAUNCHER = "is not this job's launcher; choose another with --launcher-peer-port"
LISTENS = "launcher: the program that listens on port 29401 of algo-1 "
SILENT = f"{LISTENS}has not answered as a launcher in %s: it is not this job's launcher, or that "
GARBAGE = Lost(FIRST, "it sent an invalid message")
REFUSED = "launcher: the launcher of algo-1 refused algo-2: it runs another job.\n"


@pytest.mark.parametrize(
    ("said", "event", "code", "text"),
    [
        ([Welcome(), Start(1)], Lost(FIRST, DIED), 69, lost(FIRST).text),
        ([Welcome()], Lost(FIRST, DIED), 69, lost(FIRST).text),
        ([], GARBAGE, 69, ANSWERS + NO_LAUNCHER),
        ([], None, 69, SILENT % "10 s"),
        ([], Lost(FIRST, "it stopped answering"), 69, "algo-1 was lost: it stopped answering"),
        ([], Received(FIRST, Refused(Refusal.ANOTHER_JOB)), 2, REFUSED),
    ],
)
def test_a_member_that_cannot_talk_to_the_coordinator_ends(second, said, event, code, text):
    second.step(Connected(), 1)
    for message in said:
        second.hears(FIRST, message)
    *more, end, all_know = second.step(event) if event else second.waits_until(11)
    if Welcome() in said:  # in case the coordinator was only stopped
        attempt = 1 if Start(1) in said else 0
        assert more == [Report(Failed(attempt, Failure(Cause.HOST_LOST, 69, text)))]
    assert end.message.result.exit_code == code and text in end.message.result.text
    assert all_know == ALL_KNOW


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            Unreachable("nothing is listening there"),
            "algo-1 was lost: it closed the connection before it answered, and now nothing is "
            "listening there\n",
        ),
        (Lost(FIRST, DIED), f"{LISTENS}closes connections without answering: it {NO_LAUNCHER}"),
        (GARBAGE, ANSWERS + NO_LAUNCHER),
    ],
)
def test_a_member_that_was_disconnected_tries_once_more_to_tell_why(second, event, text):
    """A launcher that has ended listens no more; another program takes the next one, too."""
    second.step(Connected(), 1)
    assert second.step(Lost(FIRST, DIED), 1.1) == (Connect(1),)
    if isinstance(event, Lost):
        assert second.step(Connected(), 2.1) == (GREETS,)
    end, all_know = second.step(event, 2.2)
    assert end.message.result.exit_code == 69 and text in end.message.result.text
    assert all_know == ALL_KNOW


def test_a_member_that_was_disconnected_late_names_what_was_silent(second):
    second.step(Connected(), 1)
    end, _ = second.step(Lost(FIRST, DIED), 4.7)
    assert SILENT % "3.7 s" in end.message.result.text


def test_a_member_that_was_disconnected_joins_if_it_is_welcome_then(second):
    second.step(Connected(), 1)
    second.step(Lost(FIRST, DIED), 1.1)
    assert second.step(Connected(), 2) == (GREETS,)
    second.hears(FIRST, Later(), 2)
    assert second.step(Unreachable("nothing is listening there"), 3) == (Connect(0.375),)
    second.step(Connected(), 4)
    assert second.hears(FIRST, Welcome(), 4) == () and second.due == math.inf


def test_a_member_does_not_believe_a_success_of_the_job_that_it_did_not_have(second):
    second.step(Connected())
    success = End(Result(0))
    for message in (Welcome(), Start(1)):
        second.hears(FIRST, message)
        assert second.hears(FIRST, success) == ()
    second.hears(SECOND, Succeeded(1))
    second.hears(FIRST, Restart(1, "why"))
    second.hears(FIRST, Start(2))
    assert second.hears(FIRST, success) == ()  # its ranks were started again
    assert second.hears(SECOND, Succeeded(2)) == (Report(Succeeded(2)),)
    assert second.hears(FIRST, success) == (Command(success), ALL_KNOW)


def test_a_member_for_which_there_is_no_room_comes_again_with_all_it_has_to_say(second):
    assert second.hears(SECOND, CANNOT) == ()
    assert second.step(Connected()) == (GREETS, Report(CANNOT))
    assert second.hears(FIRST, Later()) == (Disconnect(FIRST), Connect(1))
    (line,) = second.waits_until(30)
    assert line == Log("waiting for algo-1 (it cannot take more connections now).")
    assert second.step(Connected()) == (GREETS, Report(CANNOT))
    assert second.hears(FIRST, Welcome()) == ()


@pytest.mark.parametrize("connected", [True, False])
def test_a_stop_before_a_member_is_welcome_is_decided_by_itself(second, connected):
    if connected:
        second.step(Connected())
    say = (Report(Stop(15)),) if connected else ()
    assert second.hears(SECOND, Stop(15)) == (*say, Command(End(STOPPED)))
    if not connected:
        assert second.step(Connected()) == (GREETS, Report(Stop(15)))
    assert second.hears(FIRST, Welcome()) == (ALL_KNOW,)


def test_a_stop_after_a_failure_before_a_member_is_welcome_decides_nothing(second):
    second.hears(SECOND, CANNOT)
    assert second.hears(SECOND, Stop(15)) == ()
    assert second.step(Connected()) == (GREETS, Report(CANNOT), Report(Stop(15)))


@pytest.mark.parametrize("event", [object(), Received(FIRST, object())])
@pytest.mark.parametrize(
    ("host", "step"), [(FIRST, coordinator.step), (SECOND, member.step)], ids=["first", "second"]
)
def test_an_event_that_is_not_known_is_a_line_in_the_log_and_changes_nothing(host, step, event):
    known = Host(host).state
    state, (line,) = step(known, event, 0)  # which is not checked: no row has it
    assert state == known and line.line.endswith(" does not know object.")


# Messages.


def wire(message):
    return decoded(encoded(to_wire(message)).rstrip())


def heard(message):
    return from_coordinator(message, HOSTS)


def test_messages_arrive_as_they_were_sent():
    said = hello(job(SECOND, fingerprint={**SAME, "words": ["a", "b"]}))
    assert from_stranger(wire(said)) == said
    members = (
        failed(code=255),
        GPU_LOST,
        Cleared(3, 0, LOST),
        Stop(2),
        Succeeded(1),
        NoRanksHere(2),
        Cleared(3, 4),
        WATCHED,
    )
    members = (*members, StacksRequest(), STACKS, AtRendezvous(2, is_complete=True), Alive())
    members = (*members, ENDS_WELL, failed()._replace(age=2.5))
    for message in members:
        assert from_member(wire(message)) == message
    ends = [End(Result(0)), End(STOPPED), End(Result(3, "loss is nan\nexit code 3\n"))]
    told = [Welcome(), Later(), Start(1), Restart(1, "why"), NoRanksAnywhere(2), Alive()]
    told += [
        *map(Refused, Refusal),
        CollectStacks(3, True),
        CollectStacks(4, False),
        AllStacks(("rank 0:", "  main thread:")),
    ]
    for message in (*told, *ends, Missing((THIRD,), 2)):
        assert heard(wire(message)) == message


def changed(message, *path):
    """Return a message of the wire, of which the value at a path is the last argument."""
    *path, name, value = path
    said = wire(message)
    at = said[type(message).__name__]
    for part in path:
        at = at[part]
    at[name] = value
    return said


NESTED = json.loads("[" * 900 + "]" * 900)
NUMBERS, TEXTS = (-1, 10**17, True, "1", 1.0, None), ("", " \n", None, 7, ["x"])
WATCHED = NoProgressReport(
    1, (StalledRank(5, 1, 30.5, "", "f, a.py:3", (Group("0-7", 1, "dp", 9, 8, "x", "y"),)),)
)
SECONDS = [-1, "1", None, math.inf, math.nan]
ENDS_WELL = RanksSucceeded(1, 5, (2.5, 0.0))
STACKS = HostStacks(3, (((0, 1), "  main thread:\n    x"),))
HELLO, MISSING, END = hello(job(SECOND)), Missing((THIRD,), 0), End(Result(3, "x\n"))
# How it is read, a valid message, and values that are not valid at a path in it.
INVALID = [
    *((from_stranger, HELLO, name, [7, None, NESTED]) for name in ("job", "host", "fingerprint")),
    (from_stranger, HELLO, "fingerprint", "a", [7, {}, NESTED, [["a"]]]),
    (from_member, Stop(15), "number", [0, 9, 64, *NUMBERS]),
    *((from_member, one, "attempt", NUMBERS) for one in (failed(), Succeeded(1), NoRanksHere(1))),
    (from_member, AtRendezvous(1, is_complete=True), "attempt", NUMBERS),
    *((from_member, Cleared(1, 0), name, NUMBERS) for name in ("attempt", "survivors")),
    (from_member, Cleared(1, 0), "broken", [7, None, NESTED]),
    (from_member, failed(), "failure", "broken", [7, None, NESTED]),
    (from_member, failed(), "failure", "cause", [-1, 0, False, "own", "", None, []]),
    (from_member, failed(), "failure", "exit_code", [0, 256, *NUMBERS]),
    (from_member, failed(), "failure", "text", TEXTS),
    *((from_member, WATCHED, "ranks", 0, name, NUMBERS) for name in ("rank", "local_rank")),
    (from_member, WATCHED, "ranks", 0, "unchanged", SECONDS),
    (from_member, WATCHED, "ranks", 0, "groups", [1, [1], [["0-x", 0, "", 0, 0, "", ""]], [[0]]]),
    (from_member, WATCHED, "ranks", [1, [1], [{}]]),
    (from_member, WATCHED, "ranks", 0, "runs_on", [1, None]),
    (from_member, WATCHED, "others", NUMBERS),
    (from_member, failed(), "age", SECONDS),
    (from_member, ENDS_WELL, "ages", [1, [], ["1"], [-1], [math.nan], [1.0] * 1001]),
    (from_member, ENDS_WELL, "rank", NUMBERS),
    (from_member, ENDS_WELL, "attempt", NUMBERS),
    (from_member, STACKS, "number", NUMBERS),
    (from_member, STACKS, "ranks", [1, [1], [[1]], [[[1], 7]], [[["1"], "x"]], [[[], "x"]]]),
    (heard, CollectStacks(3, True), "number", NUMBERS),
    (heard, CollectStacks(3, True), "may_signal", [0, 1, "", None]),
    (heard, AllStacks(("x",)), "lines", [1, [1], None]),
    *(
        (heard, one, "attempt", NUMBERS)
        for one in (Start(1), NoRanksAnywhere(1), Restart(1, "why"))
    ),
    (heard, Restart(1, "why"), "why", [7, None]),
    (heard, Refused(Refusal.NO_HOST), "why", ["", "this is job a", "name", 7, None, NESTED]),
    (heard, END, "result", "exit_code", [256, *NUMBERS]),
    (heard, END, "result", "stop_signal", [9, *NUMBERS]),
    (heard, END, "result", "text", TEXTS),
    (heard, MISSING, "hosts", [1, [], [["a"]], ["algo-9"], [7], [THIRD] * 9]),
    (heard, MISSING, "more", [3, *NUMBERS]),
]
OTHERS = {
    from_stranger: [{}, {"Hello": 1}, {"Hello": {}}, wire(Stop(15))],
    from_member: [{}, {"Stop": 15}, {"Stop": {}}, {"Dance": {}}, wire(Start(1)), wire(HELLO)],
    heard: [{}, {"End": 1}, {"End": {}}, {"Dance": {}}, wire(Stop(15)), wire(HELLO)],
}


@pytest.mark.parametrize(
    ("read", "message"),
    [(read, changed(*path, value)) for read, *path, values in INVALID for value in values]
    + [(read, message) for read, messages in OTHERS.items() for message in messages],
)
def test_a_message_that_is_not_valid_is_refused(read, message):
    with pytest.raises(ValueError):
        read(message)


def test_texts_from_outside_are_cut_and_show_control_characters():
    text = "\nloss\x1b[31m is\rnan\u2028\x00\nlauncher: more\n" + 5000 * "x"
    read = from_member(wire(failed(text))).failure.text
    lines = read.splitlines()
    assert lines[:2] == [r"loss\x1b[31m is\rnan\u2028\x00", "launcher: more"]
    assert len(lines) == 3 and len(read) == LIMIT
    assert heard(wire(End(Result(3, text)))).result.text == read
    why = heard(wire(Restart(1, text))).why
    assert why.startswith(r"\nloss\x1b[31m is") and why.isprintable() and len(why) < LIMIT - 100
    assert from_member(wire(Cleared(1, 0, text))).broken == why
    assert from_member(wire(failed("x\n"))).failure.broken == ""
