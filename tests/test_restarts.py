"""Restarts of failed ranks: what they look like; the launchers' decisions are in test_peers.py."""

import os
import re
import selectors

import pytest

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
