"""Real jobs in which a rank does not come, comes late, or does not end."""

import os
import re
import signal
import sys

import pytest
from conftest import TORCH, completed, poll

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
{counted}

def load():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def train(step):
    raise ValueError(f"loss is nan in step {{step}}")

for _ in range(20):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    try:
        train(21)
    finally:
        load()  # a barrier, say, or destroy_process_group()
dist.all_reduce(torch.ones(1024))
time.sleep(0.1)  # leave as leave_group() in train_scripts/checkpoints.py does
dist.destroy_process_group()
"""
# gloo's count stands in for NCCL's, for which a GPU is needed.
COUNTED = 'dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD] = "cuda:nccl"'
ABSENT = "is absent from all_reduce #21 of the default group, where 1 other is waiting"
NOT_BEGUN = "has not begun collective #21 of the default group, which 1 rank has"
RAISED = "; rank 1 is handling ValueError: loss is nan in step 21, raised in train, script.py:14"
RAISED *= sys.version_info >= (3, 10)  # no earlier Python tells


@pytest.mark.parametrize(
    ("line", "size", "says", "restarts", "code"),
    [
        pytest.param("", "2000", ABSENT, 1, 0, marks=recorded),
        pytest.param(COUNTED, "0", NOT_BEGUN, 0, 75, marks=counted),
    ],
    ids=["gloo", "NCCL"],
)
def test_a_rank_that_does_not_come_is_named_and_its_job_restarted_or_ended(
    start_two, script, line, size, says, restarts, code
):
    options = (*OPTIONS, "--launcher-hang-timeout", "4", "--launcher-max-restarts", restarts)
    path = script(LOCKED.format(counted=line))
    hosts = start_two("--train-script", path, *options, TORCH_FR_BUFFER_SIZE=size)
    codes = [host.wait() for host in hosts]
    log = "".join(host.log() for host in hosts)
    assert codes == [code, code], log
    named = f"127.0.0.2, rank 1 (local rank 0) {says}; rank 1 is in load, script.py:11{RAISED}"
    said = rf"^launcher: ranks have made no progress for [\d.]+ s: {re.escape(named)}\.$"
    assert re.search(said, hosts[0].err, re.MULTILINE), log
    for host in hosts:
        why = rf"ranks have made no progress for (?:9\.\d|\d\d+) s: {re.escape(named)}"
        if restarts:
            failed = rf"attempt 1 of 2 failed after [\d.]+ s: {why};"
            assert len(re.findall(failed, host.err)) == 1, log
        else:
            assert re.match(rf"{why}\.?\nexit code 75 ", host.failure), log
    assert "launcher: rank 1:\n" in hosts[0].err, log  # the stacks
    assert re.search(r'launcher:     File ".*script.py", line 11, in load\n', hosts[0].err), log


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


PORT = """
import datetime, os
import torch.distributed as dist
if os.environ["RANK"] == "0":  # with torch 2.4 it serves the store
    os.environ["MASTER_PORT"] = "12355"
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
"""


def test_a_group_that_cannot_come_is_said_with_what_the_script_does(start, script):
    host = start("--train-script", script(PORT), *OPTIONS, "--launcher-nproc-per-node", "2")
    poll(lambda: re.search(r"rank 0 waits at \S+:12355, .*: the script sets MASTER_PORT", host.err))
    host.signal(signal.SIGTERM)
    assert host.wait() == 143, host.log()


BATON = """
import os, time
import torch.distributed as dist
def load_extension():
    while not os.path.exists("built"):
        time.sleep(0.2)
load_extension()
"""


@pytest.mark.parametrize("how", ["cold", "warm"])
def test_ranks_that_stand_still_or_work_alone_are_said(start, script, how):
    options = (*OPTIONS, "--launcher-nproc-per-node", "2", "--launcher-start", how)
    host = start("--train-script", script(BATON), *options)
    poll(lambda: "begun no collective: it is in load_extension, script.py:6, for" in host.err)
    open("built", "w").close()
    assert host.wait() == 0, host.log()
    assert "2 ranks ran, and none exchanged anything with another" in host.err, host.log()


# Both ranks have imported torch when the first timeout begins.
MEET = """
import datetime, os, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
def late():
    time.sleep(600)
open(f"up-{rank}", "w").close()
while not os.path.exists(f"up-{1 - rank}"): time.sleep(0.01)
"""
GROUP = 'dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))\n'
REDUCE = "dist.all_reduce(torch.ones(1))\n"
IS_LATE = "if rank == 1: late()\n"
OTHERS = "the default group, where 1 other is waiting"


@recorded
@pytest.mark.parametrize(
    ("text", "absent"),
    [
        (GROUP + REDUCE + IS_LATE + REDUCE, f"is absent from all_reduce #2 of {OTHERS}"),
        (
            IS_LATE + GROUP,
            "has not joined init_process_group of ranks 0,1, where 1 other is waiting",
        ),
    ],
    ids=["collective", "group"],
)
def test_a_timeout_before_any_notice_names_the_rank_that_has_not_come(start, script, text, absent):
    options = ("--launcher-nproc-per-node", "2", "--launcher-failure-grace", "1")
    host = start("--train-script", script(MEET + text), *options)
    assert host.wait() == 1, host.log()
    where = f"{absent}; rank 1 is in late, script.py:6."
    assert host.failure.startswith(f"localhost, rank 1 (local rank 1) {where}\n"), host.log()
