"""The fault matrix: whatever breaks, wherever, every host ends in time and says the same.

`make matrix` runs all and prints the table of docs/development/hosts.md; faults.py has the means.
`make test-containers` has one case of each kind, to show that real hosts do what was decided: what
is decided in the others, real processes (test_stops.py, test_two_hosts.py ...) or simulated ones
show.
"""

import io
import re
import time
from typing import NamedTuple

import pytest
from conftest import more

from cluster.engine import build
from cluster.faults import Fault
from cluster.hosts import CONTAINERS, TRAIN

pytestmark = [*CONTAINERS, pytest.mark.row]
algo_1_or_2 = pytest.mark.parametrize("host", ["algo-1", "algo-2"])
algo_1_too = pytest.mark.parametrize("host", [more("algo-1"), "algo-2"])
algo_2_too = pytest.mark.parametrize("host", ["algo-1", more("algo-2")])

RAISE = "raise ValueError('loss is nan')"
LATER = "time.sleep(1)\n" + RAISE
IGNORE = "signal.signal(15, signal.SIG_IGN); sys.stdout.write('does it\\n'); time.sleep(600)"
SAVE = (
    "def save(*_): time.sleep(5); sys.stdout.write('saved\\n'); os._exit(0)\n"
    "signal.signal(15, save); sys.stdout.write('does it\\n'); time.sleep(600)"
)
WORKERS = (
    "from torch.utils.data import DataLoader\n"
    "loader = DataLoader(range(8), num_workers=2)\n"
    "heard = []\n"
    "signal.signal(15, lambda *_: heard.append(1))\n"
    "sys.stdout.write('does it\\n')\n"
    "while not heard: list(loader)\n"
    "list(loader); sys.stdout.write('saved\\n')"
)
REPLACED = "import os, signal, sys, time\n" + SAVE
EXEC = f"os.execv(sys.executable, [sys.executable, '-c', {REPLACED!r}])"
# As in many scripts: an error, and a cleanup in which the others' connections break.
CLEAN_UP = (
    "try: raise ValueError('loss is nan')\nfinally: dist.destroy_process_group(); time.sleep(1)"
)
SEE_IT_BREAK = "try:\n    while True: step()\nexcept Exception: sys.exit(1)"
HYDRA = """
import hydra
sys.argv[1:] = []
@hydra.main(version_base=None)
def main(config):
    raise ValueError("loss is nan")
main()
"""
ONCE = "again = os.path.exists('/opt/ml/input/again')\nopen('/opt/ml/input/again', 'w')\n"
ONCE_EACH = """
signal.signal(15, lambda *_: sys.exit(143))
open("/opt/ml/input/rounds", "a").write("x")
number = len(open("/opt/ml/input/rounds").read()) - 1
if (number, rank) in ((0, 1), (1, 0)):
    time.sleep(2)  # for the other rank to have noted its round, too
    sys.exit(3)
time.sleep(0 if number == 2 else 600)
"""
EATS = "held = []\nwhile True: held.append(b'x' * (1 << 24))"
HUNGRY = """
import torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        held = []
        while True: held.append(b"x" * (1 << 24))
list(DataLoader(Images(), num_workers=1))
"""
LOAD = "def load():\n    {}\nload()"
KEEP = "import ctypes; lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None); "
KEEP += "libc.pthread_mutex_lock(lock), libc.pthread_mutex_lock(lock)"
LOCK = "import threading as t; lock = t.Lock(); lock.acquire(); lock.acquire()"
UPLOADS = """
import threading, torch.distributed
def upload():
    time.sleep(600)
threading.Thread(target=upload, name="uploader").start()
"""
FULL_PIPE = "mkfifo /full; exec 3<>/full; head -c 65536 /dev/zero >&3; exec 2>/full"
LOOP = "while true; do sleep 0.2; done &"

FIRST = "algo-1, rank 0 (local rank 0) "
LAST = "algo-2, rank 1 (local rank 0) "
RAISED = "failed with ValueError: loss is nan\n"
EXITED = 'ended with exit code 3; its last line: "rank 1 runs"\n'
KILLED = "was killed by SIGKILL (signal 9); "
OOM = "out of memory: the memory cgroup recorded an OOM kill (oom_kill)\n"
WORKER = re.escape(LAST) + "failed with RuntimeError: .* is killed by signal: Killed.*; "
LEFT = r"algo-2, rank 1 had ended with exit code 0, [\d.]+ s before rank 0 failed\n"
SAID = r"ranks have made no progress for [\d.]+ s: "
ABSENT = SAID + r"algo-3, rank 2 \(local rank 0\) is absent from all_reduce #\d+ "
ABSENT += "of the default group, where 2 others are waiting; rank 2 "
IN_LOAD = re.compile(ABSENT + r"is in load, <string>:2\.\n")
KEEPS = r"does not answer: it is running code that holds Python's lock \(the GIL\)\.\n"
STOPPED = r"does not answer: it is suspended \(SIGSTOP\)\.\n"
OTHER = SAID + r"rank 2 is in broadcast #\d+ \(1 Float\), 2 ranks are in all_reduce #\d+ "
OTHER += r"\(1 Float\) of the default group: all ranks must make the same call\.\n"
SIBLING = "algo-2, rank 2 (local rank 0) " + RAISED
ON = "rank 1's script has ended, but its process is still running: "

TRAIN_ON = {"training": True}
HURRY = {"launcher_failure_grace": 4}
LOOK = {"launcher_watch": 1, "launcher_hang_notify": 5, "launcher_hang_timeout": 10, **HURRY}
WAIT = {"training": True, "hosts": 3, **LOOK}


class Deed(NamedTuple):
    """What ranks do, by rank, in which job; with which code and words it ends, in how many seconds.

    All hosts end in 3 s. Before that, LATER sleeps for 1 s, and a rank that does not end at SIGTERM
    has a grace: 4 s in HURRY.
    """

    plan: dict[int, str]
    job: dict[str, object]
    code: int
    says: str | re.Pattern[str] | None
    within: float


# Without progress for 10 s, two polls of 1 s and 4 s for reports; then all hosts end in 3 s.
HANG = 10 + 2 * 1 + 4 + 3
DEEDS = {
    "raises in training": Deed({1: RAISE}, TRAIN_ON, 1, LAST + RAISED, within=3),
    "of the first host raises in training": Deed({0: RAISE}, TRAIN_ON, 1, FIRST + RAISED, within=3),
    "raises, as another one": Deed({0: RAISE, 1: RAISE}, TRAIN_ON, 1, "algo-", within=3),
    "exits": Deed({1: "sys.exit(3)"}, TRAIN_ON, 3, LAST + EXITED, within=3),
    "gets SIGSEGV": Deed(
        {1: LOAD.format("os.kill(os.getpid(), 11)")}, TRAIN_ON, 139,
        LAST + "was killed by SIGSEGV (signal 11) in load, <string>:2\n", within=3),
    "gets SIGKILL": Deed(
        {1: "os.kill(os.getpid(), 9)"}, TRAIN_ON, 137,
        LAST + KILLED + "no out-of-memory kill was recorded\n", within=3),
    "hits the memory limit": Deed({1: EATS}, {"memory": "1g"}, 137, LAST + KILLED + OOM, within=3),
    "has a loader's worker that hits the memory limit": Deed(
        {1: HUNGRY}, {**TRAIN_ON, "memory": "1g"}, 1,
        re.compile(WORKER + re.escape(OOM)), within=6),
    # The coordinator waits for 3 s for a better cause than a broken connection.
    "leaves the others in training": Deed(
        {1: "sys.exit(0)"}, TRAIN_ON, 1,
        re.compile(LEFT + re.escape(FIRST) + "failed with RuntimeError: "), within=3 + 3),
    "raises while the others are in no collective": Deed(
        {1: RAISE}, {}, 1, LAST + RAISED, within=3),
    "of the first host raises while the others are in no collective": Deed(
        {0: RAISE}, {}, 1, FIRST + RAISED, within=3),
    "raises, and one of another host ignores SIGTERM": Deed(
        {0: IGNORE, 1: LATER}, HURRY, 1, LAST + RAISED, within=1 + 4 + 3),
    "raises, and its sibling saves for 5 s": Deed(
        {2: LATER, 3: SAVE}, {"ranks": 2}, 1, SIBLING, within=1 + 5 + 3),
    "raises, and its sibling ignores SIGTERM": Deed(
        {2: LATER, 3: IGNORE}, {"ranks": 2, **HURRY}, 1, SIBLING, within=1 + 4 + 3),
    "raises and cleans up while another one sees its connection break": Deed(
        {0: CLEAN_UP, 1: SEE_IT_BREAK}, TRAIN_ON, 1, FIRST + RAISED, within=1 + 3),
    "of 16 hosts raises": Deed(
        {7: RAISE}, {"hosts": 16}, 1, "algo-16, rank 7 (local rank 0) " + RAISED, within=6),
    # Python hangs with its traceback, so the rank is killed at the end of this grace.
    "raises where nobody reads stderr": Deed(
        {0: SAVE, 1: RAISE}, {"first": FULL_PIPE, **HURRY}, 1, LAST + RAISED, within=4 + 5),
    # Two others wait for it in a collective.
    "sleeps": Deed({2: LOAD.format("time.sleep(600)")}, WAIT, 75, IN_LOAD, within=HANG),
    "reads": Deed({2: LOAD.format("os.read(os.pipe()[0], 1)")}, WAIT, 75, IN_LOAD, within=HANG),
    "locks": Deed({2: LOAD.format(LOCK)}, WAIT, 75, IN_LOAD, within=HANG),
    "loops": Deed({2: LOAD.format("while True: pass")}, WAIT, 75, IN_LOAD, within=HANG),
    "keeps Python's lock": Deed(
        {2: LOAD.format(KEEP)}, WAIT, 75, re.compile(ABSENT + KEEPS), within=HANG),
    "gets SIGSTOP": Deed(
        {2: "os.kill(os.getpid(), signal.SIGSTOP)"}, WAIT, 75,
        re.compile(ABSENT + STOPPED), within=HANG + 4),
    "broadcasts": Deed(
        {2: "dist.broadcast(torch.ones(1), 0)"}, WAIT, 75, re.compile(OTHER), within=HANG),
    "is through and does not end": Deed(
        {0: "pass", 1: UPLOADS}, LOOK, 75,
        ON + 'thread "uploader", in upload, <string>:4', within=HANG + 4),
    # As many restarts as there have to be, and no more.
    "fails once and is restarted": Deed(
        {0: ONCE + "again or time.sleep(600)", 1: ONCE + "sys.exit(0 if again else 3)"},
        {"launcher_max_restarts": 1}, 0, None, within=30),
    "of each host fails once, and exits with 143 when it is restarted": Deed(
        {0: ONCE_EACH, 1: ONCE_EACH}, {"launcher_max_restarts": 2}, 0, None, within=40),
}  # fmt: skip
ONE_OF_EACH = ("raises in training", "hits the memory limit", "keeps Python's lock")


@pytest.fixture
def fault(job, matrix, request):
    name = request.node.originalname.removeprefix("test_").replace("_", " ")
    callspec = getattr(request.node, "callspec", None)
    return Fault(job, f"{name}: {callspec.id}" if callspec else name, matrix)


# What ranks do


@pytest.mark.parametrize("what", [what if what in ONE_OF_EACH else more(what) for what in DEEDS])
def test_a_rank(fault, what):
    deed = DEEDS[what]
    fault.strikes(deed.plan, **deed.job)
    fault.ends(deed.code, deed.says, deed.within)


@pytest.mark.more
def test_a_hydra_app_raises(fault, client):
    recipe = io.BytesIO(f"FROM {fault.job.image}\nRUN pip install hydra-core\n".encode())
    fault.job.image = build(client, "sm-launch-test-hydra", fileobj=recipe)
    fault.strikes({0: HYDRA})
    fault.ends(1, FIRST + RAISED, 3)


# torchrun, a launcher, a host, or the network fails


SIGNALLED = "it was sent a signal, or ends by itself (see this host's log)"
ENDS = [(9, "was killed by SIGKILL (signal 9)", 5), (15, f"failed: {SIGNALLED}", 6)]


@algo_1_too
@pytest.mark.parametrize(("number", "says", "within"), ENDS, ids=["SIGKILL", "SIGTERM"])
def test_torchrun_gets(fault, host, number, says, within):
    fault.runs(training=True)
    fault.job[host].send(number, to="torch.distributed.run")
    fault.ends(69, f"{host}: torchrun {says}\n", within)


@algo_2_too
def test_torchrun_hangs_while_a_rank_of_the_other_host_raises(fault, host):
    rank = 1 if host == "algo-1" else 0
    fault.prepare({rank: RAISE}, launcher_failure_grace=4)
    fault.start()
    fault.job[host].send(19, to="torch.distributed.run")
    fault.strike()
    fault.ends(1, (FIRST, LAST)[rank] + RAISED, 4 + 3)


@algo_2_too
def test_the_launcher_is_killed(fault, host):
    fault.runs(how=TRAIN)
    fault.job[host].send(9, to="--train-script")
    said = f"{host} was lost: its launcher died\n"
    fault.ends(69, said, 3, lost=(host,))
    assert fault.job[host].wait() != 0


@pytest.mark.more
@algo_1_or_2
def test_the_launcher_is_stopped(fault, host):
    fault.runs(how=TRAIN)
    fault.job[host].send(19, to="--train-script")
    says = f"{host} was lost: its launcher has not answered for 60 s\n"
    fault.ends(69, says, 60 + 5, lost=(host,))
    fault.job[host].send(18, to="--train-script")
    fault.job[host].wait()
    assert fault.job[host].failure.startswith(says)  # the same, when it goes on


@pytest.mark.more
def test_the_folder_for_temporary_files_is_gone_at_a_restart(fault):
    gone = "import shutil; os.path.exists('/opt/ml/input/tmp') or sys.exit(0)\n"
    gone += "shutil.rmtree('/opt/ml/input/tmp'); sys.exit(3)"
    fault.prepare({0: "sys.exit(0)", 1: gone}, launcher_max_restarts=1)
    fault.job["algo-2"].write("input/tmp/x", "")
    fault.job["algo-2"].environment["TMPDIR"] = "/opt/ml/input/tmp"
    fault.start()
    fault.strike()
    fault.ends(0, None, 12)


@algo_1_too
def test_the_container_of_one_host_of_three_is_killed(fault, host):
    fault.runs(training=True, hosts=3)
    fault.job[host].kill()
    fault.ends(69, f"{host} was lost: its launcher died\n", 3, lost=(host,))


@algo_2_too
# What is sent after the cut must not lengthen the wait.
@pytest.mark.parametrize("watch", [15, more(8)], ids=["", "with a report each 8 s"])
def test_the_network_is_cut(fault, host, watch):
    fault.runs(training=True, launcher_watch=watch)
    fault.job[host].cut_off()
    left = "algo-2" if host == "algo-1" else "algo-1"
    fault.ends(69, f"{host} was lost: it stopped answering", 20, lost=(host,))
    assert fault.job[host].wait() == 69
    assert fault.job[host].failure.startswith(f"{left} was lost: it stopped answering")


# Hosts do not come together


def test_a_host_is_absent(fault):
    fault.prepare(hosts=3, launcher_start_timeout=15)
    fault.begins("algo-1", "algo-2")
    fault.ends(69, "algo-3 did not join within 15 s\n", 15 + 5, lost=("algo-3",))


@pytest.mark.more
def test_the_first_host_is_absent(fault):
    fault.prepare(launcher_start_timeout=15)
    fault.begins("algo-2")
    fault.ends(69, "algo-1 could not be reached within 15 s (", 15 + 5, lost=("algo-1",))


@pytest.mark.more
def test_names_do_not_resolve_for_30_s_and_a_host_comes_60_s_late(fault):
    fault.prepare({0: "pass", 1: "pass", 2: "pass"}, hosts=3)
    for host in fault.job.values():
        host.write("input/now", "")
    for name in ("algo-1", "algo-2"):
        fault.job[name].will_first(
            "cp /etc/resolv.conf /run; echo nameserver 127.0.0.9 > /etc/resolv.conf; "
            "(sleep 32; cat /run/resolv.conf > /etc/resolv.conf) &"
        )
    fault.begins("algo-1", "algo-2")
    time.sleep(60)
    fault.job.start("algo-3")
    fault.ends(0, None, 75)
    assert "waiting for algo-1 (the name algo-1 does not resolve)" in fault.job["algo-2"].log()
    for name in ("algo-1", "algo-2"):
        assert "waiting for algo-3." in fault.job[name].log()


@pytest.mark.more
@pytest.mark.parametrize("what", ["version of torch", "script's arguments"])
def test_hosts_differ_in_their(fault, what):
    fault.prepare()
    other = fault.job["algo-2"]
    if what == "version of torch":
        other.will_first(
            "sed -i s/2.13.0/2.12.0/ /usr/local/lib/python3*/*-packages/torch/version.py"
        )
        values = "'2.13' and '2.12'"
    else:
        other.hyperparameters["lr"] = 0.5
        values = "[] and ['--lr', '0.5']"
    fault.begins()
    fault.ends(2, f"launcher: algo-1 and algo-2 differ in their {what}: {values}; ", 5)


@pytest.mark.more
@algo_1_or_2
def test_the_script_is_missing(fault, host):
    fault.prepare()
    (fault.job[host].opt_ml / "code" / "script.py").unlink()
    fault.begins()
    fault.ends(2, f"launcher: {host}: --train-script script.py: there is neither ", 5)


def take_port(host, port):
    """Have something else listen on a port of that host."""
    listen = f'import socket, time; s = socket.create_server(("", {port})); time.sleep(600)'
    host.will_first(f"python3 -c '{listen}' & sleep 1")


@pytest.mark.more
def test_the_rendezvous_port_is_taken(fault):
    fault.prepare()
    take_port(fault.job["algo-1"], 29400)
    fault.begins()
    text = (
        "launcher: algo-1: the rendezvous port of algo-1:29400 is already in use on this host; "
        "choose"
    )
    fault.ends(2, text, 5)
    assert "--launcher-rdzv-port" in fault.job["algo-2"].failure


@pytest.mark.more
def test_the_peer_port_is_taken(fault):
    fault.prepare(launcher_start_timeout=15)
    take_port(fault.job["algo-1"], 29401)
    fault.begins()
    # It tries to listen for 3 s, and stays for 3 s to tell late hosts.
    says = "launcher: algo-1 cannot listen on port 29401 for "
    fault.ends(2, says, 3 + 3 + 2, lost=("algo-2",))
    fault.ends(69, "algo-1 could not be reached within 15 s (", 15 + 5, lost=("algo-1",))
    for host in fault.job.values():  # the second says what it has met; then algo-1 has ended
        assert "choose another with --launcher-peer-port" in host.log()


# A stop


def run_until_ready(fault, plan, **job):
    """Have both ranks do their part, as far as `does it`; from then on the seconds count."""
    fault.strikes(plan, **job)
    for host in fault.job.values():
        host.wait_for("does it\n")
    fault.happens()


@pytest.mark.parametrize(
    ("plan", "first"),
    [(SAVE, ""), more(WORKERS, ""), more(EXEC, ""), more(SAVE, LOOP), more(SAVE, FULL_PIPE)],
    ids=["saves", "has loader workers", "replaced itself", "beside a loop", "nobody reads stderr"],
)
def test_a_stop_of_one_host_and_each_rank_saves(fault, plan, first):
    run_until_ready(fault, {0: plan, 1: plan}, first=first)
    fault.job["algo-2"].send(15)
    time.sleep(0.5)
    fault.job["algo-1"].send(15)  # does not shorten a save
    fault.ends(143, None, 5 + 3)
    assert fault.job.logs().count("saved\n") == 2 and "left running" not in fault.job.logs()


@pytest.mark.more
def test_a_stop_of_all_hosts_and_a_rank_that_fails_while_it_saves(fault):
    fails = "signal.signal(15, lambda *_: 1 / 0); sys.stdout.write('does it\\n'); time.sleep(600)"
    run_until_ready(fault, {0: SAVE, 1: fails})
    for host in fault.job.values():
        host.send(15)
    fault.ends(143, None, 5 + 3)
    assert "during the stop: " + LAST + "failed with ZeroDivisionError" in fault.job.logs()


@pytest.mark.more
def test_a_stop_while_a_rank_saves_and_the_others_wait(fault):
    save = "time.sleep(15); sys.stdout.write('does it\\n'); time.sleep(600)"
    plan = {0: f"def save():\n    {save}\nsave()"}
    fault.strikes(plan, training=True, hosts=3, launcher_watch=1, launcher_hang_notify=5)
    fault.job["algo-1"].wait_for("does it\n")
    fault.happens()
    fault.job["algo-2"].send(15)
    fault.ends(143, None, 3)
    said = re.findall("ranks have made no progress for .*", fault.job.logs())
    first, second = said[:2]  # after 5 s and 10 s
    assert FIRST + "is absent from all_reduce #" in first and "for the same reason" in second
    assert first.endswith("where 2 others are waiting; rank 0 is in save, <string>:2.")


@algo_1_too
def test_a_stop_while_another_host_is_missing(fault, host):
    fault.prepare()
    fault.job.start(host)
    fault.job[host].wait_for("rendezvous at algo-1:29400")
    fault.happens()
    fault.job[host].send(15)
    fault.ends(143, None, 5, lost=tuple(name for name in fault.job if name != host))


# What is around the launcher


DRIVER = """
mkdir /driver; export PATH=/driver:$PATH
printf '#!/bin/sh\\ntrap "" TERM\\necho it hangs >/proc/1/fd/1\\nsleep 600\\n' >/driver/nvidia-smi
chmod +x /driver/nvidia-smi
"""


@pytest.mark.more
def test_a_stop_while_nvidia_smi_hangs(fault):
    fault.prepare()
    fault.job["algo-2"].will_first(DRIVER)
    fault.job.start()
    fault.job["algo-2"].wait_for("it hangs\n")
    fault.happens()
    fault.job["algo-2"].send(15)
    fault.ends(143, None, 3)


# Success is together


@pytest.mark.more
def test_one_host_is_through_8_s_before_the_other(fault):
    fault.strikes({0: "pass", 1: "time.sleep(8)"})
    fault.ends(0, None, 8 + 3)
    first, second = (host.ended_at for host in fault.job.values())
    assert abs(first - second) < 2, fault.job.logs()


# The output folder


FILL = "open('/opt/ml/output/x', 'w').write(4096 * 'x')\n"


@pytest.mark.parametrize(
    ("mount", "fill", "why"),
    [("ro", "", "Read-only file system"), more("size=4k", FILL, "No space left on device")],
    ids=["read-only", "full"],
)
def test_the_output_folder_is(fault, mount, fill, why):
    fault.prepare({1: fill + RAISE})
    fault.job["algo-2"].options["tmpfs"] = {"/opt/ml/output": mount}
    fault.start()
    fault.strike()
    fault.ends(1, LAST + RAISED, 3, unwritten=("algo-2",))
    assert f"warning: cannot write /opt/ml/output/failure ({why})" in fault.job["algo-2"].log()
