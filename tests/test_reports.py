"""What ranks tell the launcher, over real sockets; no torch."""

import json
import os
import resource
import selectors
import socket

import pytest
from conftest import poll

from launcher.result.raised import Link
from launcher.run.events import (
    ExitCodes,
    RankGone,
    RankIsFinal,
    RankSaid,
    RankStarted,
    TorchrunAsks,
    TorchrunEnded,
    TorchrunGone,
    Why,
)
from launcher.run.reports import Reports


@pytest.fixture
def reports():
    with selectors.DefaultSelector() as selector:
        told = []
        reports = Reports(os.environ["TMPDIR"], selector, told.append)

        def act_until(condition):
            def met():
                for key, _ in selector.select(0):
                    key.data()
                reports.look()
                return condition()

            poll(met, 10, every=0.01)

        reports.told, reports.act_until = told, act_until
        yield reports
        reports.close()


def started(number, pid=None):
    return RankStarted(number, number, os.getpid() if pid is None else pid, 0, 0)


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
        reports.act_until(lambda: reports.timeout() is None and reports.told == [started(0)])
        ranks[0].close()
        reports.act_until(lambda: started(1) in reports.told)
        assert not any(isinstance(event, RankGone) for event in reports.told)  # this process runs
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    ranks[1].close()
    reports.act_until(lambda: started(2) in reports.told)
    ranks[2].close()


def test_torchrun_knows_the_exit_code_of_a_rank_that_is_reaped_already(reports):
    pid = os.fork()
    if pid == 0:
        os._exit(42)
    os.waitpid(pid, 0)
    rank(0, pid).close()
    reports.act_until(lambda: RankGone(pid, None) in reports.told)
    torchrun = connect(closing="failure", exit_codes={"0": 42}, question=3)
    reports.act_until(lambda: TorchrunAsks(Why.FAILURE) in reports.told)
    codes = ExitCodes({0: 42})
    assert reports.told == [started(0, pid), RankGone(pid, None), codes, reports.told[-1]]
    reports.answer(7)
    assert torchrun.recv(100) == b'{"question": 3, "timeout": 7}\n'
    torchrun.close()


def test_what_a_rank_says_of_its_end(reports):
    pid = os.getpid()
    link = {"exception": "KeyError", "message": "x", "frames": "", "how": ""}
    end = {"exit_code": 1, "final": False, "chain": [link]}
    with rank(0, pid) as said:
        said.sendall(json.dumps({"end": end}).encode() + b'\n{"final": true}\n')
        reports.act_until(lambda: len(reports.told) == 3)
    assert reports.told[1:] == [RankSaid(pid, 1, (Link(**link),), False), RankIsFinal(pid)]


NONSENSE = [{}, {"closing": 1}, {"end": {}}, {"exit_codes": {"x": 1}}, {"final": True}, 3]
NONSENSE += [[1], "abc", {"exit_codes": [1]}, {"exit_codes": None}, {"pid": 1e300}]
NONSENSE += [{"pid": "x"}, {"failures": 3}, {"failures": [{"x": 1}]}]


@pytest.mark.parametrize("message", NONSENSE)
def test_invalid_messages_change_nothing(reports, message):
    with rank(0, os.getpid()) as good, connect() as other:
        deep = b"[" * 5000 + b"]" * 5000 + b"\n"
        other.sendall(json.dumps(message).encode() + b"\n" + b'{"pid": 1e999}\n\0\n' + deep)
        good.sendall(b"no JSON\n")
        reports.act_until(lambda: started(0) in reports.told)
        connect(exit_codes={}).close()
        reports.act_until(lambda: reports.told)
    assert reports.told == [started(0)]


RUNNER = "neuron_parallel_compile"


@pytest.mark.parametrize(
    ("said", "returncode", "ended"),
    [
        (0, 0, TorchrunEnded(0)),
        (0, 3, TorchrunEnded(3, program=RUNNER)),  # graphs that it could not compile
        (1, 1, TorchrunEnded(1)),
        (2, 1, TorchrunEnded(2)),  # torchrun did not take its arguments
        (1, 0, TorchrunEnded(1)),  # it went on after the failure
        (1, -9, TorchrunEnded(-9, program=RUNNER)),  # the kernel has stopped torchrun
        (None, -9, TorchrunEnded(-9, program=RUNNER)),
        (None, 0, TorchrunEnded(1, (), "it did not run torchrun to its end", RUNNER)),
    ],
)
def test_the_end_of_a_program_that_runs_torchrun(reports, said, returncode, ended):
    reports._runner = RUNNER
    if said is not None:
        torchrun = connect(torchrun_pid=os.getpid())
        reports.act_until(lambda: reports.torchrun == os.getpid())
        torchrun.sendall(json.dumps({"exit_code": said}).encode() + b"\n")
        torchrun.close()
        reports.act_until(lambda: reports.told == [TorchrunGone(said)])
    assert reports.torchrun == 0
    assert reports.ended(returncode) == ended


def test_a_torchrun_that_ends_without_a_word(reports):
    reports._runner = RUNNER
    connect(torchrun_pid=os.getpid()).close()
    reports.act_until(lambda: reports.told == [TorchrunGone(69, "it ended without an exit code")])
    assert reports.ended(1) == TorchrunEnded(69, (), "it ended without an exit code")


def test_torchrun_by_itself_ends_as_its_process_does(reports):
    reports._runner = ""
    torchrun = connect(torchrun_pid=os.getpid())
    torchrun.sendall(json.dumps({"exit_code": 1}).encode() + b"\n")
    torchrun.close()
    assert reports.ended(-9) == TorchrunEnded(-9)
    assert reports.told == []


def test_of_torchrun_by_itself_what_it_said_stays(reports):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)  # reaped before its connection is seen to end: it is as if it said no code
    torchrun = connect(torchrun_pid=pid)
    torchrun.sendall(b'{"torchrun": "what it raised", "question": 1}\n')
    reports.act_until(lambda: reports.torchrun == pid)
    torchrun.close()
    reports.act_until(lambda: reports.torchrun == 0)
    assert reports.ended(-9).error == "what it raised"
