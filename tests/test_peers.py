"""What the hosts of a job agree on: the state machines of the coordinator and of a member's link.

Both are driven by events, and need no sockets: those are in test_transport.py.
"""

import json
import math

import pytest
from jobs import job_of

from launcher.peers import coordinator, link, messages
from launcher.peers.channel import Connection
from launcher.peers.coordinator import Deciding, Running
from launcher.peers.events import Alone, Arrived, Lost, Received, Send, StoreMade, Time, Tried
from launcher.peers.messages import (
    Alive,
    Cleared,
    End,
    Leave,
    Start,
    Stop,
    Succeeded,
    Welcome,
    hello,
    to_wire,
)
from launcher.peers.sentences import NOTHING
from launcher.result.causes import LIMIT, SUCCESS, Cause, Failure, Result, of_lost_host
from launcher.text.protocol import decoded, encoded
from launcher.text.words import Log, Note
from launcher.watch.waits import (
    AllStacks,
    CollectStacks,
    Group,
    NoProgressReport,
    StacksRequest,
    StalledRank,
)

HOSTS = FIRST, SECOND, THIRD = ("algo-1", "algo-2", "algo-3")
SAME = {"version of torch": "2.13", "script": "script train.py"}
STOPPED = Result(143, "", 15)
DIED = "its launcher died"
SUCCEEDED = Succeeded(0, 0.0, are_all=True)
BOUND = 60 + 5 + 5 + 14  # of clearing: the grace, the kernel, the replies, the host timeout


def job(host, hosts=HOSTS, **more):
    values = {"start_timeout": 100, "peer_port": 29401, "fingerprint": SAME, "grace": 60}
    return job_of(host, hosts, **{**values, **more})


def failed(text="loss is nan\n", code=1, cause=Cause.OWN, may_restart=True):
    what, _, details = text.strip("\n").partition("\n")
    return Failure(cause, code, what, details=details, may_restart=may_restart)


class Host:
    """A state machine whose other hosts are played by the test; times are in seconds."""

    def __init__(self, host, hosts=HOSTS, **more):
        self.job = job(host, hosts, **more)
        self.machine = coordinator if host == hosts[0] else link
        self.state = self.machine.begin(self.job, 0)
        if self.machine is coordinator:
            self.step(Arrived(hello(self.job), ""))

    def step(self, event, now=0):
        self.state, actions = self.machine.step(self.state, event, now)
        return tuple(action for action in actions if not isinstance(action, Note))

    def hears(self, host, message, now=0):
        """Hear what a host says, which may be this one."""
        return self.step(Received(host, message), now)

    def hears_hello(self, host, now=0, **more):
        said = hello(job(host, **{"hosts": self.job.cluster.hosts, **more}))
        return self.step(Arrived(said, "10.0.0.2"), now)

    def hears_all(self, message, now):
        """Hear the same from all hosts; return what the last one brings."""
        for host in self.job.cluster.hosts:
            actions = self.hears(host, message, now)
        return actions

    def clears(self, hosts, number, now=0):
        """Hear that hosts have cleared; return what the last one brings."""
        *others, last = hosts
        for host in others:
            assert self.hears(host, Cleared(number, 0), now) == ()
        return self.hears(last, Cleared(number, 0), now)

    def waits_until(self, due):
        """Return what is done at a time, before which nothing was due."""
        assert self.due == pytest.approx(due)
        assert self.step(Time(), due - 0.01) == ()
        return self.step(Time(), self.due)

    @property
    def due(self):
        return self.machine.due(self.state)

    @property
    def phase(self):
        return self.state.phase


def logged(actions):
    return [one.line for one in actions if isinstance(one, Log)]


def ready(**more):
    """Return a coordinator that all hosts have joined."""
    first = Host(FIRST, **more)
    for host in HOSTS[1:]:
        first.hears_hello(host)
    assert first.phase == Running()
    return first


@pytest.fixture
def first():
    return Host(FIRST)


@pytest.fixture
def second():
    return Host(SECOND)


def everywhere(message):
    return (Send((*HOSTS[1:], FIRST), message),)


def lost(host, how="was lost: its launcher died"):
    return Result(69, f"{host} {how}\nexit code 69\n")


# The coordinator, until all have joined.


def test_who_is_missing_is_said_every_30_seconds_until_the_start_time_out(first):
    first.hears_hello(SECOND, 1)
    for now in (30, 60, 90):
        assert first.waits_until(now) == (
            Log("waiting for algo-3."),
            Send((SECOND,), Welcome(THIRD)),
        )
    end = End(1, lost(THIRD, "did not join within 100 s"))
    assert first.waits_until(100) == everywhere(end)


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
    *joined, tell = first.hears_hello(THIRD, fingerprint=theirs, hosts=hosts)
    code, text, *_ = tell.message.result
    assert joined == [Send((THIRD,), Welcome())] and code == 2 and len(text) < 600
    assert text.startswith(f"launcher: algo-1 and algo-3 differ in their {differ}")
    assert text.endswith("; expected the same on every host.\n")
    assert len(encoded(to_wire(hello(job(THIRD, fingerprint=theirs))))) < Connection.limit


@pytest.mark.parametrize(
    ("host", "name", "why"),
    [
        (THIRD, "another", "this is job job, not 'another'"),
        ("algo-9\x1b\n", "job", r"'algo-9\x1b\n' is not one of this job's other hosts"),
        (FIRST, "job", "'algo-1' is not one of this job's other hosts"),
        (SECOND, "job", "algo-2 has already joined, from 10.0.0.2"),
    ],
)
def test_a_host_that_is_not_waited_for_is_refused(first, host, name, why):
    first.hears_hello(SECOND)
    assert coordinator.refusal(first.state, hello(job(host, name=name))) == why
    first.hears_hello(THIRD)
    first.step(Lost(THIRD, DIED))
    again = coordinator.refusal(first.state, hello(job(THIRD)))
    assert again == "all hosts have already joined"


def test_a_stop_that_comes_before_the_first_host_itself_starts_nothing():
    first = Host(FIRST, (FIRST,))
    first.state = coordinator.begin(first.job, 0)
    end, leave = (Send((FIRST,), message) for message in (End(1, STOPPED), Leave(STOPPED)))
    assert first.hears(FIRST, Stop(15)) == (end,)
    assert first.hears(FIRST, Cleared(1, 0)) == (leave,)
    assert first.step(Arrived(hello(first.job), "")) == (end, leave)


# The coordinator of a job that runs: how it ends.

NAN, SURVIVORS = Result(1, "loss is nan\n"), Cleared(1, 2)
BROKEN_GPU = "algo-3, GPU 3 (GPU-5a) has uncorrectable ECC errors"
NOT_AGAIN = f"no restart: {BROKEN_GPU}; SageMaker checks and replaces the hosts of a failed job\n"
GPU_LOST = failed("x: GPU is lost\nexit code 7\n", code=7)
GPU_LOST = GPU_LOST._replace(broken=BROKEN_GPU)
GPU_FAILS = (10.2, Received(THIRD, GPU_LOST))
ON_BROKEN = Result(7, f"x: GPU is lost\n{NOT_AGAIN}exit code 7\n")
NAN_ON_BROKEN = Result(1, f"loss is nan\n{NOT_AGAIN}")
TORCHRUN = failed("torchrun failed\n", code=69, cause=Cause.TORCHRUN, may_restart=False)
ENDS_STUBS = failed("torchrun ends\n", code=69, cause=Cause.TORCHRUN_ENDS, may_restart=False)
OWN = failed("algo-3: the launcher itself failed\n", code=70, may_restart=False)
LOST_FIRST = failed("algo-1 was lost\n", code=69, cause=Cause.HOST_LOST, may_restart=False)
FROZEN = LOST_FIRST.result
RESET = failed("connection reset\n", cause=Cause.SECONDARY)
NAN_AND_RESET = Result(1, "loss is nan\nexit code 1\n")
THREE = [(10, Received(host, failed("loss is nan\nexit code 1\n"))) for host in HOSTS]
COUNTED = "loss is nan\nexit code 1; 2 more ranks failed independently\n"
FAILS = (10, Received(SECOND, failed()))
BREAKS = (10, Received(THIRD, RESET))
TORCHRUN_ENDS = (10.1, Received(SECOND, ENDS_STUBS))
TORCHRUN_FAILS = (10.2, Received(THIRD, TORCHRUN))
STOPS = (10.3, Received(SECOND, Stop(15)))
DIES = (20, Lost(THIRD, DIED))
SURVIVE = (20, Received(THIRD, SURVIVORS))
NO_STORE = (20, StoreMade(0, "port 1 is taken"))
NAN_NO_TORCHRUN = Result(1, "loss is nan\nno restart: torchrun failed\n")
NAN_SURVIVORS = Result(1, f"loss is nan\nno restart: 2 of {THIRD}'s processes survived SIGKILL\n")


def instead(result):
    """Return the result of a job that ends in place of a restart."""
    return result._replace(text=f"{result.text}reason for the restart: loss is nan\n")


# Name: restarts; what happens, and when: s; how the job ends.
ENDS = {
    "a failure, and a consequence": (0, [THREE[0], (10.1, Received(THIRD, RESET))], NAN_AND_RESET),
    "three failures": (0, THREE, Result(1, COUNTED)),
    # Restarts that do not come about.
    "a loss, restarting": (1, [FAILS, DIES], instead(lost(THIRD))),
    "torchrun fails, restarting": (1, [FAILS, TORCHRUN_FAILS], NAN_NO_TORCHRUN),
    "it fails, and all is late": (1, [FAILS, TORCHRUN_FAILS, (900, Time())], NAN_NO_TORCHRUN),
    "a launcher fails, restarting": (1, [FAILS, (20, Received(THIRD, OWN))], instead(OWN.result)),
    "the first was frozen": (1, [FAILS, (20, Received(THIRD, LOST_FIRST))], instead(FROZEN)),
    "survivors": (1, [FAILS, SURVIVE], NAN_SURVIVORS),
    "no store, no restart": (0, [FAILS, NO_STORE], NAN),
    # Nor where hardware broke, by what any rank says.
    "a rank's GPU": (1, [GPU_FAILS], ON_BROKEN),
    "another's GPU": (1, [FAILS, GPU_FAILS], NAN_ON_BROKEN),
    "a GPU, and no restart left": (0, [GPU_FAILS], GPU_LOST.result),
    # All processes of a host may have got a stop, and its torchrun is heard first.
    "torchrun ends by a stop": (0, [TORCHRUN_ENDS, STOPS], STOPPED),
    "torchrun ends by a stop, restarting": (1, [FAILS, TORCHRUN_ENDS, STOPS], STOPPED),
    "torchrun fails, and a stop": (0, [TORCHRUN_ENDS, TORCHRUN_FAILS, STOPS], TORCHRUN.result),
    "a rank fails, and a stop": (0, [TORCHRUN_ENDS, FAILS, STOPS], NAN),
    "torchrun fails, restarting, and a stop": (1, [FAILS, TORCHRUN_FAILS, STOPS], NAN_NO_TORCHRUN),
    "a consequence, and torchrun ends": (0, [BREAKS, TORCHRUN_ENDS, STOPS], RESET.result),
    "a consequence, and a stop": (0, [BREAKS, STOPS, TORCHRUN_ENDS], RESET.result),
}


@pytest.mark.parametrize(("restarts", "events", "result"), ENDS.values(), ids=ENDS)
def test_what_a_job_says_that_ends(restarts, events, result):
    first = ready(max_restarts=restarts)
    for now, event in events:
        first.step(event, now)
    if isinstance(first.phase, Deciding):
        first.step(Time(), 14)
    running = [] if DIES in events or SURVIVE in events else [THIRD]
    leave = first.clears((SECOND, *running, FIRST), first.state.number, 21)
    assert leave == (Send(HOSTS[1:], Leave(result)),)


def test_a_better_cause_shortens_the_wait_for_the_best():
    first = ready()
    first.hears(THIRD, RESET, 10)
    first.hears(SECOND, ENDS_STUBS, 10.1)
    assert first.waits_until(11.1) == everywhere(End(1, ENDS_STUBS.result))


def test_this_host_leaves_last_but_after_a_success():
    """Other hosts' torchruns have their store here."""
    first = ready()
    first.hears_all(SUCCEEDED, 10)
    assert first.clears(HOSTS, 1, 20) == everywhere(Leave(SUCCESS))
    first, leaves = ready(), (Send((FIRST,), Leave(STOPPED)),)
    first.hears(SECOND, Stop(15), 10)
    assert first.clears(HOSTS, 1, 20) == (Send(HOSTS[1:], Leave(STOPPED)),)
    assert coordinator.step(first.state, Time(), 25)[1] == leaves
    assert first.step(Lost(SECOND, DIED), 21) == ()
    assert first.step(Lost(THIRD, DIED), 21) == leaves
    assert first.step(Lost(THIRD, DIED), 21) == () and first.due == math.inf


WELL = "all 3 ranks exited by themselves within 12 s of SIGTERM"
NEW = "3 files are new below /opt/ml/checkpoints"
ONE = "the rank exited by itself within 3 s of SIGINT."
NONE_NEW = "nothing was saved below /opt/ml/checkpoints (checkpoint_s3_uri not set?)"
# How all hosts end, with what each reports then: files, ranks that have handled a stop, in seconds.
LEFT_BEHIND = [
    (Stop(15), [(2, 1, 0.1), (1, 1, 11.2), (0, 1, 3)], f"{WELL}; {NEW}."),
    (Stop(15), [(0, 1, 0.1), (0, 1, 11.2), (0, 1, 3)], f"{WELL}; {NONE_NEW}."),
    (Stop(15), [(-1, 1, 0.1), (1, 1, 11.2), (1, 1, 3)], f"{WELL}."),
    (Stop(15), [(2, -1, 0.0), (1, 1, 11.2), (0, 1, 3)], f"{NEW}."),
    (Stop(15), [(-1, 1, 0.1), (0, 0, 0.0), (0, 1, 11.2)], WELL.replace("all 3", "both") + "."),
    (Stop(15), [(-1, 0, 0.0), (-1, 0, 0.0), (-1, 0, 0.0)], None),
    (Stop(2), [(1, 0, 0.0), (-1, 1, 3.0), (0, 0, 0.0)], ONE),
    (SUCCEEDED, [(0, 0, 0.0)] * 3, NOTHING),
    (SUCCEEDED, [(0, 0, 0.0), (1, 0, 0.0), (0, 0, 0.0)], None),
    (SUCCEEDED, [(0, 0, 0.0), (-1, 0, 0.0), (0, 0, 0.0)], None),
    (failed(), [(0, 0, 0.0)] * 3, None),
]


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize(("message", "hosts", "line"), LEFT_BEHIND)
def test_what_a_job_leaves_to_sagemaker_is_one_line(message, hosts, line, notes):
    first = ready(notes=notes)
    first.hears_all(message, 10)
    for host, (files, handled, seconds) in zip(HOSTS, hosts):
        actions = first.hears(host, Cleared(1, 0, files, handled, seconds), 20)
    assert logged(actions) == ([line] if line and notes else [])


def test_of_a_host_that_is_lost_nothing_is_said():
    first = ready()
    first.hears(FIRST, Stop(15), 10)
    for host in HOSTS[:2]:
        first.hears(host, Cleared(1, 0, 0, 1, 3.0), 11)
    assert first.step(Lost(THIRD, DIED), 12) == (Send(HOSTS[1:], Leave(STOPPED)),)


def test_hosts_that_do_not_clear_are_left_at_the_bound_of_the_longest_grace():
    first = Host(FIRST)
    first.hears_hello(SECOND, grace=90, failure_grace=100)
    first.hears_hello(THIRD)
    first.hears(SECOND, Stop(15), 10)
    first.clears([FIRST], 1, 20)
    assert first.waits_until(10 + BOUND + 40) == (Send(HOSTS[1:], Leave(STOPPED)),)


# Restarts.


@pytest.mark.parametrize(
    ("cleared", "says"),
    [((FIRST, THIRD), "algo-2"), ((FIRST,), "algo-2, algo-3"), ((THIRD,), "algo-1, algo-2")],
)
@pytest.mark.parametrize(
    ("given", "seconds"), [({}, BOUND), ({"restart_timeout": 30}, 30), ({"start_timeout": 40}, 40)]
)
def test_a_restart_has_a_time_out(cleared, says, given, seconds):
    first = ready(max_restarts=3, **given)
    first.step(StoreMade(5))
    first.hears(SECOND, failed(), 10.3)
    first.clears(cleared, 1, 20)
    text = f"{says} did not clean up attempt 1 within {seconds} s of the restart\nexit code 69\n"
    text += "reason for the restart: loss is nan\n"
    assert first.waits_until(10.3 + seconds) == everywhere(End(2, Result(69, text)))
    assert first.due == pytest.approx(10.3 + seconds + BOUND)


def test_a_restart_of_a_single_host_has_no_time_out():
    first = Host(FIRST, (FIRST,), max_restarts=3, restart_timeout=5)
    first.hears(FIRST, failed(), 10)
    assert first.due == 10 + BOUND


def test_times_within_a_line_do_not_make_another_failure_of_it():
    first = ready(max_restarts=3)
    line = "; see that rank's last lines on stderr, at 12:{:02}:56 UTC"
    for attempt, again in ((1, False), (2, True)):
        first.step(StoreMade(5))
        failure = failed("was killed by SIGABRT (signal 6)")
        failure = failure._replace(more=line.format(attempt))
        (end,) = first.hears(SECOND, failure, 10 * attempt)
        assert (" (2 times so far)" in end.message.restart) is again
        assert line.format(attempt) in end.message.restart
        first.clears(HOSTS, attempt, 10 * attempt + 1)


# Which rank had departed; which make no progress; stacks.

CLOSED = "algo-2, rank 2 (local rank 0) failed with RuntimeError: Connection closed by peer"
BROKEN = failed(f"{CLOSED}\nexit code 1\n", cause=Cause.SECONDARY)
BROKEN = BROKEN._replace(rank=2)
LEFT = (9, THIRD, Succeeded(5, 0.2))
AGED = [BROKEN._replace(age=1.3, cause=cause) for cause in (Cause.SECONDARY, Cause.TIMED_OUT)]
OTHERS = [failed(cause=cause) for cause in (Cause.OWN, Cause.TORCHRUN, Cause.ABORTED)]
# What hosts say, and when: s; the first line at a failure then.
DEPARTED = [
    ([LEFT], "algo-3, rank 5 had ended with exit code 0, 1.2 s before rank 2 failed", BROKEN),
    (
        [
            LEFT,
            *((9.5, FIRST, Succeeded(rank, 0.1)) for rank in (0, 1)),
            *((9.9, SECOND, Succeeded(rank, age)) for rank, age in ((3, 5.9), (2, 2.0))),
        ],
        "algo-2, rank 3 and 4 more had ended with exit code 0, "
        "the first 6.0 s before rank 2 failed",
        BROKEN,
    ),
    # It is known only later, but was before; and after the failure.
    (
        [(12, THIRD, Succeeded(rank, age)) for rank, age in ((5, 2.3), (4, 1.9), (6, 0.1))],
        "algo-3, rank 5 had ended with exit code 0, 0.3 s before rank 2 failed",
        BROKEN,
    ),
    (
        [(12, host, SUCCEEDED) for host in HOSTS],
        "algo-1, rank 0 and 2 more were ending with exit code 0 when rank 2 failed",
        BROKEN,
    ),
    ([], "", BROKEN),
    # Hosts say how long before they failed. Who ends after a time-out is no reason for it.
    ([LEFT], "algo-3, rank 5 was ending with exit code 0 when rank 2 failed", AGED[0]),
    ([LEFT], "", AGED[1]),
    # No rank that has left is their reason.
    *(([LEFT], "", one) for one in OTHERS),
]


def ended(first, at):
    """Return how a job ends that ends at a time."""
    if isinstance(first.phase, Deciding):
        first.waits_until(at)
    return first.phase.end.result


@pytest.mark.parametrize(("events", "line", "failure"), DEPARTED)
def test_the_rank_is_named_that_had_left_when_a_connection_broke(events, line, failure):
    first = ready()
    for now, host, message in sorted([*events, (10, SECOND, failure)]):
        first.hears(host, message, now)
    text = ended(first, 10 + failure.cause.patience).text
    assert text == (f"{line}\n" if line else "") + failure.text


@pytest.mark.parametrize(
    ("isolated", "notes", "is_said"),
    [((2, 1, 1), True, True), ((2, 0, 1), True, False), ((2, 1, 1), False, False)],
)
def test_that_ranks_of_a_job_have_exchanged_nothing(isolated, notes, is_said):
    first = ready(notes=notes)
    for host, count in zip(HOSTS, isolated):
        actions = first.hears(host, SUCCEEDED._replace(isolated=count), 5)
    # They may have by other ways: a store of theirs, files, sockets.
    line = "4 ranks ran, and none exchanged anything with another in a process group."
    assert any(one.startswith(line) for one in logged(actions)) == is_said


def test_the_next_attempt_knows_nothing_of_who_had_left():
    first = ready(max_restarts=3)
    first.hears(THIRD, LEFT[2], 9)
    first.hears(SECOND, BROKEN, 10)
    first.step(StoreMade(5))
    assert ": algo-3, rank 5 had ended" in first.waits_until(13)[0].message.restart
    first.clears(HOSTS, 1, 14)
    first.step(StoreMade(5))
    first.hears(SECOND, BROKEN, 20)
    assert "had ended" not in first.waits_until(23)[0].message.restart


RETURNED = StalledRank(5, 1, 70.0, place='thread "uploader", in upload, train.py:4', runs_on=True)
WAITS = StalledRank(0, 0, 70.0, groups=(Group("0,1", last=3, waits=3),))
RUN_ON = (
    "rank 5's script has ended, but its process is still running: "
    'thread "uploader", in upload, train.py:4.'
)


@pytest.mark.parametrize("other", ["waits", "has ended", "trains", "says nothing"])
def test_ranks_that_run_on_end_a_job_only_if_no_other_does_anything_and_never_restart_it(other):
    first = ready(max_restarts=3, watch=5, hang_notify=60, hang_timeout=100)
    first.hears(SECOND, NoProgressReport(1, (), 0), 100)  # all of its ranks have ended
    first.hears(THIRD, NoProgressReport(1, (RETURNED,), 0), 100)
    if other == "has ended":
        first.hears(FIRST, NoProgressReport(1, (), 0), 100)
    elif other != "says nothing":
        first.hears(FIRST, NoProgressReport(1, (WAITS,), 1 if other == "trains" else 0), 100)
    assert [one.line for one in first.waits_until(101)] == [RUN_ON]
    if other in ("trains", "says nothing"):
        assert [one.line for one in first.waits_until(30 + 2 * 71)] == [RUN_ON]
        assert first.due > 200
    else:
        # After 100 s and two looks, nothing has moved.
        first.waits_until(30 + 100 + 2 * 5 + 3)
        hung = Result(75, f"{RUN_ON}\nexit code 75 (--launcher-hang-timeout)\n", is_hang=True)
        assert ended(first, 143) == hung


def stacks_of(number, stacks, attempt=1):
    return NoProgressReport(attempt, (), number=number, stacks=stacks)


def test_stacks_are_of_the_ranks_that_run_now():
    first = ready(max_restarts=3)
    first.step(StoreMade(5))
    assert first.hears(SECOND, StacksRequest(), 37) == everywhere(CollectStacks(1, True))
    first.hears(SECOND, failed(), 38)
    first.clears(HOSTS, 1, 38)
    assert first.hears(THIRD, StacksRequest(), 38.5) == everywhere(CollectStacks(1, True))
    assert first.hears(FIRST, StacksRequest(), 38.5) == ()
    assert first.hears_all(stacks_of(1, ((0, "  of attempt 1"),), attempt=1), 38.6) == ()
    for host in (FIRST, SECOND):
        assert first.hears(host, stacks_of(1, (), attempt=2), 39) == ()
    told = first.hears(THIRD, stacks_of(1, ((0, "  here"),), attempt=2), 39)
    assert told == everywhere(AllStacks(("rank 0:", "  here")))


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


# A member.


def goes_up(message):
    return Send((FIRST,), message)


GREETS = goes_up(hello(job(SECOND)))  # first, when it has connected
NO_LAUNCHER = (
    "what listens on port 29401 there does not answer as this job's launcher; choose another "
    "with --launcher-peer-port, the same one on every host"
)


def test_a_member_says_what_it_waits_for_until_the_start_time_out(second):
    assert second.step(Tried("nothing is listening there"), 29) == ()
    for now in (30, 60, 90):
        line = Log("waiting for algo-1 (nothing is listening there).")
        assert second.waits_until(now) == (line,)
    how = "could not be reached within 100 s (nothing is listening there)"
    assert second.waits_until(100) == (Alone(of_lost_host(FIRST, how)),)
    assert second.hears(SECOND, Cleared(0, 0)) == ()
    assert second.step(Tried()) == ()  # too late


def test_a_member_that_is_stopped_tells_its_coordinator_within_3_s(second):
    said = goes_up(Stop(15))
    assert second.hears(SECOND, Stop(15), 2) == (said,)
    assert second.step(Tried(), 3) == (GREETS, said)
    ((alone,),) = second.waits_until(5)
    assert alone.what.startswith("algo-1 could not be reached")


def test_a_member_tells_a_coordinator_that_is_silent_that_it_is_lost(second):
    """It may only be suspended: then it ends with the same when it continues."""
    second.hears(FIRST, Welcome(), 1)
    told, alone = second.step(Lost(FIRST, DIED), 3)
    lost = of_lost_host(FIRST, f"was lost: {DIED}")
    assert (told, alone) == (goes_up(lost), Alone(lost))


def test_a_member_waits_for_its_coordinator_where_another_program_listens(second):
    """The coordinator may come yet, or be slow: who is connected waits, and does not try again."""
    assert second.step(Tried(), 1) == (GREETS,)
    assert second.step(Lost(FIRST, DIED), 1) == ()
    assert second.step(Tried(), 2) == (GREETS,)
    for now in (30, 60, 90):
        assert second.waits_until(now) == (Log(f"waiting for algo-1 ({NO_LAUNCHER})."),)
    alone = Alone(of_lost_host(FIRST, f"could not be reached within 100 s ({NO_LAUNCHER})"))
    assert link.step(second.state, Time(), 100)[1] == (alone,)
    assert second.hears(FIRST, Start(1, 0), 99) == ()  # no reply
    assert second.hears(FIRST, Welcome(), 99) == () and second.due == math.inf


# Messages.


def wire(message):
    return decoded(encoded(to_wire(message)).rstrip())


WATCHED = NoProgressReport(
    1, (StalledRank(5, 1, 30.5, "", "f, a.py:3", (Group("0-7", 1, "dp", 9, 8, "x", "y"),)),)
)
STACKS = stacks_of(3, ((0, "  main thread:\n    x"),))
MEMBERS = [
    *(failed(code=255), failed()._replace(age=2.5), GPU_LOST, Cleared(3, 4), Stop(2), SUCCEEDED),
    *(Succeeded(5, 2.5), WATCHED, StacksRequest(), STACKS, Alive()),
]
COORDINATORS = [
    *(Welcome(), Welcome("algo-3"), Start(1, 0), Start(2, 5), Leave(SUCCESS), Leave(STOPPED)),
    *(Alive(), End(1, SUCCESS), End(2, STOPPED), End(3, Result(3, "loss is nan\nexit code 3\n"))),
    End(4, Result(75, "a hang\n", is_hang=True)),
    *(End(1, SUCCESS, "why"), CollectStacks(3, True), AllStacks(("rank 0:", "  main thread:"))),
]


def test_messages_arrive_as_they_were_sent():
    said = hello(job(SECOND, fingerprint={**SAME, "words": ["a", "b"]}))
    assert messages.from_stranger(wire(said)) == said and said.longest_grace == 60
    for message in MEMBERS:
        assert messages.from_member(wire(message)) == message
    for message in COORDINATORS:
        assert messages.from_coordinator(wire(message)) == message


def changed(message, name, value):
    """Return a message of the wire, of which a field has another value."""
    (fields,) = wire(message).values()
    return {type(message).__name__: {**dict(zip(message._fields, fields)), name: value}}


NESTED = json.loads("[" * 900 + "]" * 900)
HELLO = hello(job(SECOND))
INVALID = [
    *((messages.from_stranger, changed(HELLO, "fingerprint", {"a": v})) for v in (7, {}, NESTED)),
    *((messages.from_stranger, changed(HELLO, name, 1e9j)) for name in ("job", "longest_grace")),
    *(
        (messages.from_member, changed(Stop(15), "number", value))
        for value in (0, 9, True, "1", None)
    ),
    (messages.from_member, changed(failed(), "what", {})),
    (
        messages.from_coordinator,
        changed(End(1, NAN), "result", wire(End(1, NAN._replace(text="")))),
    ),
    *((messages.from_stranger, message) for message in ({}, {"Hello": 1}, wire(Stop(15)))),
    *(
        (messages.from_member, message)
        for message in ({}, {"Dance": {}}, wire(Start(1, 0)), wire(HELLO))
    ),
    *((messages.from_coordinator, message) for message in ({}, {"End": {}}, wire(Stop(15)))),
]


@pytest.mark.parametrize(("read", "message"), INVALID)
def test_a_message_that_is_not_valid_is_refused(read, message):
    with pytest.raises(ValueError):
        read(message)


def test_what_comes_from_outside_is_cut_and_shows_control_characters():
    text = "\nloss\x1b[31m is\rnan\u2028\x00\nlauncher: more\n" + 5000 * "x"
    failure = failed()._replace(exit_code=256, what=text[1:])
    result = failure._replace(no_restart=text, frames=text, more=text).result
    lines = result.text.splitlines()
    assert len(result.text) <= LIMIT and result.exit_code == 1
    assert lines[0].startswith(r"loss\x1b[31m is\rnan\u2028\x00")
    assert lines[1].startswith(r"no restart: \nloss\x1b[31m is")
    assert not [line for line in lines if line.startswith("launcher:")]
    end = messages.from_coordinator(wire(End(1, Result(3, text))))
    assert end.result.text.splitlines()[0] == r"loss\x1b[31m is\rnan\u2028\x00"
    why = messages.from_coordinator(wire(End(1, SUCCESS, text))).restart
    assert why.startswith(r"\nloss\x1b[31m is") and why.isprintable() and len(why) < LIMIT
    assert failed(" \n").text == "the reason is not known\n"
