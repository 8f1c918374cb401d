"""What ranks tell the launcher, over real sockets; no torch."""

import json
import os
import resource
import selectors
import socket

import pytest
from conftest import poll

from launcher.run.reports import Rank, Reports


class Told:
    """Listens to the ranks' lives, and writes them down."""

    def __init__(self):
        self.events = []

    def on_start(self, rank: Rank):
        self.events.append(("start", rank.rank))

    def on_failure(self, rank: Rank):
        self.events.append(("failure", rank.rank, rank.exit_code))

    def on_end(self, rank: Rank):
        self.events.append(("end", rank.rank))

    def on_closing(self, why):
        self.events.append(("closing", why))

    def on_starting(self):
        self.events.append(("starting",))


@pytest.fixture
def reports(tmp_path):
    with selectors.DefaultSelector() as selector:
        told = Told()
        reports = Reports(os.environ["TMPDIR"], selector, told)

        def act_until(condition):
            def met():
                for key, _ in selector.select(0):
                    key.data()
                reports.look()
                return condition()

            poll(met, 10, every=0.01)

        reports.told, reports.act_until = told.events, act_until
        yield reports
        reports.close()


def connect(**message):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.environ["TMPDIR"], "socket"))
    connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


def rank(number, pid):
    return connect(rank=number, local_rank=number, pid=pid, max_restarts=0, restart=0)


def test_ranks_for_which_no_descriptor_is_left_wait(reports):
    ranks = [rank(number, os.getpid()) for number in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, limits[1]))
        with pytest.raises(OSError):
            while True:
                spare.append(os.dup(0))
        os.close(spare.pop())
        reports.act_until(lambda: reports.timeout() is None and reports.told == [("start", 0)])
        ranks[0].close()
        reports.act_until(lambda: ("start", 1) in reports.told)
        assert ("end", 0) not in reports.told  # its process, this one, runs on
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    ranks[1].close()
    reports.act_until(lambda: ("start", 2) in reports.told)
    ranks[2].close()


def test_torchrun_knows_the_exit_code_of_a_rank_that_is_reaped_already(reports):
    pid = os.fork()
    if pid == 0:
        os._exit(42)
    os.waitpid(pid, 0)
    rank(0, pid).close()
    reports.act_until(lambda: ("end", 0) in reports.told)
    assert not any(event[0] == "failure" for event in reports.told)
    torchrun = connect(closing="failure", exit_codes={"0": 42})
    reports.act_until(lambda: ("closing", "failure") in reports.told)
    assert reports.told == [("start", 0), ("end", 0), ("failure", 0, 42), ("closing", "failure")]
    reports.answer(7)
    assert torchrun.recv(100) == b'{"timeout": 7}\n'
    torchrun.close()


def test_an_exit_code_is_certain_when_the_process_has_ended_or_says_so(reports):
    end = {"exit_code": 1, "final": False}
    with rank(0, os.getpid()) as said, rank(1, os.getpid()) as torchrun_knows:
        for connection in (said, torchrun_knows):
            connection.sendall(json.dumps({"end": end}).encode() + b"\n")
        reports.act_until(lambda: reports.told.count(("failure", 0, None)) == 1)
        said.sendall(b'{"final": true}\n')
        reports.act_until(lambda: ("failure", 0, 1) in reports.told)
        connect(exit_codes={"1": 42}).close()
        reports.act_until(lambda: ("failure", 1, 42) in reports.told)
        assert ("failure", 1, None) in reports.told


@pytest.mark.parametrize("message", [{}, {"closing": 1}, {"end": {}}, {"exit_codes": {"x": 1}}, 3])
def test_messages_that_make_no_sense_change_nothing(reports, message):
    with rank(0, os.getpid()) as good, connect() as other:
        other.sendall(json.dumps(message).encode() + b"\n" + b"\0\n")
        good.sendall(b"no JSON\n")
        reports.act_until(lambda: ("start", 0) in reports.told)
        connect(exit_codes={}).close()
        reports.act_until(lambda: reports.alive)
    assert [event[0] for event in reports.told] == ["start"]
