"""The fault matrix: whatever breaks, wherever, all hosts end, in time, and say the same."""

import time

import pytest

from cluster.hosts import ALONE, TRAIN

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

# Every rank says that it runs, and then does what its part of the table says.
SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank, here = dist.get_rank(), "/opt/ml/input/now"
sys.stdout.write(f"rank {rank} runs\\\\n")
sys.stdout.flush()
while not os.path.exists(here):  # told to each host by the test
    time.sleep(0.02)
PLAN = %r
exec(PLAN.get(rank, "time.sleep(600)"))
"""
SAVE = "signal.signal(15, lambda *_: (time.sleep(5), print('saved', flush=True), sys.exit(0)))\n"
IGNORE = "signal.signal(15, signal.SIG_IGN)\n"
WAIT = "\ntime.sleep(600)"


class Fault:
    """A job of two hosts that runs, until `strike`."""

    def __init__(self, job, plan, ranks=1, how=ALONE, hosts=2, **hyperparameters):
        self.job = job
        self.job.add(*(f"algo-{number}" for number in range(1, hosts + 1)))
        self.job.will_run(SCRIPT % plan, how, launcher_nproc_per_node=ranks, **hyperparameters)
        self.ranks = ranks

    def start(self):
        self.job.start()
        for host in self.job.values():
            host.wait_for(" runs\n", count=self.ranks)
        return self

    def strike(self):
        """Tell all ranks to do their part."""
        self.at = time.time()
        for host in self.job.values():
            host.write("input/now", "")

    def assert_ends(self, code, says, within, *, lost=()):
        """All hosts but those lost end with code, in time, with one text that begins so."""
        left = [host for name, host in self.job.items() if name not in lost]
        for host in left:
            assert host.wait() == code, self.job.logs()
        seconds = max(host.ended_at for host in left) - self.at
        texts = {host.failure for host in left}
        assert len(texts) == 1, texts
        (text,) = texts
        assert text.startswith(says), text
        assert seconds < within, f"{seconds:.1f} s\n{self.job.logs()}"


RAISE = "raise ValueError('loss is nan')"
FIRST = "algo-1, rank 0 (local rank 0) "
LAST = "algo-2, rank 1 (local rank 0) "


@pytest.mark.parametrize(
    ("plan", "code", "says"),
    [
        ({1: RAISE}, 1, LAST + "failed with ValueError: loss is nan\n"),
        ({0: RAISE}, 1, FIRST + "failed with ValueError: loss is nan\n"),
        ({0: RAISE, 1: RAISE}, 1, "algo-"),
        ({1: "sys.exit(3)"}, 3, LAST + "ended with exit code 3\n"),
        ({1: "os.kill(os.getpid(), 11)"}, 139, LAST + "was killed by SIGSEGV (signal 11)\n"),
        (
            {1: "os.kill(os.getpid(), 9)"},
            137,
            LAST + "was killed by SIGKILL (signal 9); no kill for want of memory was counted\n",
        ),
    ],
    ids=["last raises", "first raises", "both raise", "exit", "SIGSEGV", "SIGKILL"],
)
def test_a_rank_fails(job, plan, code, says):
    fault = Fault(job, plan).start()
    fault.strike()
    fault.assert_ends(code, says, 3)


def test_ranks_that_ignore_sigterm_when_another_host_fails(job):
    fault = Fault(job, {0: IGNORE + WAIT, 1: RAISE}, launcher_failure_grace=4).start()
    fault.strike()
    fault.assert_ends(1, LAST + "failed with ValueError: loss is nan\n", 4 + 3)


@pytest.mark.parametrize(("sibling", "within"), [(SAVE, 8), (IGNORE, 10 + 3)])
def test_a_sibling_takes_its_time(job, sibling, within):
    fault = Fault(job, {2: RAISE, 3: sibling + WAIT}, ranks=2).start()
    fault.strike()
    fault.assert_ends(1, "algo-2, rank 2 (local rank 0) failed with ValueError", within)


@pytest.mark.parametrize("lost", ["algo-1", "algo-2"])
def test_a_host_is_killed(job, lost):
    fault = Fault(job, {}).start()
    fault.at = time.time()
    job[lost].kill()
    fault.assert_ends(69, f"{lost} was lost: its launcher ended without a word\n", 3, lost=[lost])


@pytest.mark.parametrize("lost", ["algo-1", "algo-2"])
def test_a_host_is_cut_off(job, lost):
    fault = Fault(job, {}).start()
    fault.at = time.time()
    job[lost].cut_off()
    left = "algo-2" if lost == "algo-1" else "algo-1"
    fault.assert_ends(69, f"{lost} was lost: it stopped answering", 20, lost=[lost])
    assert job[lost].wait() == 69
    assert job[lost].failure.startswith(f"{left} was lost: it stopped answering")


def test_a_host_is_absent(job):
    fault = Fault(job, {}, launcher_start_timeout=5)
    fault.at = time.time()
    job.start("algo-1")
    assert job["algo-1"].wait() == 69
    says = "algo-2 (its name does not resolve) did not arrive within 5 s\n"
    assert job["algo-1"].failure.startswith(says)


def test_the_first_host_is_absent(job):
    Fault(job, {}, launcher_start_timeout=5)
    job.start("algo-2")
    assert job["algo-2"].wait() == 69
    assert job["algo-2"].failure.startswith("algo-1 did not arrive within 5 s (")


def test_a_script_is_missing_on_one_host(job):
    fault = Fault(job, {})
    (job["algo-2"].opt_ml / "code" / "script.py").unlink()
    job.start()
    fault.at = time.time()
    assert job.wait() == {"algo-1": 2, "algo-2": 2}, job.logs()
    texts = {host.failure for host in job.values()}
    assert all("--train-script script.py: there is neither" in text for text in texts)


@pytest.mark.parametrize("told", ["algo-1", "algo-2"])
def test_a_stop_of_one_host_stops_all(job, told):
    fault = Fault(job, {0: SAVE + WAIT, 1: SAVE + WAIT}).start()
    fault.strike()
    time.sleep(0.5)  # their handlers
    job[told].stop()
    assert job.wait() == {"algo-1": 143, "algo-2": 143}, job.logs()
    assert all("saved" in host.log() for host in job.values())
    assert {host.failure for host in job.values()} == {None}


def test_one_host_is_through_8_s_before_the_other(job):
    fault = Fault(job, {0: "pass", 1: "time.sleep(8)"}).start()
    fault.strike()
    assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.logs()
    assert abs(job["algo-1"].ended_at - job["algo-2"].ended_at) < 2


@pytest.mark.parametrize("how", [TRAIN, ALONE])
def test_an_output_folder_that_cannot_be_written(job, how):
    fault = Fault(job, {1: RAISE}, how=how)
    for host in job.values():
        folder = host.opt_ml / "read-only"
        folder.mkdir()
        host.environment["SM_OUTPUT_DIR"] = "/proc"  # where nobody can write
    fault.start()
    fault.strike()
    assert set(job.wait().values()) == {1}, job.logs()


def test_sixteen_hosts(job):
    fault = Fault(job, {7: RAISE}, hosts=16).start()
    fault.strike()
    says = sorted(job)[7] + ", rank 7 (local rank 0) failed with ValueError: loss is nan\n"
    fault.assert_ends(1, says, 6)
