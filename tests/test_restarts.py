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


HANGS = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("trains again", flush=True)
elif os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ignores", "w").close()
    time.sleep(600)
else:
    while not os.path.exists("ignores"):
        time.sleep(0.01)
    ThreadPoolExecutor().submit(time.sleep, 600)  # Python joins its thread at the exit
    print("fails", flush=True)
    raise ValueError("loss is nan")
"""


def test_ranks_that_do_not_end_are_killed_and_restarted(start, script):
    """One that hangs after it raised, and one that ignores SIGTERM, for which it has its grace."""
    options = ("--launcher-nproc-per-node", "2", "--launcher-max-restarts", "1")
    host = start("--train-script", script(HANGS), *options, "--launcher-failure-grace", "2")
    host.wait_for("fails")
    host.wait_for("trains again", 2, timeout=25)  # torchrun gives them 30 s
    assert host.wait() == 0, host.log()
    assert "(--launcher-failure-grace sets its time to end)" in host.err


TWICE = """
import os, shutil

print("job", os.environ["TORCHELASTIC_RUN_ID"], flush=True)
for folder in os.scandir(os.environ["TMPDIR"]):
    shutil.rmtree(folder)  # as a script does that empties /tmp
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    raise ValueError("loss is nan")
"""


def test_the_log_numbers_attempts_and_says_when_a_failure_repeats(start, script):
    host = start("--train-script", script(TWICE), "--launcher-max-restarts", "2")
    assert host.wait() == 0, host.log()
    assert host.failure is None and host.leftovers() == []
    failed = r"failed with ValueError: loss is nan"
    for number in (1, 2):
        line = rf"^launcher: attempt {number} of 3 failed after [\d.]+ s: .*rank 0 .*{failed}"
        assert len(re.findall(line, host.err, re.MULTILINE)) == 1, host.log()
    times = re.findall(r"for the (\w+) time, [\d.]+ s after its start", host.err)
    assert times == ["second"], host.log()
    assert len(set(re.findall(r"job .*", host.out))) == 1, host.log()
