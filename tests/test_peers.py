"""The channel between the launchers of a job: real sockets on loopback addresses, no torch."""

import json
import random
import socket
import threading
import time

import pytest
from conftest import free_port, poll

from launcher import peers
from launcher.cluster import Cluster
from launcher.errors import LaunchError
from launcher.failure import BROKEN, ECHO, OWN, RESTARTED, Verdict

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


def hello(host, job="job", **more):
    message = {"hello": {"job": job, "host": host, "hosts": HOSTS, "alike": ALIKE, **more}}
    return json.dumps(message).encode() + b"\n"


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
    ],
    ids=range(13),
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
    job.wait(lambda: len(job.ends[HOSTS[0]]._strangers) == 50)
    assert b"127.0.0.2 is here already" in second.recv(1000)
    job.join(HOSTS[2])
    job.all_go()
    job.wait(lambda: not job.ends[HOSTS[0]]._strangers)  # each has 4 s to say something
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
    silent = []
    for _ in range(peers._STRANGERS + 10):
        silent.append(job.stranger())
        job.wait(lambda: True)
    assert len(job.ends[HOSTS[0]]._strangers) <= peers._STRANGERS
    job.join(HOSTS[2])
    job.all_go()


def test_nobody_starts_while_a_mistake_is_on_its_way(job):
    first, _, third = job.join(*HOSTS[:2]) + job.join(HOSTS[2], alike={})
    job.wait(lambda: len(first._wires) == 2)
    assert not first.go and first.verdict is None
    third.case(OWN, 2, "it cannot\n")
    assert job.verdicts() == Verdict(2, "it cannot\n")
    assert not any(end.go for end in job.ends.values())


def test_a_restarted_rank_is_the_cause_of_an_echo(job):
    first, second, _ = job.join()
    job.all_go()
    second.case(RESTARTED, 1, "loss is nan\n")
    time.sleep(0.5)
    job.wait(lambda: True)
    assert not any(end.verdict for end in job.ends.values())
    first.case(ECHO, 1, "connection closed\n")
    assert job.verdicts().text == "loss is nan\n"


def test_a_stop_does_not_hide_a_failure_before_it(job):
    _, second, _ = job.join()
    job.all_go()
    second.case(OWN, 3, "loss is nan\n")
    time.sleep(0.1)
    second.stop(15)
    assert job.verdicts() == Verdict(3, "loss is nan\n")


def test_nonsense_from_a_host_of_the_job_is_no_verdict(job):
    job.join(*HOSTS[:2])
    third = job.stranger(hello(HOSTS[2]))
    job.all_go()
    endless = {"case": {"kind": 0, "exit_code": float("inf"), "text": ""}}
    nonsense = [{"case": 1}, {"case": {"kind": 9}}, {"stop": "x"}, {"what": 1}, {"done": 0}]
    for message in (*nonsense, endless):
        third.sendall(json.dumps(message).encode() + b"\n")
    time.sleep(0.3)
    job.wait(lambda: True)
    assert not any(end.verdict for end in job.ends.values())
    third.sendall(b"no JSON\n")
    assert job.verdicts().text.startswith("127.0.0.3 was lost: it said what no launcher says\n")


def test_a_port_that_is_taken_on_the_first_host(job, monkeypatch):
    monkeypatch.setattr(peers, "_TO_ANSWER", 1)  # s; a busy first host has more
    with socket.create_server((HOSTS[0], job.port)):
        with pytest.raises(LaunchError, match=r"cannot listen on port \d+ .*--launcher-peer-port"):
            job.join(HOSTS[0])
            job.wait(lambda: False)
        del job.ends[HOSTS[0]]
        job.join(HOSTS[1])
        with pytest.raises(LaunchError, match="is not this job's launcher") as raised:
            job.wait(lambda: False)
        assert raised.value.exit_code == 69


def test_a_port_that_is_free_in_a_moment(job):
    with socket.create_server((HOSTS[0], job.port)):
        job.join(HOSTS[0])
    job.join(*HOSTS[1:])
    job.all_go()


def test_a_first_host_whose_own_name_does_not_resolve(job):
    job.hosts = ("no-such-name.invalid", HOSTS[1])
    job.join(timeout=2)
    verdict = job.verdicts(alike=False)
    assert verdict.exit_code == 69
    first = "no-such-name.invalid (its name does not resolve) did not arrive within 2 s\n"
    assert verdict.text.startswith(first)


def test_the_channel_listens_on_the_hosts_own_address_alone(job):
    job.join(HOSTS[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[1], job.port))
    own = {end._listener.getsockname()[0] for end in job.ends.values()}
    assert own == {HOSTS[0]}


def test_nothing_is_due_while_a_job_runs(job):
    job.join()
    job.all_go()
    assert {end.timeout() for end in job.ends.values()} == {None}
