"""Real jobs in which a rank does not come, comes late, or does not end."""

import os
import re
import signal
import socket
import sys

import pytest
from conftest import TORCH, completed, poll, slow

pytestmark = pytest.mark.torch


# Of an older torch, only where ranks are is known.
recorded = pytest.mark.skipif(TORCH < (2, 8), reason="gloo has no recorder before torch 2.8")
counted = pytest.mark.skipif(TORCH < (2, 6), reason="torch before 2.6 counts nothing")
# `sm-launch stacks` asks all jobs on this machine, and a rank that keeps Python's lock gets a
# signal for it: no job of these may run beside a test that starts that tool.
alone_with_stacks = pytest.mark.xdist_group("stacks")
OPTIONS = ("--launcher-watch", "1", "--launcher-hang-notify", "3")

LOCKED = """
import os, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]

def load():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

for _ in range(20):
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=half)
if dist.get_rank() == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    load()
# Ranks 0 and 1 wait for ranks 2 and 3; rank 2 waits for rank 3 in another group.
dist.all_reduce(torch.ones(1), group=half)
dist.all_reduce(torch.ones(1024))
dist.barrier()
time.sleep(0.1)  # leave as leave_group() in train_scripts/checkpoints.py does
dist.destroy_process_group()
"""
ABSENT = (
    "127.0.0.2, rank 3 (local rank 1) is absent from all_reduce #21 of the default group, "
    "where 2 others are waiting; rank 3 is in load, script.py:11"
)


@recorded
def test_a_rank_that_does_not_come_is_named_and_its_job_ended_or_restarted(start_two, script):
    size = ("--launcher-nproc-per-node", "2", "--launcher-max-restarts", "1")
    options = (*OPTIONS, "--launcher-hang-timeout", "4", *size)
    hosts = start_two("--train-script", script(LOCKED), *options)
    codes = [host.wait() for host in hosts]
    log = "".join(host.log() for host in hosts)
    assert codes == [0, 0], log
    # On a busy machine the other host's report may come after the first sentence.
    of_default, of_half = (
        "the default group, where 2 others are",
        "the group of ranks 2,3, where 1 other is",
    )
    absent = re.escape(ABSENT).replace(re.escape(of_default), f"({of_default}|{of_half})")
    said = rf"^launcher: ranks have made no progress for [\d.]+ s: {absent}\.$"
    assert re.search(said, hosts[0].err, re.MULTILINE), log
    for host in hosts:
        why = (
            r"attempt 1 of 2 failed after [\d.]+ s: ranks have made no progress for "
            r"(?:9\.\d|\d\d) s: "
        )
        why += f"{re.escape(ABSENT)};"
        assert len(re.findall(why, host.err)) == 1, log
    assert "launcher: rank 3:\n" in hosts[0].err, log  # the stacks
    assert re.search(r'launcher:     File ".*script.py", line 11, in load\n', hosts[0].err), log


STOPPED = """
import datetime, os, signal
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ["TIMEOUT"])))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""


@recorded
@pytest.mark.parametrize("timeout", ["600", "9"])
def test_the_failure_reason_names_the_rank_that_is_absent(start, script, timeout):
    """Also if gloo's own time-out is first, which the waiting rank raises."""
    options = (*OPTIONS, "--launcher-nproc-per-node", "2", "--launcher-failure-grace", "1")
    options += ("--launcher-hang-timeout", "3") if timeout == "600" else ()
    host = start("--train-script", script(STOPPED), *options, TIMEOUT=timeout)
    assert host.wait() == (75 if timeout == "600" else 1), host.log()
    first, second = host.failure.splitlines()[:2]
    expected = (
        r"ranks have made no progress for [\d.]+ s: localhost, rank 1 \(local rank 1\) is "
        r"absent from "
        r"all_reduce #2 of the default group, where 1 other is waiting; "
        r"rank 1 does not answer: it is suspended \(SIGSTOP\)\."
    )
    assert re.fullmatch(expected, first), host.log()
    assert second.startswith("exit code 75 (" if timeout == "600" else "localhost, rank 0 (local")
    assert host.leftovers() == []


COUNTED = """
import os, signal, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
# gloo's count stands in for NCCL's, for which a GPU is needed.
dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD] = "cuda:nccl"
for _ in range(20):
    dist.all_reduce(torch.ones(1))
def load():
    time.sleep(600)
if dist.get_rank() == 1:
    load() if os.environ["FAULT"] == "absent" else os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
"""
NOT_BEGUN = (
    " has not begun collective #21 of the default group, which 2 ranks have; "
    "rank 1 is in load, script.py:11."
)
NO_ANSWER = (
    " does not answer: it is suspended (SIGSTOP); "
    "no rank has begun a collective after #21 of the default group."
)


@counted
@pytest.mark.parametrize(("fault", "words"), [("absent", NOT_BEGUN), ("stopped", NO_ANSWER)])
def test_of_nccl_it_is_known_who_has_not_begun(start, script, fault, words):
    options = (*OPTIONS, "--launcher-nproc-per-node", "3", "--launcher-hang-timeout", "3")
    host = start("--train-script", script(COUNTED), *options, FAULT=fault, TORCH_FR_BUFFER_SIZE="0")
    assert host.wait() == 75, host.log()
    named = re.escape(f": localhost, rank 1 (local rank 1){words}")
    says = rf"ranks have made no progress for (?:[89]\.\d|\d\d) s{named}\n"
    assert re.match(says, host.failure), host.log()


SAVES = """
import os, sys, time

for _ in range(2):  # before torch is imported, and after it
    if not (child := os.fork()):
        import torch.distributed
        sys.exit(0)  # through Python's exit, in a process that is no rank
    assert os.waitpid(child, 0)[1] == 0
    import torch, torch.distributed as dist
dist.init_process_group("gloo")
def save():
    time.sleep(9)
if dist.get_rank() == 0:
    save()
dist.barrier()
batches = torch.utils.data.DataLoader(range(64), num_workers=2)  # forked, and no rank
assert len(list(batches)) == 64
for _ in range(20):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
dist.barrier()
time.sleep(0.1)
dist.destroy_process_group()
"""


@recorded
def test_a_slow_save_is_said_and_ends_nothing(start, script):
    options = (*OPTIONS, "--launcher-nproc-per-node", "3")
    host = start("--train-script", script(SAVES), *options)
    assert host.wait() == 0, host.log()
    absent = "localhost, rank 0 (local rank 0) is absent from barrier #1 of the default group, "
    said = re.findall(
        f"^launcher: ranks have made no progress .*: {re.escape(absent)}.*", host.err, re.MULTILINE
    )
    assert 1 <= len(said) <= 3, host.log()  # at 3 s, 6 s, and if it is late 12 s
    where = "where 2 others are waiting; rank 0 is in save, script.py:12."
    assert any(line.endswith(where) for line in said), host.log()


RUNS_ON = """
import atexit, multiprocessing, os, sys, threading, time
def upload():
    time.sleep(3600)
if __name__ == "__main__" and os.environ["RANK"] == "1":
    open("starts", "a").write("x")
    if sys.argv[1] == "a thread":
        threading.Thread(target=upload, name="uploader").start()
    elif sys.argv[1] == "a child":
        multiprocessing.get_context("fork").Process(target=upload, name="exporter").start()
    elif sys.argv[1] == "its exit":
        atexit.register(upload)
    else:
        sys.upload = type("Uploader", (), {"__del__": lambda *_, sleep=time.sleep: sleep(3600)})()
"""
RETURNED = "rank 1's script has ended, but its process is still running: "


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a thread", r'thread "uploader", in upload, script\.py:4\.'),
        slow("a child", r"it is waiting for its child process exporter \(pid \d+\)\."),
        ("its exit", r"in its exit handlers, in upload, script\.py:4\."),
        slow("Python's end", r"in its exit handlers\."),
    ],
)
def test_a_rank_that_runs_on_after_its_script_is_said_and_never_restarted(
    start, script, tmp_path, what, words
):
    options = ("--launcher-nproc-per-node", "2", "--launcher-hang-timeout", "4")
    options += ("--launcher-max-restarts", "2", "--launcher-failure-grace", "1")
    host = start("--train-script", script(RUNS_ON), *OPTIONS, *options, what)
    assert host.wait() == 75, host.log()
    assert re.search(rf"^launcher: {RETURNED}{words}$", host.err, re.MULTILINE), host.log()
    assert re.match(rf"{RETURNED}{words}\nexit code 75 ", host.failure), host.log()
    assert (tmp_path / "starts").read_text() == "x" and host.leftovers() == []


IN_A_THREAD = """
import threading, time, torch, torch.distributed as dist

def train():
    dist.init_process_group("gloo")
    for _ in range(30):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.5)
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()
threading.Thread(target=train).start()
"""


@recorded
def test_nothing_is_said_of_a_job_that_trains_in_a_thread(start, script):
    # For less than it trains, and more than it waits for a core that other tests use.
    options = ("--launcher-watch", "1", "--launcher-hang-notify", "10")
    options += ("--launcher-hang-timeout", "11", "--launcher-nproc-per-node", "2")
    host = start("--train-script", script(IN_A_THREAD), *options)
    assert host.wait() == 0, host.log()
    assert "still running" not in host.err and "no progress" not in host.err, host.log()


HELD = """
import ctypes, os, signal, sys
import torch, torch.distributed as dist

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which comes to nothing
dist.init_process_group("gloo")
def hold():
    os.write(1, b"rank 1 holds\\n")
    lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # it keeps Python's lock
    libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)
if dist.get_rank() == 1:
    hold()
os.write(1, b"rank 0 runs\\n")
dist.all_reduce(torch.ones(1))
"""


@alone_with_stacks
def test_where_ranks_are_that_wait_or_do_not_end(start_two, script):
    job = f"stacks-{os.getpid()}"  # others may run on this machine
    command = ("--train-script", script(HELD), "--launcher-grace", "4")
    hosts = start_two(*command, TRAINING_JOB_NAME=job)
    hosts[0].wait_for("rank 0 runs\n")
    hosts[1].wait_for("rank 1 holds\n")

    def stacks():
        done = completed(sys.executable, "-m", "launcher", "stacks")
        parts = re.split(r"^job (\S+):\n", done.stdout, flags=re.MULTILINE)
        mine = parts[parts.index(job) + 1] if job in parts else parts[0]
        return mine.splitlines() if "in all_reduce" in mine and "in hold" in mine else None

    lines = poll(stacks)
    assert lines[:2] == ["rank 0:", "  main thread:"]
    assert lines[2].endswith('script.py", line 14, in <module>')
    assert lines[-5:-2] == [
        "rank 1:",
        "  it does not answer: it is running code that holds Python's lock (the GIL).",
        "  main thread:",
    ]
    assert lines[-2].endswith('script.py", line 12, in <module>')
    assert lines[-1].endswith('script.py", line 10, in hold')
    hosts[1].signal(signal.SIGTERM)
    assert [host.wait() for host in hosts] == [143, 143]
    assert "launcher: rank 1 has not exited; it is in hold, script.py:10.\n" in hosts[1].err
    done = completed(
        sys.executable, "-m", "launcher", "stacks", "x", code=2, **hosts[0].environment
    )
    assert "takes no argument" in done.stderr and hosts[0].failure is None


POLLS = """
import ctypes, os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
libc, ends = ctypes.PyDLL(None), os.pipe()  # it keeps Python's lock
class Poll(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]
def wait():
    what = Poll(ends[0], 1)
    os.write(1, b"rank 1 waits\\n")
    if libc.poll(ctypes.byref(what), 1, int(os.environ["WAITS"]) * 1000) < 0:
        os._exit(9)  # EINTR, as a library in C may take it
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    wait()
dist.all_reduce(torch.ones(1))
dist.barrier()
time.sleep(0.1)  # leave as leave_group() in train_scripts/checkpoints.py does
dist.destroy_process_group()
"""
POLLING = (*OPTIONS, "--launcher-nproc-per-node", "2")


@alone_with_stacks
@recorded
def test_a_stall_alone_sends_no_rank_a_signal(start, script):
    """Some calls in C end early at any signal, and a job that is healthy would end of it."""
    host = start("--train-script", script(POLLS), *POLLING, WAITS="12")
    assert host.wait() == 0, host.log()
    assert "rank 1 (local rank 1) is absent from all_reduce #2" in host.err, host.log()
    silent = "it does not answer: it is running code that holds Python's lock (the GIL)"
    assert f"  {silent}; `sm-launch stacks` shows where, by sending it a signal." in host.err, (
        host.log()
    )


@alone_with_stacks
@recorded
@pytest.mark.parametrize("how", ["on demand", "hang-timeout"])
def test_who_asks_for_stacks_has_them_by_a_signal(start, script, how):
    timeout = ("--launcher-hang-timeout", "90") if how == "hang-timeout" else ()
    host = start("--train-script", script(POLLS), *POLLING, *timeout, WAITS="80")
    host.wait_for("rank 1 waits")
    if how == "on demand":
        poll(lambda: "by sending it a signal." in host.err)  # the log has been there
        # As sm-launch stacks does, which asks all jobs on this machine.
        (folder,) = (name for name in os.listdir(host.tmp) if name.startswith("sm-launch-"))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.path.join(host.tmp, folder, "socket"))
            connection.sendall(b'{"want_stacks": true}\n')
            connection.settimeout(30)
            connection.recv(1)  # it is answered, or the job has ended
    assert host.wait() == 9, host.log()
