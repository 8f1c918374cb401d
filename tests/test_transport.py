"""The connections between the launchers of a job: real sockets on loopback addresses, no torch.

What the hosts agree on is in test_peers.py, which needs no sockets.
"""

import contextlib
import errno
import json
import os
import random
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from channel_end import End
from conftest import free_port, poll
from jobs import job_of
from network import Network, in_namespaces

from launcher.host.child import Helper
from launcher.host.network import listen
from launcher.host.system import System
from launcher.peers import link, messages
from launcher.peers.channel import STRANGERS, Channel, Connection
from launcher.peers.events import Received
from launcher.result.causes import Cause, Failure, Result
from launcher.text.protocol import LineSocket, decoded, encoded

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SAME = {"version of torch": "2.13", "script": "script train.py"}


class Job:
    """Hosts of one job, each with its end of the channel, all in this process."""

    def __init__(self, hosts=HOSTS):
        self.hosts = hosts
        self.port = free_port()
        self.ends = {}

    def join(self, *hosts, **more):
        for host in hosts or self.hosts:
            self.ends[host] = End(job_at(host, self.hosts, peer_port=self.port, **more))
        return [self.ends[host] for host in hosts or self.hosts]

    def wait(self, condition, timeout=120):
        def met():
            for end in self.ends.values():
                end.act()
            return condition()

        poll(met, timeout, every=0.01)

    def act_for(self, seconds):
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until)

    def all_join(self):
        self.wait(lambda: all(end.has_joined for end in self.ends.values()))

    def has_joined(self, host):
        """Wait until the first host knows another one."""
        self.wait(lambda: isinstance(self.ends[host].channel.state.phase, link.Joined))

    def result(self):
        """Wait for a result everywhere, and return it."""
        self.wait(lambda: all(end.has_left for end in self.ends.values()))
        (result,) = {end.result for end in self.ends.values()}
        return result

    def connect(self, data=b""):
        """Connect to the first host as anybody can."""
        connection = socket.create_connection((self.hosts[0], self.port), 60)
        connection.sendall(data)
        connection.settimeout(60)
        return connection


@pytest.fixture
def job():
    job = Job()
    yield job
    for end in job.ends.values():
        end.close()


def job_at(host, hosts=HOSTS, **more):
    values = {"start_timeout": 60, "peer_port": 1, "fingerprint": SAME}
    return job_of(host, hosts, **{**values, **more})


def hello(host, hosts=HOSTS):
    return encoded(messages.to_wire(messages.hello(job_at(host, hosts))))


def test_all_join_fail_together_and_leave(job):
    first, second = job.join(*HOSTS[:2])
    job.act_for(0.5)
    assert not first.has_joined and not second.has_joined
    job.join(HOSTS[2])
    job.all_join()
    assert first.channel.own_address == HOSTS[0] and first.channel.own_name_resolves
    second.say(Failure(Cause.OWN, 3, "rank 1 failed"))
    assert job.result() == Result(3, "rank 1 failed\n")


def test_a_reason_of_any_length_arrives(job):
    _, second, _ = job.join(*HOSTS)
    job.all_join()
    second.say(
        Failure(
            Cause.TORCHRUN, 3, "torchrun failed: " + "\U0001f600" * (1 << 17), more="\0" * (1 << 17)
        )
    )
    assert job.result().text.startswith("torchrun failed: \U0001f600")


@pytest.mark.parametrize(
    ("timeout", "silence", "expected"),
    [(5, 60, [1, 1, 5000]), (14, 60, [2, 2, 14_000]), (60, 90, [8, 8, 60_000])],
)
def test_how_long_a_host_may_be_unreachable(job, timeout, silence, expected):
    """The kernel probes after so many seconds, then as often, and gives up after so many ms."""
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    (first,) = job.join(HOSTS[0], host_timeout=timeout)
    with selectors.DefaultSelector() as selector:
        connection = Connection(job.connect(), selector, pytest.fail, pytest.fail)
        connection.admit(HOSTS[0], timeout)
        given = [connection.socket.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert given == expected
        connection.close()
    assert first.channel._silence == silence


@pytest.mark.parametrize(
    "data",
    [
        random.Random(0).randbytes(5000),
        b"x" * 1_000_000,
        b"\n\n\n",
        b"[" * 50_000 + b"\n",
        b"{}\n",
        b"null\n",
        hello("127.0.0.9\x1b[31m\n\ud800"),
    ],
    ids=range(7),
)
def test_garbage_changes_nothing(job, data):
    job.join(*HOSTS[:2])
    job.has_joined(HOSTS[1])

    def send():
        with contextlib.suppress(OSError), job.connect(data) as connection:
            while connection.recv(1000):
                pass

    sender = threading.Thread(target=send)
    sender.start()
    job.wait(lambda: not sender.is_alive())
    job.join(HOSTS[2])
    job.all_join()


def test_of_many_refusals_the_first_are_logged(job, logged):
    job.join(*HOSTS[:1])
    for _ in range(25):
        with job.connect(hello("127.0.0.9")) as connection:
            job.wait(lambda: select.select([connection], [], [], 0)[0])
    assert logged().count("refused a connection") == 20


@pytest.mark.parametrize("what", ["is silent", "connects", "speaks", "has spoken"])
def test_nobody_can_connect_any_more_once_the_last_hello_is_here(job, what):
    job.join(*HOSTS[:2])
    job.has_joined(HOSTS[1])
    stray = None if what == "connects" else job.connect()
    last = job.connect()
    job.act_for(0.1)  # the listening socket is not the first of the next turn any more
    if what == "has spoken":
        stray.sendall(b"{}\n")
    last.sendall(hello(HOSTS[2]))
    if what == "connects":
        stray = job.connect()
    elif what == "speaks":
        stray.sendall(b"{}\n")
    job.all_join()
    with contextlib.suppress(ConnectionResetError):
        assert stray.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        job.connect()


# Shows how a coordinator does with a limit on open files, and which one its child has.
FIRST = """
import json, os, resource, sys, time
from channel_end import End
from jobs import job_of

from launcher.host.processes import start_tied

hosts, port, *limits = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))
same = {"version of torch": "2.13", "script": "script train.py"}
first = End(job_of(hosts[0], hosts, start_timeout=60, peer_port=port, fingerprint=same))
print("listens", flush=True)
while not first.has_joined and not first.has_left:
    first.act()
    time.sleep(0.002)
child = start_tied(["sleep", "60"], os.environ, folder="", stderr=2)
childs = resource.prlimit(child, resource.RLIMIT_NOFILE)
os.kill(child, 9)
os.waitpid(child, 0)
print(json.dumps([first.has_joined, first.result and first.result.text, childs]), flush=True)
first.close()
"""
PATHS = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
WITH_TESTS = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}


def test_an_address_may_be_written_in_any_way():
    (listener,), _ = listen("127.1", 0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


MANY = ("127.0.0.1", *(f"host-{number:03}" for number in range(1, 300)))


@pytest.mark.parametrize(("soft", "hard"), [(400, 400), (100, 4000)])
def test_hosts_by_the_hundred_silent_ones_and_few_descriptors(soft, hard):
    hosts, port = MANY, free_port()
    command = [sys.executable, "-c", FIRST, json.dumps([hosts, port, soft, hard])]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": WITH_TESTS}

    def arrive(host):
        connection = socket.create_connection((hosts[0], port), 60)
        connection.sendall(hello(host, hosts=hosts))
        return connection.makefile("rb")

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(subprocess.Popen(command, text=True, **options))
        stack.callback(first.kill)
        assert first.stdout.readline() == "listens\n"
        for _ in range(2 * STRANGERS):  # more than there are descriptors for
            stack.enter_context(socket.create_connection((hosts[0], port), 60))
        arrived = {host: arrive(host) for host in hosts[1:]}
        for host in hosts[1:]:
            while not (said := arrived[host].readline()):
                arrived[host].close()
                arrived[host] = arrive(host)
            assert json.loads(said) == {"Welcome": [""]}
        # Before it there may be signs of life, and who is still missing.
        starts = [next(line for line in file if b"Start" in line) for file in arrived.values()]
        assert set(starts) == {b'{"Start": [1, 0]}\n'}
        assert json.loads(first.stdout.readline()) == [True, None, [hard, hard]]
        line = f"launcher: each rank may open {hard:,} files (ulimit -n was {soft:,}).\n"
        assert first.stderr.read() == (line if soft < hard else "")
        for file in arrived.values():
            file.close()


INVALID = [b"no JSON", b"[1]", b"NaN", b'{"x": 1e999}', b'{"x": ' + b"9" * 5000]
INVALID += [b"[" * 50_000, b"null", b"", b"\xff"]


@pytest.mark.parametrize("line", INVALID)
def test_a_message_is_an_object_without_endless_numbers(line):
    with pytest.raises(ValueError):
        decoded(line)


def test_lines_come_in_pieces_and_have_a_limit():
    ours, theirs = socket.socketpair()
    with theirs, selectors.DefaultSelector() as selector:
        taken, lost = [], []
        lines = LineSocket(
            ours, selector, lambda _, line: taken.append(line), lambda _, why: lost.append(why)
        )
        lines.limit = 8
        lines.read()
        for data, read in ((b'{"a"', []), (b": 1}\n{}\n12345678", [b'{"a": 1}', b"{}"])):
            theirs.send(data)
            lines.read()
            assert (taken, lost) == (read, [])
        theirs.send(b"9")
        lines.read()
        assert isinstance(lost[0], ValueError) and len(taken) == 2
        lines.close()


OF_AN_ENTRY_POINT = """
import subprocess
from launcher.host import processes, system
parent = subprocess.Popen(["sh", "-c", "sleep 1000 & read _"], stdin=subprocess.PIPE)
here = system.System(None)
processes.adopt_orphans()
parent.communicate(b"\\n")
left = processes.children()
assert len(left) == 1 and not here.children()
processes.kill_tree(*left, below=False)
"""


def test_what_the_entry_point_had_started_is_not_the_jobs_even_if_its_parent_ends():
    subprocess.run([sys.executable, "-c", OF_AN_ENTRY_POINT], check=True, timeout=60)


HELPER = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'{}')"
ENDED = {"why": "it has ended"}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([sys.executable, "-c", HELPER.format(r'{"port": 5}\n{"po')], [{"port": 5}, ENDED]),
        ([sys.executable, "-c", HELPER.format(r"no JSON\n")], [ENDED, ENDED]),
        (["no-such"], [{"why": "it cannot be started: no-such was not found"}]),
    ],
)
def test_a_helper_says_last_why_it_says_no_more(argv, told):
    with selectors.DefaultSelector() as selector:
        messages = []
        helper = Helper(argv, os.environ, "", selector, "it", messages.append)
        while len(messages) < len(told):
            assert selector.select(60)
            helper.read()
        helper.close()
    assert messages == told


@pytest.mark.parametrize("line", [*INVALID[:5], b"{}", b'{"Stop": {"number": 9}}'])
def test_an_invalid_message_ends_the_connection(job, line):
    job.join(*HOSTS[:2])
    third = job.connect(hello(HOSTS[2]))
    job.all_join()
    third.sendall(line + b"\n")
    text = f"{HOSTS[2]} was lost: it sent an invalid message\n"
    assert job.result().text.startswith(text)


def test_messages_right_behind_the_hello_count(job):
    first, _ = job.join(*HOSTS[:2])
    third = job.connect(hello(HOSTS[2]) + encoded({"Stop": {"number": 15}}))
    job.wait(lambda: first.result)
    third.close()
    assert job.result() == Result(143, "", 15)


def test_a_connection_that_takes_nothing_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        with server.accept()[0], selectors.DefaultSelector() as selector:
            lost = []
            connection = Connection(other, selector, pytest.fail, lambda _, why: lost.append(why))
            connection.admit("other", 14)
            for _ in range(1000):
                connection.send(encoded({"text": 60_000 * "x"}))
            assert not lost and selector.select(60)
            connection.read()
            assert connection.why_lost(*lost) == "it stopped reading"
            connection.close()


def test_a_connection_that_has_ended_already_is_lost_at_its_next_read():
    ours, theirs = socket.socketpair()
    theirs.close()
    with selectors.DefaultSelector() as selector:
        lost = []
        connection = Connection(ours, selector, pytest.fail, lambda _, why: lost.append(why))
        connection.admit("other", 14)  # this kind of socket has no such options, as a lost one
        connection.read()
        assert connection.why_lost(*lost) == "its launcher died"
        connection.close()


def test_a_port_that_is_taken_on_the_first_host(job):
    with socket.create_server((HOSTS[0], job.port)):
        (first,) = job.join(HOSTS[0])
        result = job.result()
    assert result.exit_code == 2 and first.has_left
    says = f"launcher: {HOSTS[0]} cannot listen on port {job.port} "
    assert result.text.startswith(says) and "(Address already in use)" in result.text


def test_a_port_that_the_first_host_may_not_have(job, monkeypatch):
    """Waiting does not help."""
    monkeypatch.setattr(System, "listen", Mock(side_effect=PermissionError(errno.EACCES, "")))
    (first,) = job.join(HOSTS[0])
    assert "(Permission denied)" in first.result.text


def test_a_member_finds_its_coordinator_after_another_program(job):
    with socket.create_server((HOSTS[0], job.port)) as other:
        job.join(HOSTS[1])
        other.accept()[0].close()
        job.act_for(0.1)
    job.join(HOSTS[0], HOSTS[2])
    job.all_join()


def test_a_member_connects_again_after_a_while_that_grows():
    tries, waits, times = [], [], [0.0]
    system = SimpleNamespace(now=lambda: times[-1], selector=None)
    system.connect = lambda host, port, then: tries.append(then)
    channel = Channel(job_at(HOSTS[1]), system, pytest.fail, pytest.fail)
    channel.begin()
    for at in (0.01, 0.1, 0.8, 4, 8, 28):
        times.append(at)
        tries[-1]("nothing is listening there")
        waits.append(channel.due() - at)
        times.append(channel.due())
        channel.tick()
    assert waits == pytest.approx([0.02, 0.02, 0.1, 0.5, 1, 1]) and len(tries) == 7
    channel.happens(Received(HOSTS[0], messages.Welcome()))
    tries[-1]("nothing is listening there")
    assert channel.due() == float("inf")


def test_a_first_host_whose_name_does_not_resolve(job):
    job.hosts = ("no-such-name.invalid", HOSTS[1])
    job.join(HOSTS[1], start_timeout=12)
    why = "could not be reached within 12 s (the name no-such-name.invalid does not "
    assert job.result().text.startswith(f"no-such-name.invalid {why}")


@pytest.mark.parametrize(
    ("name", "resolves"), [("a-name.invalid", False), ("localhost", True), ("0.0.0.1", False)]
)
def test_a_first_host_that_is_not_reached_by_its_own_name_listens_on_all_addresses(
    job, name, resolves
):
    """A name without an address, one that leads to itself alone, one that it does not have."""
    job.hosts = (name, HOSTS[1])
    (first,) = job.join(name)
    connection = socket.create_connection((HOSTS[2], job.port), 60)
    connection.sendall(hello(HOSTS[1], hosts=job.hosts))
    job.all_join()
    seen = (first.channel.own_address, first.channel.own_name_resolves)
    assert seen == (HOSTS[2], resolves)


def test_the_first_host_listens_on_its_own_address_alone(job):
    job.join(HOSTS[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[1], job.port))
    sockets = psutil.Process().net_connections("tcp")
    at_port = [each.laddr.ip for each in sockets if each.laddr.port == job.port]
    assert at_port == [HOSTS[0]]


# A name server that never answers, hosts that wait for others, and what they do meanwhile.
SLOW = """
import socket, threading, time
from channel_end import End
from jobs import job_of
from launcher.peers import events

events.LOG_MISSING_SECONDS = 2.5
nameserver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
nameserver.bind(("127.0.0.1", 53))
first, slow = "127.0.0.1", tuple(f"slow-{number}" for number in range(40))
ends = [
    End(job_of(host, hosts, peer_port=port))
    for host, hosts, port in (
        (first, (first, *slow), 20001),
        ("slow-1", slow[:2], 20002),
        ("slow-1", ("127.0.0.3", "slow-1"), 20003),
    )
]

def attempts():
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    return int(dict(zip(*lines))["ActiveOpens"])

until = time.monotonic() + 12
while time.monotonic() < until:
    for end in ends:
        end.act()
    time.sleep(0.02)
print(threading.active_count(), attempts(), *(end.result for end in ends))
"""


@in_namespaces
def test_hosts_that_wait_say_so_whatever_dns_does():
    with Network(("one",), "IPv4") as network:
        command = [*network.on("one"), sys.executable, "-c", SLOW]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=WITH_TESTS)
    assert done.returncode == 0, done.stderr
    threads, attempts, *results = done.stdout.split()
    assert results == ["None"] * 3 and int(threads) < 10, done.stdout
    assert int(attempts) < 120
    named = ", ".join(f"slow-{number}" for number in range(8))
    lines = done.stderr.splitlines()
    for line in (
        f"launcher: waiting for {named} and 32 more.",
        "launcher: waiting for slow-0 (its name has not been resolved yet).",
        "launcher: waiting for 127.0.0.3 (nothing is listening there).",
    ):
        assert 1 <= lines.count(line) <= 5, done.stderr
