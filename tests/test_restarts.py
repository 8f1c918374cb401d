"""Restarts of failed ranks: what they look like; the launchers' decisions are in test_peers.py."""

import re

import pytest

pytestmark = pytest.mark.torch

ONCE = """
import os, signal, sys, time
import torch, torch.distributed as dist

def save(*_):
    time.sleep(2)
    sys.exit(0)

host = os.environ["SM_CURRENT_HOST"]
signal.signal(signal.SIGTERM, save)
with open("starts-" + host, "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + " ")
is_first = len(open("starts-" + host).read().split()) == 1
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if is_first and host == "127.0.0.2":
    raise ValueError("loss is nan")
if is_first:
    time.sleep(600)  # in work of its own: it hears of the failure by SIGTERM alone, and saves
for _ in range(9):
    dist.all_reduce(torch.ones(1))
dist.barrier()
time.sleep(0.1)  # leave as leave_group() in train_scripts/checkpoints.py does
dist.destroy_process_group()
"""


def test_one_failure_is_one_restart_on_all_hosts(start_two, script, tmp_path):
    hosts = start_two("--train-script", script(ONCE), "--launcher-max-restarts", "3")
    codes = [host.wait() for host in hosts]
    assert codes == [0, 0], "".join(host.log() for host in hosts)
    starts = {path.name[7:]: path.read_text().split() for path in tmp_path.glob("starts-*")}
    assert starts == {host.name: ["0", "1"] for host in hosts}


# The rank that fails hangs after it, and the other one ignores SIGTERM.
TWICE = """
import os, shutil, signal, time
from concurrent.futures import ThreadPoolExecutor

attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ignores-" + attempt, "w").close()
    time.sleep(0 if attempt == "2" else 600)
else:
    print("job", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
    while not os.path.exists("ignores-" + attempt):
        time.sleep(0.01)  # until the other one needs no file of the launcher's any more
    for folder in os.scandir(os.environ["TMPDIR"]):
        shutil.rmtree(folder)  # as a script does that empties /tmp
    if attempt != "2":
        ThreadPoolExecutor().submit(time.sleep, 600)  # Python joins its thread at the exit
        raise ValueError("loss is nan")
"""


def test_ranks_that_do_not_end_are_killed_and_the_log_says_when_a_failure_repeats(start, script):
    options = ("--launcher-nproc-per-node", "2", "--launcher-max-restarts", "2")
    host = start("--train-script", script(TWICE), *options, "--launcher-failure-grace", "2")
    assert host.wait() == 0, host.log()
    assert host.failure is None and host.leftovers() == []
    failed = r"failed with ValueError: loss is nan"
    for number in (1, 2):
        line = rf"^launcher: attempt {number} of 3 failed after [\d.]+ s: .*rank 0 .*{failed}"
        assert len(re.findall(line, host.err, re.MULTILINE)) == 1, host.log()
    times = re.findall(r"for the (\w+) time, [\d.]+ s after its start", host.err)
    assert times == ["second"], host.log()
    assert host.err.count("(--launcher-failure-grace sets its time to end)") == 2, host.log()
    jobs = re.findall(r"job .*", host.out)
    assert len(jobs) == 3 and len(set(jobs)) == 1, host.log()
