"""What the hosts of a job agree on: both state machines, with a clock and a network made of values.

Real sockets are in test_transport.py.
"""

import json
import math
from collections import deque

import pytest

from launcher.events import AllJoined, Decided, Leave, Left, Log, Stop, Succeeded, Tell, Time
from launcher.peers import agreement, first, messages, other, other_greeting
from launcher.peers.events import (
    Accept,
    CannotListen,
    Close,
    Closed,
    Connect,
    Connected,
    Fail,
    Full,
    Listen,
    Listening,
    LookedUp,
    LookUp,
    Received,
    Send,
    SendAll,
    StopListening,
    TooFewFiles,
    Unreachable,
)
from launcher.result.causes import Cause, Failure, Result
from launcher.result.failure_text import LIMIT

HOSTS = ("algo-1", "algo-2", "algo-3")
FIRST, SECOND, THIRD = HOSTS
SAME = {"version of torch": "2.13", "script": "script train.py"}


def fail(cause, exit_code=1, text="loss is nan\n"):
    return Tell(Failure(cause, exit_code, text))


def own(text, exit_code=1):
    return fail(Cause.OWN, exit_code, text)


def may_follow(state, event):
    """Return the phases that the table of rules shows."""
    machine = first if isinstance(state, first.State) else other
    rule = machine.RULES.rule(state.phase, type(machine.meaning(state, event)))
    return (state.phase, *rule.to)


class Job:
    """Hosts of one job on a clock of their own; what is sent arrives at once.

    `done` lists what each host's machine did, apart from sending and closing; `sent` what reached
    connections that are not of a host here.
    """

    def __init__(self, hosts=HOSTS):
        self.hosts = hosts
        self.now = 0.0
        self.states = {}
        self.done = {}
        self.sent = {}
        self.closed = set()
        self.listens = False
        self._ends = {}  # of a connection: the two hosts
        self._timers = []
        self._queue = deque()

    def join(self, *hosts, fingerprint=SAME, timeout=60, of=None, name="job"):
        for host in hosts or self.hosts:
            job = agreement.job_of(host, of or self.hosts, name, 29401, timeout, fingerprint)
            self.done[host] = []
            self.states[host], actions = agreement.begin(job, self.now)
            self._carry_out(host, actions)
        self._settle()

    def event(self, host, event):
        self._queue.append((host, event))
        self._settle()

    def _settle(self):
        while self._queue:
            host, event = self._queue.popleft()
            if host in self.states:
                before = self.states[host]
                state, actions = agreement.step(before, event, self.now)
                self.states[host] = state
                assert state == before or state.phase in may_follow(before, event)
                self._carry_out(host, actions)

    def wait(self, seconds=20.0):
        until = self.now + seconds
        while True:
            due = {host: agreement.due(state) for host, state in self.states.items()}
            at = min([*due.values(), *(at for at, _, _ in self._timers), until])
            self.now = max(self.now, at)
            if self.now >= until:
                return
            for timer in [timer for timer in self._timers if timer[0] <= self.now]:
                self._timers.remove(timer)
                self._connect(*timer[1:])
            for host in [host for host, at in due.items() if at <= self.now]:
                self.event(host, Time())

    def _connect(self, host, event):
        if not self.listens:
            self.event(host, Unreachable("nothing listens there"))
            return
        self._ends[len(self._ends)] = (host, self.hosts[0])
        for end in (self.hosts[0], host):
            self.event(end, Connected(len(self._ends) - 1, "10.0.0.2", "10.0.0.1"))

    def _carry_out(self, host, actions):
        for action in actions:
            if isinstance(action, SendAll):
                for conn in action.conns:
                    self._send(host, conn, action.message)
            elif isinstance(action, Send):
                self._send(host, action.conn, action.message)
            elif isinstance(action, Close):
                self.closed.add(action.conn)
                for end in self._ends.get(action.conn, ()):
                    if end != host:
                        self._queue.append((end, Closed(action.conn, "its launcher died")))
            elif isinstance(action, Connect):
                self._timers.append((self.now + action.wait, host, None))
            elif isinstance(action, Listen):
                self.listens = True
                self._queue.append((host, Listening(True)))
            elif isinstance(action, StopListening):
                self.listens = False
            elif isinstance(action, LookUp):
                self._queue.extend((host, LookedUp(name, True)) for name in action.hosts)
            else:
                self.done[host].append(action)

    def _send(self, host, conn, message):
        message = json.loads(json.dumps(message))
        if conn not in self._ends:
            self.sent.setdefault(conn, []).append(message)
        for end in self._ends.get(conn, ()):
            if end != host:
                self._queue.append((end, Received(conn, message)))

    # What hosts do

    def stray(self, *said, conn):
        """Connect to the first host as anybody can, and say something."""
        self.event(self.hosts[0], Connected(conn, "10.9.9.9", "10.0.0.1"))
        self.say(conn, *said)

    def say(self, conn, *said):
        for message in said:
            self.event(self.hosts[0], Received(conn, json.loads(json.dumps(message))))

    def die(self, host):
        del self.states[host]
        for conn, ends in self._ends.items():
            if host in ends and conn not in self.closed:
                for end in set(ends) - {host}:
                    self._queue.append((end, Closed(conn, "its launcher died")))
        self._settle()

    # What is seen

    def of(self, host, kind):
        return [action for action in self.done[host] if isinstance(action, kind)]

    def has_started(self, host):
        return bool(self.of(host, AllJoined))

    def results(self):
        return {host: [one.result for one in self.of(host, Decided)] for host in self.states}

    def result(self):
        """Return what all hosts that are there have been told, once each."""
        results = self.results()
        (result,) = results[self.hosts[0]] if self.hosts[0] in results else results[SECOND]
        assert all(told == [result] for told in results.values()), results
        return result

    def lines(self, host):
        return [action.line for action in self.of(host, Log)]


@pytest.fixture
def job():
    return Job()


@pytest.fixture
def all_run(job):
    job.join()
    job.wait(1)
    assert all(map(job.has_started, HOSTS))
    return job


def hello(me, name="job", hosts=HOSTS, fingerprint=SAME, **more):
    job = agreement.job_of(me, hosts, name, 29401, 60, fingerprint)
    message = messages.hello(job)
    return {"hello": {**message["hello"], **more}}


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


# How a job starts


def test_all_start_when_the_last_has_joined(job):
    job.join(FIRST, SECOND)
    job.wait(20)
    assert not job.has_started(FIRST) and not job.has_started(SECOND)
    job.join(THIRD)
    job.wait(2)
    for host in HOSTS:
        assert job.of(host, AllJoined) == [AllJoined("10.0.0.1", True)]
    assert not job.listens
    assert [agreement.due(state) for state in job.states.values()] == [math.inf] * 3


def test_the_others_may_come_first(job):
    job.join(SECOND, THIRD)
    job.wait(10)
    job.join(FIRST)
    job.wait(1.1)
    assert all(map(job.has_started, HOSTS))


def test_tries_to_reach_the_first_host_are_further_and_further_apart():
    job = agreement.job_of(SECOND, HOSTS, "job", 29401, 60, SAME)
    state, actions = other.begin(job, 0)
    waits = []
    for now in (0.01, 0.1, 0.8, 4, 8, 50):
        assert [type(action) for action in actions] == [Connect]
        state, actions = other.step(state, Unreachable("nothing listens there"), now)
        waits += [action.wait for action in actions]
    assert waits == [0.02, 0.02, 0.1, 0.5, 1, 1]


def test_hosts_that_never_come_are_named(job):
    job.join(FIRST, timeout=4)
    job.join(SECOND, timeout=60)
    job.wait(4.1)
    text = "algo-3 (its name resolves) did not arrive within 4 s\nexit code 69\n"
    assert job.result() == Result(69, text)


def test_a_first_host_that_never_comes(job):
    job.join(SECOND, timeout=1)
    job.wait(1.1)
    text = "algo-1 did not arrive within 1 s (nothing listens there)\nexit code 69\n"
    assert job.result() == Result(69, text)


def test_hosts_that_wait_say_so_every_30_seconds(job):
    job.join(SECOND, timeout=200)
    job.wait(31)
    assert job.lines(SECOND) == ["waiting for algo-1 (nothing listens there)."]
    job.join(FIRST, timeout=200)
    job.wait(61)
    line = "waiting for algo-3 (its name resolves)."
    assert job.lines(FIRST) == [line] * 2
    assert job.lines(SECOND)[1:] == [line] * 2


def test_names_that_have_no_answer_yet_are_looked_up_again():
    hosts = tuple(f"algo-{number:02}" for number in range(1, 13))
    state, _ = first.begin(agreement.job_of(hosts[0], hosts, "job", 29401, 900, SAME), 0)
    assert first.due(state) == 28
    state, (look_up,) = first.step(state, Time(), 28)
    assert look_up == LookUp(hosts[1:9])
    for event in (LookedUp(hosts[1], True), LookedUp(hosts[2], False)):
        state, _ = first.step(state, event, 29)
    state, (_, line) = first.step(state, Time(), 30)
    known = "algo-02 (its name resolves), algo-03 (its name does not resolve), "
    assert line.line.startswith(f"waiting for {known}algo-04 (no answer from DNS), ")
    assert line.line.endswith(" and 3 more.")
    state, (look_up,) = first.step(state, Time(), 58)
    state, (_, line) = first.step(state, Time(), 60)
    assert line.line.startswith("waiting for algo-02 (no answer from DNS), ")


def test_a_list_of_many_long_names():
    names = tuple(f"host-{number:04}-{'x' * 240}" for number in range(1998))
    job = Job((FIRST, SECOND, *names))
    job.join(FIRST, SECOND, timeout=1)
    job.wait(1.1)
    result = job.result()
    assert result.exit_code == 69
    assert result.text.startswith("host-0000-x")
    assert "and 1996 more did not arrive within 1 s\n" in result.text
    assert len(result.text) <= LIMIT
    job = Job((FIRST, SECOND, *names))
    job.join(FIRST)
    job.join(SECOND, of=(FIRST, SECOND, *names[:-1]))
    job.wait(1)
    result = job.result()
    assert result.exit_code == 2
    assert "differ in their list of hosts: '" in result.text
    assert "(2000 in all, SHA-256 " in result.text and "(1999 in all" in result.text
    assert len(result.text) <= LIMIT


def test_a_thousand_hosts_that_join_at_once():
    job = Job(tuple(f"algo-{number:04}" for number in range(1000)))
    job.join()
    job.wait(1)
    assert all(map(job.has_started, job.hosts))
    job.die(job.hosts[7])
    job.wait(0.6)
    assert job.result().text.startswith("algo-0007 was lost: its launcher died\n")


# What must agree


@pytest.mark.parametrize(
    ("what", "theirs"),
    [
        ("version of torch", {**SAME, "version of torch": "2.4"}),
        ("script", {**SAME, "script": "x"}),
    ],
)
def test_what_must_agree_is_compared(job, what, theirs):
    job.join(FIRST, SECOND)
    job.join(THIRD, fingerprint=theirs)
    job.wait(1)
    result = job.result()
    assert result.exit_code == 2
    assert result.text == (
        f"launcher: algo-1 and algo-3 differ in their {what}: {SAME[what]!r} and "
        f"{theirs[what]!r}; expected the same on every host.\n"
    )
    assert not any(map(job.has_started, HOSTS))


def test_lists_of_hosts_are_compared(job):
    job.join(FIRST)
    job.join(SECOND, of=HOSTS[:2])
    job.wait(1)
    assert "differ in their list of hosts" in job.result().text


def test_long_arguments_are_compared(job):
    """SageMaker takes 100 hyperparameters of 2,500 characters each."""
    long = ["x" * 2500] * 100
    job.join(FIRST, SECOND, fingerprint={"script's arguments": long})
    job.join(THIRD, fingerprint={"script's arguments": [*long, "y"]})
    job.wait(1)
    result = job.result()
    line = result.text.splitlines()[0]
    assert result.exit_code == 2
    assert line.startswith("launcher: algo-1 and algo-3 differ in their script's arguments")
    assert len(line) < 600
    assert len(json.dumps(hello(THIRD, fingerprint={"script's arguments": long}))) < 1 << 12


def test_a_configuration_error_on_a_host_is_told(job):
    job.join(FIRST, SECOND)
    job.join(THIRD, fingerprint={})
    job.event(THIRD, own("algo-3: there is no such file\n", 2))
    job.wait(1)
    assert job.result() == Result(2, "algo-3: there is no such file\n")


def test_nobody_starts_while_a_configuration_error_is_on_its_way(job):
    job.join(FIRST, SECOND)
    job.join(THIRD, fingerprint={})
    job.wait(2)
    assert all(told == [] for told in job.results().values())
    job.event(THIRD, own("it cannot\n", 2))
    job.wait(1)
    assert job.result() == Result(2, "it cannot\n")
    assert not any(map(job.has_started, HOSTS))


def test_a_host_that_cannot_start_and_does_not_say_why(job):
    job.join(FIRST, SECOND)
    job.join(THIRD, fingerprint={})
    job.wait(3.5)
    assert job.result() == Result(2, "algo-3 cannot start, and did not say why\n")


def test_a_restart_before_the_start_is_no_failure(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    restarted = messages.told(Failure(Cause.RESTARTED, 1, "x\n"))
    job.stray(hello(THIRD, fingerprint={}), restarted, conn="third")
    job.wait(3.5)
    assert job.result().text == "algo-3 cannot start, and did not say why\n"


@pytest.mark.parametrize("fingerprint", [SAME, {}])
def test_a_first_host_with_too_few_descriptors_ends_all(job, fingerprint):
    job.join(FIRST, fingerprint=fingerprint)
    job.event(FIRST, TooFewFiles(200, 323))
    job.join(SECOND, THIRD)
    job.wait(1)
    assert job.result().exit_code == 2
    assert job.result().text == (
        "launcher: algo-1 can have 200 files open (ulimit -n), but the connections of 3 hosts need "
        "323; raise that limit, or do without these connections with --launcher-peers false.\n"
    )


# Hosts that leave before the start


@pytest.mark.parametrize("seconds", [0, 1])
@pytest.mark.parametrize("wrong", HOSTS)
def test_a_host_that_cannot_start_leaves_when_all_know(job, wrong, seconds):
    for host in HOSTS:
        job.join(host, fingerprint={} if host == wrong else SAME)
    job.wait(seconds)
    job.event(wrong, own(f"launcher: {wrong}: no such file\n", 2))
    job.event(wrong, Tell(Leave()))
    job.wait(1)
    assert job.result() == Result(2, f"launcher: {wrong}: no such file\n")
    assert isinstance(job.done[wrong][-1], Left)
    for host in HOSTS:
        if host != wrong:
            job.event(host, Tell(Leave()))
        assert job.of(host, Left) == [Left()]
        assert agreement.due(job.states[host]) == math.inf


def test_a_first_host_that_cannot_start_waits_3_seconds_for_hosts_that_come_late(job):
    job.join(FIRST, fingerprint={})
    job.join(SECOND)
    job.event(FIRST, own("it cannot\n", 2))
    job.event(FIRST, Tell(Leave()))
    job.wait(2)
    assert [len(told) for told in job.results().values()] == [1, 1]
    assert not job.of(FIRST, Left)
    job.join(THIRD)
    job.wait(0.1)
    assert job.result() == Result(2, "it cannot\n")
    assert job.of(FIRST, Left)


@pytest.mark.parametrize("host", [FIRST, SECOND])
def test_a_host_that_cannot_start_stays_3_seconds_at_most(job, host):
    job.join(host, fingerprint={})
    job.event(host, own("it cannot\n", 2))
    job.event(host, Tell(Leave()))
    job.wait(2.9)
    assert not job.of(host, Left)
    job.wait(0.2)
    assert job.of(host, Left)
    assert agreement.due(job.states[host]) == math.inf


@pytest.mark.parametrize("host", HOSTS)
def test_a_torchrun_that_cannot_be_started_is_told(all_run, host):
    all_run.event(host, own("launcher: python does not exist.\n", 127))
    all_run.event(host, Tell(Leave()))
    all_run.wait(0.4)
    assert all_run.result().exit_code == 127
    assert all_run.of(host, Left)


@pytest.mark.parametrize("joined", [True, False])
def test_a_first_host_that_does_not_answer_is_waited_for_3_seconds(joined):
    second = Second()
    second.connect()
    second.hear({"welcome": True}, *([{"all joined": True}] if joined else []))
    second.event(own("launcher: python does not exist.\n", 127))
    second.event(Tell(Leave()))
    assert other.due(second.state) == 3
    assert second.event(Time(), after=2.9) == []
    assert second.event(Time(), after=0.1) == [Left()]


def test_a_stop_before_the_first_host_is_there(job):
    job.join(SECOND, THIRD)
    job.event(SECOND, Tell(Stop(15)))
    assert job.results() == {SECOND: [Result(143, "", 15)], THIRD: []}
    job.event(SECOND, Tell(Leave()))
    job.wait(1)
    assert not job.of(SECOND, Left)
    job.join(FIRST)
    job.wait(1)
    assert job.of(SECOND, Left)
    assert job.result() == Result(143, "", 15)


def test_a_stop_while_something_else_answers_in_the_first_hosts_place():
    job = agreement.job_of(SECOND, HOSTS, "job", 29401, 60, SAME)
    state, _ = other.begin(job, 0)
    state, (said,) = other.step(state, Connected(5, "10.0.0.1", "10.0.0.2"), 1)
    assert said == Send(5, messages.hello(job))
    state, actions = other.step(state, Tell(Stop(15)), 2)
    assert actions == (Send(5, {"stop": 15}), Decided(Result(143, "", 15)))
    state, _ = other.step(state, Tell(Leave()), 2)
    assert other.due(state) == 5
    state, actions = other.step(state, Time(), 5)
    assert actions == (Left(),)


def test_a_host_that_stops_tells_the_first_one_as_soon_as_there_is_room():
    second = Second()
    assert second.event(Tell(Stop(2))) == [Decided(Result(130, "", 2))]
    assert second.event(Tell(Leave())) == []
    greeting_of = messages.hello(second.state.job)
    assert second.connect() == [Send(1, greeting_of), Send(1, {"stop": 2})]
    close, again = second.hear({"later": True})
    assert (close.conn, again) == (1, Connect(1))
    assert second.event(Unreachable("nothing listens there"), after=1) == [Connect(0.125)]
    assert second.connect() == [Send(1, greeting_of), Send(1, {"stop": 2})]
    assert second.hear({"welcome": True}) == [Left()]


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("how", ["refuses", "hangs up", "welcomes"])
def test_a_stop_is_a_stop_whatever_the_first_host_makes_of_it(how, leaves):
    second = Second()
    second.connect()
    assert second.event(Tell(Stop(15)))[1:] == [Decided(Result(143, "", 15))]
    if leaves:
        assert second.event(Tell(Leave())) == []
    if how == "refuses":
        done = second.hear({"refused": "algo-2 has joined already, from 10.0.0.9"})
    elif how == "hangs up":
        done = second.event(Closed(1, "its launcher died"))
    else:
        done = second.hear({"welcome": True})
    assert done == ([Left()] if leaves else [])
    assert leaves or second.event(Tell(Leave())) == [Left()]


def test_a_stop_after_a_failure_before_the_start_changes_nothing(job):
    job.join(SECOND, fingerprint={})
    job.event(SECOND, own("it cannot\n", 2))
    job.event(SECOND, Tell(Stop(15)))
    assert job.results() == {SECOND: []}
    job.join(FIRST, THIRD)
    job.wait(1)
    assert job.result() == Result(2, "it cannot\n")


# Which failure counts


@pytest.mark.parametrize("host", HOSTS)
def test_a_failure_anywhere_is_the_result_everywhere(all_run, host):
    all_run.event(host, own("rank 1 failed\n", 3))
    all_run.wait(0.4)
    assert all_run.result() == Result(3, "rank 1 failed\n")


def test_the_better_cause_of_a_moment_counts(all_run):
    all_run.event(SECOND, fail(Cause.SECONDARY, text="connection reset\n"))
    all_run.event(THIRD, fail(Cause.TORCHRUN, 69, "torchrun failed\n"))
    all_run.event(FIRST, own("loss is nan\n"))
    all_run.wait(0.4)
    assert all_run.result().text == "loss is nan\n"


@pytest.mark.parametrize(
    ("cause", "patience"),
    [
        (Cause.OWN, 0.3),
        (Cause.HOST_LOST, 0.5),
        (Cause.TORCHRUN, 1),
        (Cause.ABORTED, 3),
        (Cause.SECONDARY, 3),
    ],
)
def test_the_first_host_waits_for_a_better_cause(all_run, cause, patience):
    all_run.event(SECOND, fail(cause))
    all_run.wait(patience - 0.01)
    assert all(told == [] for told in all_run.results().values())
    all_run.event(THIRD, fail(cause, 7, "later\n"))  # which is none, and does not prolong the wait
    all_run.wait(0.02)
    assert all_run.result() == Result(1, "loss is nan\n")


def test_an_abort_counts_before_a_secondary_failure_that_was_said(all_run):
    all_run.event(SECOND, fail(Cause.SECONDARY, text="connection reset\n"))
    all_run.event(THIRD, fail(Cause.ABORTED, 134, "killed by SIGABRT\n"))
    all_run.wait(3.1)
    assert all_run.result() == Result(134, "killed by SIGABRT\n")


def test_a_secondary_failure_alone_counts_in_the_end(all_run):
    all_run.event(SECOND, fail(Cause.SECONDARY, text="connection reset\n"))
    all_run.wait(3.1)
    assert all_run.result().text == "connection reset\n"


@pytest.mark.parametrize(("seconds", "counts"), [(0.5, True), (4.9, True), (5.1, False)])
def test_a_restarted_rank_is_the_cause_of_a_secondary_failure(all_run, seconds, counts):
    """Of one that comes within 5 s."""
    all_run.event(SECOND, fail(Cause.RESTARTED, text="loss is nan\n"))
    all_run.event(THIRD, fail(Cause.RESTARTED, text="later\n"))
    all_run.wait(seconds)
    assert all(told == [] for told in all_run.results().values())
    all_run.event(FIRST, fail(Cause.SECONDARY, text="connection closed\n"))
    all_run.wait(3.1)
    assert all_run.result().text == ("loss is nan\n" if counts else "connection closed\n")


def test_a_restart_alone_ends_nothing(all_run):
    all_run.event(SECOND, fail(Cause.RESTARTED))
    all_run.wait(10)
    assert all(told == [] for told in all_run.results().values())
    assert agreement.due(all_run.states[FIRST]) == math.inf
    all_run.event(THIRD, Tell(Stop(15)))
    assert all_run.result() == Result(143, "", 15)


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_is_lost_is_named_by_all(all_run, host):
    all_run.die(host)
    all_run.wait(0.6)
    text = f"{host} was lost: its launcher died\nexit code 69\n"
    assert all_run.result() == Result(69, text)
    lost = [all_run.of(left, Decided)[0].store_is_lost for left in all_run.states]
    assert lost == [host == FIRST] * 2


def test_the_first_host_is_lost_before_the_start(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.die(FIRST)
    assert job.result().text.startswith("algo-1 was lost: its launcher died\n")


def test_a_failure_before_the_start_of_a_host_that_could_start(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.event(SECOND, own("no more threads\n"))
    job.die(SECOND)  # which is not the better cause
    job.wait(0.4)
    assert job.result() == Result(1, "no more threads\n")
    job.join(SECOND, THIRD)
    job.wait(0.1)
    assert job.result() == Result(1, "no more threads\n")


def test_a_host_that_knows_the_result_may_go(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.event(SECOND, Tell(Stop(15)))
    job.die(SECOND)
    job.event(FIRST, Tell(Leave()))
    job.wait(1)
    assert not job.of(FIRST, Left)
    job.join(THIRD)
    job.wait(0.1)
    assert job.of(FIRST, Left)
    assert job.result() == Result(143, "", 15)


def test_a_host_that_is_lost_while_a_better_cause_is_waited_for(all_run):
    all_run.event(SECOND, fail(Cause.SECONDARY))
    all_run.wait(1)
    all_run.die(THIRD)
    all_run.wait(0.6)
    assert all_run.result().text.startswith("algo-3 was lost: ")


def test_a_failure_that_is_taken_back_while_it_is_waited_for(all_run):
    """An exception hook may end a rank with 0 that has said that it fails."""
    all_run.event(SECOND, fail(Cause.SECONDARY))
    for host in HOSTS:
        all_run.event(host, Tell(Succeeded()))
    assert all_run.result() == Result(0)


def test_a_host_that_is_lost_before_the_start_ends_the_job(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.die(SECOND)
    job.join(THIRD)
    job.wait(1)
    assert job.result().text.startswith("algo-2 was lost: its launcher died\n")


@pytest.mark.parametrize("host", HOSTS)
def test_a_stop_anywhere_stops_all(all_run, host):
    all_run.event(host, Tell(Stop(15)))
    assert all_run.result() == Result(143, "", 15)


@pytest.mark.parametrize("before", [Cause.OWN, Cause.HOST_LOST, Cause.TORCHRUN, Cause.SECONDARY])
def test_a_stop_does_not_hide_a_failure_before_it(all_run, before):
    all_run.event(SECOND, fail(before, 3))
    all_run.event(THIRD, Tell(Stop(15)))
    all_run.wait(3.1)
    assert all_run.result() == Result(3, "loss is nan\n")


def test_what_comes_after_the_result_changes_nothing(all_run):
    all_run.event(SECOND, Tell(Stop(15)))
    all_run.event(THIRD, own("loss is nan\n"))
    all_run.die(THIRD)
    all_run.wait(5)
    assert all_run.result() == Result(143, "", 15)


def test_success_is_known_when_all_have_succeeded(all_run):
    all_run.event(FIRST, Tell(Succeeded()))
    all_run.event(THIRD, Tell(Succeeded()))
    all_run.wait(100)
    assert all(told == [] for told in all_run.results().values())
    all_run.event(SECOND, Tell(Succeeded()))
    assert all_run.result() == Result(0)
    for host in HOSTS:
        all_run.event(host, Tell(Leave()))
        assert all_run.of(host, Left) == [Left()]


# Who connects


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"hello": 1},
        {"result": {"exit_code": 1}},
        {"failure": {"cause": "OWN", "exit_code": 1, "text": ""}},
        hello(SECOND, name="another"),
        hello(FIRST),
        hello("algo-9"),
        hello(SECOND, host=[SECOND]),
        hello(SECOND, job=nested(900)),
        {"hello": {"job": "job", "host": SECOND, "fingerprint": {"script": nested(900)}}},
        hello(SECOND, host="algo-9\x1b[31m\n\ud800"),
        {"hello": {"job": "job", "host": SECOND, "fingerprint": 7}},
        {"hello": {"job": "job", "host": SECOND, "fingerprint": {"script": {}}}},
    ],
    ids=range(13),
)
def test_what_no_host_of_this_job_says_changes_nothing(job, said):
    job.join(FIRST, THIRD)
    job.wait(1)
    job.stray(said, conn="stray")
    assert "stray" in job.closed
    job.join(SECOND)
    job.wait(2)
    assert all(map(job.has_started, HOSTS))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (hello(THIRD, name="another"), "this is job job, not 'another'"),
        (hello("algo-9"), "'algo-9' is not another host of this job"),
        (hello(SECOND), "algo-2 has joined already, from 10.0.0.2"),
    ],
    ids=["another job", "no host of it", "a second one"],
)
def test_a_connection_is_refused(job, said, why):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.stray(said, conn="stray")
    assert job.sent["stray"] == [{"refused": why}]
    assert job.lines(FIRST) == [f"refused a connection from 10.9.9.9 to port 29401: {why}."]
    assert "stray" in job.closed
    for number in range(100):
        job.stray(said, conn=f"stray {number}")
    assert len(job.lines(FIRST)) == 20


def test_fifty_silent_connections_have_4_seconds(job):
    job.join(FIRST, SECOND)
    for number in range(50):
        job.stray(conn=f"stray {number}")
    job.wait(3.9)
    assert not job.closed
    job.wait(0.2)
    assert len(job.closed) == 50
    job.join(THIRD)
    job.wait(1)
    assert all(map(job.has_started, HOSTS))


def test_a_hello_behind_a_broken_rule_does_not_count(job):
    job.join(FIRST, SECOND)
    job.stray({}, hello(THIRD), conn="stray")
    job.wait(1)
    assert not job.has_started(FIRST) and job.results()[FIRST] == []
    job.join(THIRD)
    job.wait(1)
    assert all(map(job.has_started, HOSTS))


def test_pending_connections_are_closed_when_all_have_joined(job):
    job.join(FIRST, SECOND)
    for number in range(3):
        job.stray(conn=number + 100)
    job.join(THIRD)
    job.wait(1)
    assert not job.listens
    assert job.closed == {100, 101, 102}
    job.stray(hello(SECOND), conn="late")  # it came in the same moment
    job.say(100, hello(SECOND), {"stop": 15})
    assert "late" in job.closed and "late" not in job.sent and 100 not in job.sent
    assert agreement.due(job.states[FIRST]) == math.inf
    assert job.results()[FIRST] == []


def test_pending_connections_make_way_where_there_is_no_room(job):
    job.join(FIRST, SECOND)
    for number in range(3):
        job.stray(conn=number + 100)
    job.event(FIRST, Full())
    state = job.states[FIRST]
    assert first.due(state) == pytest.approx(job.now + 0.05)
    _, actions = first.step(state, Time(), job.now + 0.05)
    assert [action for action in actions if isinstance(action, Send)] == [
        Send(number, {"later": True}) for number in (100, 101, 102)
    ]
    assert [action.conn for action in actions if isinstance(action, Close)] == [100, 101, 102]
    assert actions[-1] == Accept()


def test_a_pending_connection_that_ends_is_forgotten(job):
    job.join(FIRST, SECOND)
    job.stray(conn="stray")
    job.event(FIRST, Closed("stray", "its launcher died"))
    job.wait(10)
    assert job.closed == set() and job.results()[FIRST] == []


@pytest.mark.parametrize("what", ["taken", "no such address"])
def test_a_first_host_that_cannot_listen(what):
    state, actions = first.begin(agreement.job_of(FIRST, HOSTS, "job", 29401, 60, SAME), 0)
    event = CannotListen("Address already in use", taken=what == "taken")
    tries = 0
    while actions == (Listen(),):
        tries += 1
        state, actions = first.step(state, event, tries - 1)
        if first.due(state) < 5:
            assert first.due(state) == tries
            state, actions = first.step(state, Time(), tries)
    says = "algo-1 cannot listen on port 29401 for the launchers of the other hosts (Address "
    says += "already in use); choose another with --launcher-peer-port, the same one on every host."
    assert actions == (Fail(says, 2),)
    assert tries == (4 if what == "taken" else 1)


@pytest.mark.parametrize("cannot_start", [False, True])
def test_a_port_that_is_taken_only_for_a_moment(cannot_start):
    """Also where the first host is about to leave: the others are to hear of it."""
    fingerprint = {} if cannot_start else SAME
    state, _ = first.begin(agreement.job_of(FIRST, HOSTS, "job", 29401, 60, fingerprint), 0)
    if cannot_start:
        state, _ = first.step(state, own("it cannot\n", 2), 0)
        state, _ = first.step(state, Tell(Leave()), 0)
        state, _ = first.step(state, Time(), 0.3)
    state, actions = first.step(state, CannotListen("Address already in use", True), 0.5)
    assert (actions, first.due(state)) == ((), 1.5)
    state, actions = first.step(state, Time(), 1.5)
    assert actions == (Listen(),)
    state, actions = first.step(state, Listening(False), 1.5)
    assert actions == ()
    for conn, host in enumerate(HOSTS[1:]):
        state, _ = first.step(state, Connected(conn, "10.0.0.2", "10.0.0.1"), 1.6)
        state, actions = first.step(state, Received(conn, hello(host)), 1.6)
    assert actions[-1] == (Left() if cannot_start else AllJoined("10.0.0.1", False))


# What the first host is told


FAILURE = {"cause": "OWN", "exit_code": 3, "text": "loss is nan\n"}


def test_messages_that_are_not_valid_are_ignored(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    job.stray(hello(THIRD), conn="third")
    assert job.has_started(FIRST)
    failures = [1, {}, nested(900)]
    failures += [{**FAILURE, "exit_code": code} for code in (0, -1, 256, 10**17, True, "3", 3.0)]
    failures += [{**FAILURE, "exit_code": None}]
    failures += [{**FAILURE, "cause": cause} for cause in (-1, 0, False, "own", "", None, [])]
    failures += [{**FAILURE, "text": text} for text in ("", " \n", None, 7, ["x"])]
    others = [{"stop": number} for number in (0, 9, 64, -15, 15.0, "15", True)]
    others += [{"what": 1}, {"succeeded": 0}, {"succeeded": 1}, {}]
    job.say("third", *({"failure": failure} for failure in failures), *others)
    job.wait(10)
    job.event(FIRST, Tell(Succeeded()))
    job.event(SECOND, Tell(Succeeded()))
    job.wait(10)
    assert job.results() == {FIRST: [], SECOND: []}


def test_a_text_from_outside_is_cut_and_shows_control_characters(job):
    job.join(FIRST, SECOND)
    job.wait(1)
    text = "\nloss\x1b[31m is\rnan\u2028\x00\nlauncher: more\n" + 5000 * "x"
    job.stray(hello(THIRD), {"failure": {**FAILURE, "text": text}}, conn="third")
    job.wait(1)
    result = job.result()
    lines = result.text.splitlines()
    assert lines[:2] == [r"loss\x1b[31m is\rnan\u2028\x00", "launcher: more"]
    assert len(lines) == 3 and len(result.text) == LIMIT


def test_a_failure_without_words_is_a_failure(all_run):
    all_run.event(SECOND, own(" \n", 0))
    all_run.wait(1)
    assert all_run.result() == Result(1, "algo-2 failed\n")


# What another host is told


class Second:
    """The second host, whose first one is played by the test."""

    def __init__(self, timeout=60):
        job = agreement.job_of(SECOND, HOSTS, "job", 29401, timeout, SAME)
        self.state, _ = other.begin(job, 0)
        self.now = 0.0

    def event(self, event, after=0.0):
        self.now += after
        self.state, actions = other.step(self.state, event, self.now)
        return list(actions)

    def connect(self):
        return self.event(Connected(1, "10.0.0.1", "10.0.0.2"))

    def hear(self, *said):
        return [done for message in said for done in self.event(Received(1, message))]


def test_a_first_host_that_is_none_cannot_make_another_succeed():
    second = Second()
    second.connect()
    assert second.hear({"all joined": True}) == []  # not before it is welcome
    assert second.hear({"welcome": True}, {"all joined": True}) == [AllJoined("10.0.0.2")]
    result = {"exit_code": 3, "text": "loss is nan\n", "stop_signal": 0}
    wrong = [{"exit_code": 0, "text": ""}, {"exit_code": 300}, {"exit_code": True}]
    wrong += [{"stop_signal": 9}, {"stop_signal": "15"}, {"text": 1}, {"text": ""}]
    assert second.hear(*({"result": {**result, **change}} for change in wrong)) == []
    assert second.hear({"result": 1}, {}, {"what": 1}, {"welcome": True}, {"later": True}) == []
    assert second.event(Tell(Succeeded())) == [Send(1, {"succeeded": True})]
    assert second.hear({"result": {**result, "exit_code": 0}}) == [Decided(Result(0))]


def test_who_is_missing_is_said_if_it_can_be():
    second = Second()
    second.connect()
    second.hear({"welcome": True})
    wrong = [1, [], [["\x1b", True]], [[THIRD, 7]], [[THIRD]], [THIRD], [[THIRD, None]] * 9]
    assert second.hear(*({"missing": missing, "more": 0} for missing in wrong)) == []
    assert second.hear(*({"missing": [[THIRD, None]], "more": more} for more in (-1, 9, "1"))) == []
    line = "waiting for algo-3 (no answer from DNS) and 1 more."
    assert second.hear({"missing": [[THIRD, None]], "more": 1}) == [Log(line)]


def test_a_refusal_is_one_line():
    second = Second()
    second.connect()
    (fails,) = second.hear({"refused": "\x1b[31m\nlauncher: " + 5000 * "x"})
    assert fails.text.startswith(r"the launcher of algo-1 refused algo-2: \x1b[31m\nlauncher: x")
    assert fails.exit_code == 2
    assert len(fails.text) < LIMIT
    assert fails.text.isprintable()


def test_a_host_that_finds_no_room_comes_again():
    second = Second()
    assert second.connect() == [Send(1, messages.hello(second.state.job))]
    actions = second.event(own("it cannot\n", 2))
    told = messages.told(Failure(Cause.OWN, 2, "it cannot\n"))
    assert actions == [Send(1, told)]
    close, again = second.hear({"later": True})
    assert (close.conn, again) == (1, Connect(other_greeting.RETRY_MOST))
    assert second.hear({"welcome": True}) == []  # from the connection that is closed
    actions = second.event(Connected(2, "10.0.0.1", "10.0.0.2"), after=1)
    assert actions == [Send(2, messages.hello(second.state.job)), Send(2, told)]


@pytest.mark.parametrize("how", ["hangs up", "says nothing"])
def test_something_else_answers_in_the_first_hosts_place(how):
    second = Second()
    second.connect()
    if how == "hangs up":
        (fails,) = second.event(Closed(1, "its launcher died"))
    else:
        assert second.event(Time(), after=9.9) == []
        assert other.due(second.state) == 10
        (fails,) = second.event(Time(), after=0.1)
    assert fails == Fail(
        "what answers on port 29401 of algo-1 is not this job's launcher; "
        "choose another with --launcher-peer-port, the same one on every host.",
        69,
    )


# The rules themselves


@pytest.mark.parametrize("machine", [first, other])
def test_each_rule_says_what_happens(machine):
    for rule in machine.RULES:
        assert rule.says.rstrip(")").endswith("."), rule
        assert rule.phases


@pytest.mark.parametrize("machine", [first, other])
def test_an_event_without_a_rule_changes_nothing(machine):
    for host in HOSTS[:2]:
        state, _ = agreement.begin(agreement.job_of(host, HOSTS, "job", 1, 60, SAME), 0)
        for event in (Closed(7, "its launcher died"), Received(7, {"stop": 15}), Full):
            assert agreement.step(state, event, 1) == (state, ())
