"""The channel between the launchers of a job: real sockets on loopback addresses, no torch."""

import contextlib
import json
import os
import random
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import free_port, poll
from network import Network

from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.peers import channel as peers
from launcher.peers import entrance
from launcher.peers import other as other_host
from launcher.peers.connection import Wire
from launcher.result.failure import ABORTED, BROKEN, ECHO, LIMIT, LOST, OWN, RESTARTED, Verdict

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
ALIKE = {"version of torch": "2.13", "script": "script train.py"}


class Job:
    """Hosts of one job, each with its end of the channel, all in this process."""

    def __init__(self, hosts=HOSTS):
        self.hosts = hosts
        self.port = free_port()
        self.ends = {}

    def join(self, *hosts, job="job", alike=ALIKE, timeout=60, of=None):
        for host in hosts or self.hosts:
            cluster = Cluster(of or self.hosts, host, job, 0, 0, "")
            self.ends[host] = peers.join(cluster, self.port, timeout, alike)
        return [self.ends[host] for host in hosts or self.hosts]

    def wait(self, condition, timeout=20):
        def met():
            for end in self.ends.values():
                end.act()
            return condition()

        poll(met, timeout, every=0.01)

    def all_go(self):
        self.wait(lambda: all(end.go for end in self.ends.values()))

    def verdicts(self, alike=True):
        """Wait for a verdict everywhere; return it, or the first host's."""
        self.wait(lambda: all(end.verdict for end in self.ends.values()))
        verdicts = [end.verdict for end in self.ends.values()]
        assert not alike or set(verdicts) == {verdicts[0]}
        return verdicts[0]

    def stranger(self, data=b""):
        connection = socket.create_connection((self.hosts[0], self.port), 5)
        connection.sendall(data)
        connection.settimeout(10)
        return connection


@pytest.fixture
def job():
    job = Job()
    yield job
    for end in job.ends.values():
        end.close()


def test_all_go_when_the_last_is_there(job):
    job.join(*HOSTS[:2])
    time.sleep(0.5)
    job.wait(lambda: True)
    assert not any(end.go for end in job.ends.values())
    job.join(HOSTS[2])
    job.all_go()


def test_the_others_may_come_first(job):
    job.join(*HOSTS[1:])
    time.sleep(0.5)
    job.join(HOSTS[0])
    job.all_go()


@pytest.mark.parametrize("host", HOSTS)
def test_a_failure_anywhere_is_the_verdict_everywhere(job, host):
    job.join()
    job.all_go()
    job.ends[host].case(OWN, 3, "rank 1 failed\n")
    assert job.verdicts() == Verdict(3, "rank 1 failed\n")


def test_the_better_case_of_a_moment_counts(job):
    first, second, third = job.join()
    job.all_go()
    second.case(ECHO, 1, "connection reset\n")
    third.case(BROKEN, 69, "torchrun failed\n")
    first.case(OWN, 1, "loss is nan\n")
    assert job.verdicts().text == "loss is nan\n"


def test_an_abort_counts_before_an_echo_that_was_said(job):
    _, second, third = job.join()
    job.all_go()
    second.case(ECHO, 1, "connection reset\n")
    third.case(ABORTED, 134, "killed by SIGABRT\n")
    assert job.verdicts() == Verdict(134, "killed by SIGABRT\n")


def test_an_echo_alone_counts_in_the_end(job):
    _, second, _ = job.join()
    job.all_go()
    second.case(ECHO, 1, "connection reset\n")
    assert job.verdicts().text == "connection reset\n"


@pytest.mark.parametrize("host", HOSTS)
def test_a_stop_anywhere_stops_all(job, host):
    job.join()
    job.all_go()
    job.ends[host].stop(15)
    assert job.verdicts() == Verdict(143, "", 15)


def test_success_is_known_when_all_have_succeeded(job):
    first, second, third = job.join()
    job.all_go()
    first.done()
    third.done()
    time.sleep(0.3)
    job.wait(lambda: True)
    assert not any(end.verdict for end in job.ends.values())
    second.done()
    assert job.verdicts() == Verdict(0)


def test_long_arguments_are_compared(job):
    """SageMaker takes 100 hyperparameters of 2,500 characters each."""
    long = ["x" * 2500] * 100
    job.join(*HOSTS[:2], alike={"script's arguments": long})
    job.join(HOSTS[2], alike={"script's arguments": [*long, "y"]})
    first = job.verdicts().text.splitlines()[0]
    assert job.verdicts().exit_code == 2
    assert first.startswith("launcher: 127.0.0.1 and 127.0.0.3 differ in their script's arguments")
    assert len(first) < 600


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_is_lost_is_named_by_all(job, host):
    job.join()
    job.all_go()
    job.ends.pop(host).close()
    text = f"{host} was lost: its launcher ended without a word\nexit code 69\n"
    assert job.verdicts() == Verdict(69, text)


def test_hosts_that_never_come_are_named(job):
    job.join(*HOSTS[:1], timeout=4)
    job.join(HOSTS[1], timeout=60)
    verdict = job.verdicts()
    assert verdict.exit_code == 69
    first = "127.0.0.3 (its name resolves) did not arrive within 4 s"
    assert verdict.text.splitlines()[0] == first


def test_a_first_host_that_never_comes(job):
    job.join(HOSTS[1], timeout=1)
    verdict = job.verdicts()
    assert verdict.exit_code == 69
    assert verdict.text.startswith("127.0.0.1 did not arrive within 1 s (nothing listens there)\n")


@pytest.mark.parametrize(
    ("what", "theirs"),
    [
        ("version of torch", {**ALIKE, "version of torch": "2.4"}),
        ("script", {**ALIKE, "script": "x"}),
    ],
)
def test_what_has_to_agree_is_compared(job, what, theirs):
    job.join(*HOSTS[:2])
    job.join(HOSTS[2], alike=theirs)
    verdict = job.verdicts()
    assert verdict.exit_code == 2
    assert verdict.text == (
        f"launcher: 127.0.0.1 and 127.0.0.3 differ in their {what}: {ALIKE[what]!r} and "
        f"{theirs[what]!r}; expected the same on every host.\n"
    )


def test_lists_of_hosts_are_compared(job):
    job.join(HOSTS[0])
    job.join(HOSTS[1], of=HOSTS[:2])
    assert "differ in their list of hosts" in job.verdicts().text


def test_a_mistake_on_a_host_is_told(job):
    job.join(*HOSTS[:2])
    (third,) = job.join(HOSTS[2], alike={})
    third.case(OWN, 2, "127.0.0.3: there is no such file\n")
    assert job.verdicts() == Verdict(2, "127.0.0.3: there is no such file\n")


def hello(host, job="job", hosts=HOSTS, **more):
    alike = {"list of hosts": peers._bounded(list(hosts)), **ALIKE}
    message = {"hello": {"job": job, "host": host, "alike": alike, **more}}
    return json.dumps(message).encode() + b"\n"


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    "data",
    [
        random.Random(0).randbytes(5000),
        b"x" * 1_000_000,
        b"\n\n\n",
        b"[" * 50_000 + b"\n",
        b"{}\n",
        b"null\n",
        b'{"hello": 1}\n',
        b'{"verdict": {"exit_code": 1}}\n',
        b'{"case": {"kind": 0, "exit_code": 1, "text": ""}}\n',
        hello("127.0.0.2", job="another"),
        hello("127.0.0.1"),
        hello("127.0.0.9"),
        hello(["127.0.0.2"]),
        hello("127.0.0.2", job=nested(900)),
        hello("127.0.0.2", alike={**ALIKE, "script": nested(900)}),
        hello("127.0.0.2", alike=7),
        hello("127.0.0.9\x1b[31m\n\ud800"),
    ],
    ids=range(17),
)
def test_garbage_changes_nothing(job, data):
    job.join(*HOSTS[:2])
    job.wait(lambda: len(job.ends[HOSTS[0]]._wires) == 1)

    def send():
        try:
            stranger = job.stranger(data)
            while stranger.recv(1000):
                pass
        except OSError:
            pass

    sender = threading.Thread(target=send)
    sender.start()
    job.wait(lambda: not sender.is_alive())
    job.join(HOSTS[2])
    job.all_go()


def test_fifty_silent_connections_and_a_second_hello_change_nothing(job):
    job.join(*HOSTS[:2])
    silent = [job.stranger() for _ in range(50)]
    job.wait(lambda: len(job.ends[HOSTS[0]]._wires) == 1)
    second = job.stranger(hello(HOSTS[1]))
    job.wait(lambda: len(job.ends[HOSTS[0]]._entrance.strangers) == 50)
    assert b"127.0.0.2 is here already" in second.recv(1000)
    job.join(HOSTS[2])
    job.all_go()
    job.wait(lambda: not job.ends[HOSTS[0]]._entrance.strangers)  # each has 4 s to say something
    for connection in silent:
        connection.close()
    assert not any(end.verdict for end in job.ends.values())


def test_a_hello_behind_a_broken_rule_does_not_count(job):
    job.join(*HOSTS[:2])
    job.stranger(b"{}\n" + hello(HOSTS[2]))
    time.sleep(0.3)
    job.wait(lambda: True)
    assert not any(end.go or end.verdict for end in job.ends.values())
    job.join(HOSTS[2])
    job.all_go()


def test_nobody_can_connect_any_more_when_all_are_there(job):
    job.join(*HOSTS[:2])
    job.wait(lambda: len(job.ends[HOSTS[0]]._wires) == 1)
    silent = [job.stranger() for _ in range(3)]
    job.join(HOSTS[2])
    job.all_go()
    with pytest.raises(ConnectionRefusedError):
        job.stranger()
    assert [connection.recv(1) for connection in silent] == [b""] * 3


def test_more_silent_connections_than_there_is_room_for(job):
    job.join(*HOSTS[:2])
    silent = [job.stranger() for _ in range(2 * entrance._STRANGERS)]
    job.join(HOSTS[2])
    job.all_go()  # those behind it make way, and it need not have come first
    for connection in silent:
        connection.close()


def test_hosts_by_the_hundred_arrive_at_once():
    job = Job(tuple(f"127.0.0.{number}" for number in range(1, 151)))
    with contextlib.ExitStack() as stack:
        for end in job.join():
            stack.enter_context(end)
        job.all_go()


# Shows how a first host does with a limit on open files, and which one its child has.
FIRST = """
import json, resource, subprocess, sys
from launcher.peers import channel as peers
from launcher.job.cluster import Cluster
from launcher.signals import Signals

port, *limits = map(int, sys.argv[1:])
hosts = tuple(json.load(sys.stdin))
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))
cluster = Cluster(hosts, hosts[0], "job", 0, 0, "")
alike = {"version of torch": "2.13", "script": "script train.py"}
with Signals() as signals, peers.join(cluster, port, 60, alike) as channel:
    print("listens", flush=True)
    channel.roll_call(signals)
    child = subprocess.Popen(["sleep", "60"])
    channel.give_back_limit(child.pid)
    childs = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
    child.kill()
    child.wait()
    print(json.dumps([channel.go, channel.verdict and channel.verdict.text, childs]), flush=True)
"""


@contextlib.contextmanager
def first_of(hosts, port, soft, hard):
    command = [sys.executable, "-c", FIRST, str(port), str(soft), str(hard)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            process.stdin.write(json.dumps(hosts))
            process.stdin.close()
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("soft", "hard"), [(330, 330), (100, 4000)])
def test_hosts_by_the_hundred_silent_ones_and_few_descriptors(soft, hard):
    hosts, port = ["127.0.0.1", *(f"host-{number:03}" for number in range(1, 300))], free_port()

    def arrive(host):
        connection = socket.create_connection((hosts[0], port), 20)
        connection.sendall(hello(host, hosts=hosts))
        return connection.makefile("rb")

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with first_of(hosts, port, soft, hard) as first, contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(64):
            stack.enter_context(socket.create_connection((hosts[0], port), 20))
        arrived = {host: arrive(host) for host in hosts[1:]}
        for host in hosts[1:]:
            while (said := json.loads(arrived[host].readline())) == {"later": True}:
                arrived[host].close()
                arrived[host] = arrive(host)
            assert said == {"welcome": True}
        assert {file.readline() for file in arrived.values()} == {b'{"go": true}\n'}
        assert json.loads(first.stdout.readline()) == [True, None, [soft, hard]]
        for file in arrived.values():
            file.close()


def test_a_limit_on_open_files_that_is_too_small():
    hosts, port = ["127.0.0.1", *(f"host-{number:03}" for number in range(1, 300))], free_port()
    with first_of(hosts, port, 100, 200) as first:
        go, text, _ = json.loads(first.stdout.readline())
    assert not go
    assert text.startswith("launcher: 127.0.0.1 can have 200 files open (ulimit -n), but the ")
    assert text.count("\n") == 1


@pytest.mark.parametrize("what", ["connects", "speaks", "has spoken"])
def test_a_stray_connection_in_the_same_moment_as_the_last_hello(job, what):
    first, _ = job.join(*HOSTS[:2])
    job.wait(lambda: len(first._wires) == 1)
    stray = None if what == "connects" else job.stranger()
    last = job.stranger()
    job.wait(lambda: len(first._entrance.strangers) == (1 if what == "connects" else 2))
    job.wait(lambda: True)  # the listener is not the first of the next turn any more
    if what == "has spoken":
        stray.sendall(b"{}\n")
    last.sendall(hello(HOSTS[2]))
    if what == "connects":
        stray = job.stranger()
    elif what == "speaks":
        stray.sendall(b"{}\n")
    job.all_go()
    assert first.timeout() is None
    with contextlib.suppress(ConnectionResetError):
        assert stray.recv(1) == b""


def test_a_list_of_many_long_names():
    names = tuple(f"host-{number:04}-{'x' * 240}" for number in range(1998))
    job = Job((*HOSTS[:2], *names))
    with contextlib.ExitStack() as stack:
        for end in job.join(*HOSTS[:2], timeout=1):
            stack.enter_context(end)
        verdict = job.verdicts()
    assert verdict.exit_code == 69
    assert verdict.text.startswith("host-0000-x")
    assert "and 1996 more did not arrive within 1 s\n" in verdict.text
    assert len(verdict.text) <= LIMIT
    job = Job((*HOSTS[:2], *names))
    with contextlib.ExitStack() as stack:
        stack.enter_context(*job.join(HOSTS[0]))
        stack.enter_context(*job.join(HOSTS[1], of=(*HOSTS[:2], *names[:-1])))
        verdict = job.verdicts()
    assert verdict.exit_code == 2
    assert "differ in their list of hosts: '" in verdict.text
    assert "(2000 in all, SHA-256 " in verdict.text and "(1999 in all" in verdict.text
    assert len(verdict.text) <= LIMIT


def test_nobody_starts_while_a_mistake_is_on_its_way(job):
    first, _, third = job.join(*HOSTS[:2]) + job.join(HOSTS[2], alike={})
    job.wait(lambda: len(first._wires) == 2)
    assert not first.go and first.verdict is None
    third.case(OWN, 2, "it cannot\n")
    assert job.verdicts() == Verdict(2, "it cannot\n")
    assert not any(end.go for end in job.ends.values())


def test_a_host_that_cannot_start_and_does_not_say_why(job):
    job.join(*HOSTS[:2])
    job.join(HOSTS[2], alike={})
    assert job.verdicts() == Verdict(2, "127.0.0.3 cannot start, and did not say why\n")


def test_a_restart_before_the_start_is_no_case(job):
    job.join(*HOSTS[:2])
    connection = job.stranger(hello(HOSTS[2], alike={}))
    restarted = {"case": {"kind": RESTARTED, "exit_code": 1, "text": "x"}}
    connection.sendall(json.dumps(restarted).encode() + b"\n")
    assert job.verdicts().text == "127.0.0.3 cannot start, and did not say why\n"


def test_a_restarted_rank_is_the_cause_of_an_echo(job):
    first, second, _ = job.join()
    job.all_go()
    second.case(RESTARTED, 1, "loss is nan\n")
    time.sleep(0.5)
    job.wait(lambda: True)
    assert not any(end.verdict for end in job.ends.values())
    first.case(ECHO, 1, "connection closed\n")
    assert job.verdicts().text == "loss is nan\n"


@pytest.mark.parametrize("before", [OWN, LOST, BROKEN, ECHO])
def test_a_stop_does_not_hide_a_failure_before_it(job, before):
    first, second, third = job.join()
    job.all_go()
    second.case(before, 3, "loss is nan\n")
    first.act()
    third.stop(15)
    assert job.verdicts() == Verdict(3, "loss is nan\n")


CASE = {"kind": 0, "exit_code": 3, "text": "loss is nan\n"}


def test_messages_that_are_not_valid_are_no_verdict(job):
    job.join(*HOSTS[:2])
    third = job.stranger(hello(HOSTS[2]))
    job.all_go()
    cases = [1, {}, nested(900)]
    cases += [{**CASE, "exit_code": code} for code in (0, -1, 256, 10**17, True, "3", 3.0, None)]
    cases += [{**CASE, "kind": kind} for kind in (-1, 5, False, "0", 1e300)]
    cases += [{**CASE, "text": text} for text in ("", " \n", None, 7, ["x"])]
    others = [{"stop": number} for number in (0, 9, 64, -15, 15.0, "15", True)]
    others += [{"what": 1}, {"done": 0}, {"done": 1}, {}]
    for message in ({"case": case} for case in cases):
        third.sendall(json.dumps(message).encode() + b"\n")
    for message in others:
        third.sendall(json.dumps(message).encode() + b"\n")
    time.sleep(0.5)
    job.wait(lambda: True)
    assert not any(end.verdict for end in job.ends.values())
    assert not job.ends[HOSTS[0]]._done


@pytest.mark.parametrize(
    "line", [b"no JSON", b"[1]", b"NaN", b'{"x": 1e999}', b'{"x": ' + b"9" * 5000]
)
def test_what_no_launcher_says(job, line):
    job.join(*HOSTS[:2])
    third = job.stranger(hello(HOSTS[2]))
    job.all_go()
    third.sendall(line + b"\n")
    assert job.verdicts().text.startswith("127.0.0.3 was lost: it said what no launcher says\n")


def test_a_text_from_outside_is_cut_and_shows_control_characters(job):
    job.join(*HOSTS[:2])
    third = job.stranger(hello(HOSTS[2]))
    job.all_go()
    text = "\nloss\x1b[31m is\rnan\u2028\x00\nlauncher: more\n" + 5000 * "x"
    third.sendall(json.dumps({"case": {**CASE, "text": text}}).encode() + b"\n")
    verdict = job.verdicts()
    lines = verdict.text.splitlines()
    assert lines[:2] == [r"loss\x1b[31m is\rnan\u2028\x00", "launcher: more"]
    assert len(lines) == 3 and len(verdict.text) == LIMIT


@contextlib.contextmanager
def a_first_host(job):
    """Be the first host in place of a launcher, for the second."""
    with socket.create_server((HOSTS[0], job.port)) as server:
        (second,) = job.join(HOSTS[1])
        server.settimeout(20)

        def accept():
            connection, _ = server.accept()
            connection.settimeout(20)
            return connection

        yield second, accept


def say(connection, *messages):
    connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))


def test_a_first_host_that_is_none_cannot_make_another_succeed(job, capfd):
    with a_first_host(job) as (second, accept), accept() as connection:
        say(connection, {"welcome": True}, {"go": True})
        job.wait(lambda: second.go)
        verdict = {"exit_code": 3, "text": "loss is nan\n", "stop_signal": 0}
        wrong = [{"exit_code": 0, "text": ""}, {"exit_code": 300}, {"exit_code": True}]
        wrong += [{"stop_signal": 9}, {"stop_signal": "15"}, {"text": 1}, {"text": ""}]
        say(connection, *({"verdict": {**verdict, **change}} for change in wrong))
        say(connection, {"verdict": 1}, {"missing": [["\x1b", True]], "more": 0})
        say(connection, {"missing": [[HOSTS[2], 7]], "more": 0}, {"missing": 1})
        say(connection, {"missing": [[HOSTS[2], None]], "more": 1})
        poll(lambda: second.act() or "waiting for" in capfd.readouterr().err)
        assert second.verdict is None
        second.done()
        say(connection, {"verdict": {**verdict, "exit_code": 0}})
        assert job.verdicts() == Verdict(0)


def test_a_refusal_is_one_line(job):
    with a_first_host(job) as (_, accept), accept() as connection:
        say(connection, {"refused": "\x1b[31m\nlauncher: " + 5000 * "x"})
        with pytest.raises(
            LaunchError, match=r"refused 127.0.0.2: \\x1b\[31m\\nlauncher"
        ) as raised:
            job.wait(lambda: False)
    assert len(str(raised.value)) < LIMIT
    assert str(raised.value).isprintable()


def test_a_host_that_finds_no_room_comes_again(job, monkeypatch):
    monkeypatch.setattr(other_host, "_RETRY_MOST", 0.1)  # s
    with a_first_host(job) as (second, accept):
        with accept() as connection:
            job.wait(lambda: second._wire)
            say(connection, {"later": True})
            second.case(OWN, 2, "it cannot\n")
            job.wait(lambda: second._wire is None)
        heard = []
        with accept() as connection:
            job.wait(lambda: second._wire)
            while len(heard) < 2:
                heard += [json.loads(line) for line in connection.recv(9000).splitlines()]
    assert heard[0]["hello"]["host"] == HOSTS[1]
    assert heard[1]["case"]["text"] == "it cannot\n"


def test_a_connection_that_takes_nothing_is_lost():
    import selectors

    with socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as selector:
        connection = socket.create_connection(server.getsockname())
        with server.accept()[0]:
            wire = Wire(connection, selector, Wire.read)
            for _ in range(1000):
                wire.say({"text": 60_000 * "x"})
            assert not wire.closed_by
            for key, _ in selector.select(10):
                key.data()
            assert wire.closed_by == "it does not listen"


def test_a_port_that_is_taken_on_the_first_host(job, monkeypatch):
    monkeypatch.setattr(other_host, "_TO_ANSWER", 1)  # s; a busy first host has more
    with socket.create_server((HOSTS[0], job.port)):
        with pytest.raises(LaunchError, match=r"cannot listen on port \d+ .*--launcher-peer-port"):
            job.join(HOSTS[0])
            job.wait(lambda: False)
        del job.ends[HOSTS[0]]
        job.join(HOSTS[1])
        with pytest.raises(LaunchError, match="is not this job's launcher") as raised:
            job.wait(lambda: False)
        assert raised.value.exit_code == 69


def test_a_stop_while_something_else_answers_in_the_first_hosts_place(job):
    with socket.create_server((HOSTS[0], job.port)) as other:
        (end,) = job.join(HOSTS[1])
        connection, _ = other.accept()
        with connection, selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            job.wait(lambda: selector.select(0))  # its hello
            end.stop(15)
            assert end.verdict == Verdict(143, "", 15)


def test_a_port_that_is_free_in_a_moment(job):
    with socket.create_server((HOSTS[0], job.port)):
        job.join(HOSTS[0])
    job.join(*HOSTS[1:])
    job.all_go()


def test_a_first_host_whose_own_name_does_not_resolve(job):
    job.hosts = ("no-such-name.invalid", HOSTS[1])
    _, second = job.join(timeout=4)
    assert job.verdicts(alike=False).text.startswith("127.0.0.2 (its name resolves) did not arrive")
    why = "no-such-name.invalid did not arrive within 4 s (the name no-such-name.invalid does not "
    assert second.verdict.text.startswith(why)


@pytest.mark.parametrize(
    ("name", "leads_here"), [("a-name.invalid", False), ("localhost", True), ("0.0.0.1", False)]
)
def test_a_first_host_that_is_not_reached_by_its_own_name_listens_on_all_addresses(
    job, name, leads_here
):
    """A name without an address, one that leads to itself alone, one that it does not have."""
    job.hosts = (name, HOSTS[1])
    (first,) = job.join(name)
    connection = socket.create_connection((HOSTS[2], job.port), 5)
    connection.sendall(hello(HOSTS[1], hosts=job.hosts))
    job.all_go()
    assert (first.own_address, first.name_leads_here) == (HOSTS[2], leads_here)


def test_the_channel_listens_on_the_hosts_own_address_alone(job):
    job.join(HOSTS[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[1], job.port))
    own = [each.getsockname()[0] for end in job.ends.values() for each in end._entrance._listeners]
    assert own == [HOSTS[0]]


# A name server that never answers, hosts that wait for others, and what they do meanwhile.
SLOW = """
import json, socket, sys, threading, time
from launcher.peers import channel as peers, first as first_host, other as other_host
from launcher.job.cluster import Cluster

for module in (peers, first_host, other_host):
    module.ROLL_EVERY = 2.5
nameserver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
nameserver.bind(("127.0.0.1", 53))
SAME = {"script": "x"}
hosts = ("127.0.0.1", *(f"slow-{n}" for n in range(40)))
ends = [
    peers.join(Cluster(hosts, hosts[0], "job", 0, 0, ""), 20001, 60, SAME),
    peers.join(Cluster(("slow-0", "slow-1"), "slow-1", "job", 0, 0, ""), 20002, 60, SAME),
    peers.join(Cluster(("127.0.0.3", "slow-1"), "slow-1", "job", 0, 0, ""), 20003, 60, SAME),
]

def attempts():
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    return int(dict(zip(*lines))["ActiveOpens"])

until = time.monotonic() + 6
while time.monotonic() < until:
    for end in ends:
        end.act()
    time.sleep(0.02)
alone = peers.join(Cluster(hosts[:2], hosts[0], "job", 0, 0, ""), 20004, 3, SAME)
while not alone._names._running:
    alone.act()
    time.sleep(0.02)
late = socket.create_connection((hosts[0], 20004))
hello = {"job": "job", "host": hosts[1], "alike": alone._alike}
late.sendall(json.dumps({"hello": hello}).encode() + b"\\n")
while not alone.go:
    alone.act()
    time.sleep(0.02)
assert alone._names._running and alone.timeout() is None and alone.verdict is None
print(threading.active_count() < 20, attempts(), *(end.verdict for end in ends))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_hosts_that_wait_say_so_whatever_dns_does():
    with Network(("one",), "IPv4") as network:
        command = [*network.on("one"), sys.executable, "-c", SLOW]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    few_threads, attempts, *verdicts = done.stdout.split()
    assert (few_threads, verdicts) == ("True", ["None"] * 3), done.stderr
    assert int(attempts) < 60
    named = ", ".join(f"slow-{number} (no answer from DNS)" for number in range(8))
    lines = done.stderr.splitlines()
    for line in (
        f"launcher: waiting for {named} and 32 more.",
        "launcher: waiting for slow-0 (no answer from DNS to its name).",
        "launcher: waiting for 127.0.0.3 (nothing listens there).",
    ):
        assert lines.count(line) in (1, 2), done.stderr  # 2, but on a machine that has stood still


def test_nothing_is_due_while_a_job_runs(job):
    job.join()
    job.all_go()
    assert {end.timeout() for end in job.ends.values()} == {None}
