"""Restarts of failed ranks: what they look like; the launchers' decisions are in test_peers.py."""

import os
import re
import selectors
import signal
import socket

import pytest
from conftest import poll

from launcher.run.supervisor import ready

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
    for host in hosts:
        said = (
            r": every rank succeeded after 1 restart; \S+ s in total: joining \S+ s, lost to fail"
        )
        assert re.search(said, host.err.splitlines()[-1]), host.log()
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
    times = re.findall(r"for the (\w+) time", host.err)
    assert times == ["second"], host.log()
    assert host.err.count("(--launcher-failure-grace sets this delay)") == 2, host.log()
    jobs = re.findall(r"job .*", host.out)
    assert len(jobs) == 3 and len(set(jobs)) == 1, host.log()


WAITS = """
import os, signal, sys, time
host, attempt = os.environ["SM_CURRENT_HOST"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def save(*_):
    while not os.path.exists("saved"):
        time.sleep(0.01)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open("armed-" + host, "w").close()
while not os.path.exists("armed-127.0.0.1"):
    time.sleep(0.01)
if attempt == "0":
    time.sleep(600 if host == "127.0.0.1" else 0)
    raise ValueError("loss is nan")
"""


def test_a_host_that_stands_still_while_ranks_are_restarted(start_two, script):
    """And those who ask it for stacks and give up, in the same turn of the launcher's loop."""
    options = ("--launcher-max-restarts", "1", "--launcher-failure-grace", "90")
    first, second = start_two("--train-script", script(WAITS), *options, "--launcher-verbose")
    poll(lambda: "KeeperCleared(rank=1" in second.err)
    (folder,) = (name for name in os.listdir(second.tmp) if name.startswith("sm-launch-"))
    clients = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for client in clients:
        client.settimeout(60)
        client.connect(os.path.join(second.tmp, folder, "socket"))
        client.sendall(b'{"want_stacks": true}\n')
    for client in clients:
        assert client.recv(1), second.log()  # it is known
        client.sendall(b'{"want_')
    second.signal(signal.SIGSTOP)
    open("saved", "w").close()
    poll(lambda: "Running on Start(attempt=2" in first.err)
    for client in clients:
        client.close()
    second.signal(signal.SIGCONT)
    for host in (first, second):
        assert host.wait() == 0, first.log() + second.log()


def test_what_has_happened_while_a_launcher_was_stopped_comes_before_what_is_due():
    class Late(selectors.DefaultSelector):
        """What a select() sees that was stopped until its time was over: nothing."""

        def select(self, timeout=None):
            return [] if timeout else super().select(timeout)

    reader, writer = os.pipe()
    with Late() as selector, open(reader, "rb"), open(writer, "wb", buffering=0) as file:
        selector.register(reader, selectors.EVENT_READ)
        assert not ready(selector, 0.5)
        file.write(b"x")
        assert ready(selector, 0.5)
