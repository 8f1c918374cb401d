"""`sm-launch doctor`: findings from facts, and what it says of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile

import psutil
import pytest
from conftest import LAUNCHER, REPO, completed, free_port, poll

from launcher.child import Child
from launcher.signals import Signals
from launcher_tools import (
    doctor_judge_job,
    doctor_look_job,
    doctor_look_machine,
    doctor_look_network,
    doctor_report,
)
from launcher_tools.doctor_facts import (
    DeviceFacts,
    Facts,
    Folder,
    JobFacts,
    Limit,
    MachineFacts,
    Name,
    NetworkFacts,
    Port,
    PortState,
    StopFacts,
    TorchFacts,
    Versions,
)
from launcher_tools.doctor_finding import Level, problems, size
from launcher_tools.doctor_tasks import Stopped, Tasks

GIB = 1 << 30
OK, WARNING, PROBLEM = Level
PORTS = (29400, "--launcher-rdzv-port"), (29401, "--launcher-peer-port")


# From facts to findings


def ports(state):
    return tuple(Port(number, option, state) for number, option in PORTS)


# A host without a fault: the second of three, with two GPUs and EFA, below `sm-launch init`.
WELL = Facts(
    job=JobFacts(
        hosts=("algo-1", "algo-2", "algo-3"),
        current_host="algo-2",
        nproc_per_node="2",
        num_gpus=2,
        network_interface_name="eth0",
        chosen_interfaces={"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        summary="algo-2 is node 1 of 3.",
        said=("environment: OMP_NUM_THREADS=4.",),
        on_sagemaker=True,
    ),
    network=NetworkFacts(
        names=tuple(Name(f"algo-{n}", (f"10.0.0.{n}",)) for n in (1, 2, 3)),
        seconds=10,
        interfaces={"lo": ("127.0.0.1",), "eth0": ("10.0.0.2",)},
        ports=ports(PortState.REFUSES),
        efa=True,
        efa_plugin="/opt/amazon/ofi-nccl/lib/libnccl-net.so",
    ),
    devices=DeviceFacts(gpus=("NVIDIA A10G", "NVIDIA A10G"), driver="550.1"),
    torch=TorchFacts(
        version="2.8.0", backends=("nccl", "gloo"), cuda="12.8", devices=2, nccl="2.27.3"
    ),
    machine=MachineFacts(
        cores=8,
        shm=Limit(8 * GIB, 0),
        folders=(Folder("/opt/ml/model", "the model", free=50 * GIB),),
        open_files=(65536, 65536),
        processes=Limit(30000, 200),
        memory=Limit(64 * GIB, GIB),
        memory_of="this machine",
    ),
    stop=StopFacts(own_pid=9, pid_1=("python", "/usr/bin/sm-launch", "init"), init_answers=True),
    versions=Versions(launcher="1", python="3.12", psutil="7", toolkit="5.1"),
)


def changed(**changes):
    """Return WELL with some fields of its parts changed: changed(job={"grace": 3})."""
    parts = {
        part: getattr(WELL, part)._replace(**to) if isinstance(to, dict) else to
        for part, to in changes.items()
    }
    return WELL._replace(**parts)


def test_nothing_is_wrong_with_a_host_without_a_fault():
    found = doctor_judge_job.judge(WELL)
    assert {finding.level for finding in found} == {OK}, found
    assert not any(finding.to_do for finding in found)
    assert doctor_report.text(WELL, found).splitlines()[-1] == "A job would run on algo-2."


def of(part):
    """Return a function that makes changes of one part: of("job")(grace=3)."""
    return lambda **fields: {part: fields}


job, network, devices, torch, machine = map(of, ["job", "network", "devices", "torch", "machine"])
stop, versions = of("stop"), of("versions")


def one_name(host, addresses):
    names = (Name(host, addresses) if name.host == host else name for name in WELL.network.names)
    return network(names=tuple(names))


def pid_1(*words, parents=()):
    ancestors = (*((pid, ("x",)) for pid in parents), *([(1, words)] if parents != (0,) else []))
    return stop(pid_1=words, init_answers=False, ancestors=ancestors)


ROWS = [
    # the check, how bad it is, some of the words, and the facts that differ from those of WELL
    ("names", WARNING, "no address is known for algo-3", one_name("algo-3", ())),
    ("names", WARNING, "no answer within 10 s for algo-1", one_name("algo-1", None)),
    ("names", WARNING, "own loopback", one_name("algo-3", ("127.0.0.1",))),
    ("names", WARNING, "algo-1, algo-3 are all 10.0.0.1", one_name("algo-3", ("10.0.0.1",))),
    ("own name", OK, "does not need it", one_name("algo-2", ())),
    ("own name", OK, "127.0.1.1, which leads nobody", one_name("algo-2", ("127.0.1.1",))),
    ("own name", WARNING, "--launcher-peers", one_name("algo-2", ()) | job(peers=False)),
    (
        "own name",
        PROBLEM,
        "algo-1, this host's own name, does not resolve",
        network(names=(Name("algo-1", ()), *WELL.network.names[1:]), ports=ports(PortState.FREE))
        | job(peers=False, current_host="algo-1"),
    ),
    ("interface", OK, "eth0 (10.0.0.2): SageMaker names it", {}),
    (
        "interface",
        OK,
        "SageMaker names ethwe, which does not exist here",
        job(network_interface_name="ethwe", chosen_interfaces={}),
    ),
    ("interface", OK, "it has the address of algo-2", job(chosen_interfaces={})),
    (
        "interface",
        OK,
        "none is set; this host has eth0, lo; gloo gets",
        job(chosen_interfaces={}) | one_name("algo-2", ()),
    ),
    ("names", WARNING, "could not be looked at in time", {"late": ("network",)}),
    ("disk", WARNING, "a file system hangs", {"late": ("machine",)}),
    (
        "interface",
        PROBLEM,
        "NCCL_SOCKET_IFNAME=eth7",
        job(users_interfaces={"NCCL_SOCKET_IFNAME": "eth7"}),
    ),
    (
        "interface",
        WARNING,
        "GLOO_SOCKET_IFNAME=eth7",
        job(users_interfaces={"GLOO_SOCKET_IFNAME": "eth7"}),
    ),
    (
        "interface",
        PROBLEM,
        "GLOO_SOCKET_IFNAME=eth0,ib",  # gloo needs all of them
        job(num_gpus=0, users_interfaces={"GLOO_SOCKET_IFNAME": "eth0,ib"}),
    ),
    (
        "interface",
        WARNING,
        "NCCL_SOCKET_IFNAME=eth7",
        job(num_gpus=0, users_interfaces={"NCCL_SOCKET_IFNAME": "eth7"}),
    ),
    ("interface", OK, "as you set it", job(users_interfaces={"NCCL_SOCKET_IFNAME": "eth"})),
    ("interface", PROBLEM, "=eth", job(users_interfaces={"NCCL_SOCKET_IFNAME": "=eth"})),
    ("interface", OK, "as you set it", job(users_interfaces={"GLOO_SOCKET_IFNAME": "e"})),
    ("interface", WARNING, "=^docker", job(users_interfaces={"GLOO_SOCKET_IFNAME": "^docker"})),
    ("interface", OK, "^docker", job(users_interfaces={"NCCL_SOCKET_IFNAME": "^docker"})),
    (
        "ports",
        OK,
        "free on this host, where the others meet: 29400",
        network(ports=ports(PortState.FREE)),
    ),
    ("ports", PROBLEM, "taken on this host: 29400", network(ports=ports(PortState.TAKEN))),
    ("ports", PROBLEM, "may not listen", network(ports=ports(PortState.DENIED))),
    ("ports", OK, "algo-1 answers", network(ports=ports(PortState.ANSWERS))),
    ("ports", OK, "nothing listens yet", {}),
    ("ports", WARNING, "security group", network(ports=ports(PortState.SILENT))),
    ("efa", OK, "libnccl-net.so", {}),
    ("efa", WARNING, "aws-ofi-nccl", network(efa_plugin="")),
    ("efa", WARNING, "64 KiB may be locked", network(locked_memory=65536)),
    (
        "devices",
        PROBLEM,
        "nvidia-smi: it did not end",
        devices(problem="nvidia-smi: it did not end within 15 s"),
    ),
    (
        "devices",
        PROBLEM,
        "nvidia-smi: it ended with",
        devices(problem="nvidia-smi: it ended with exit code 9") | job(num_gpus=0),
    ),
    (
        "devices",  # a host with its tool, and no GPU: the job trains there
        WARNING,
        "no GPU is seen here -> a job would run on CPU",
        devices(problem="nvidia-smi: exit code 9", is_seen=False) | job(num_gpus=0),
    ),
    ("devices", PROBLEM, "is a build for CPU", torch(cuda="")),
    ("devices", PROBLEM, "can use no GPU (too old)", torch(devices=0, cuda_problem="too old")),
    ("devices", WARNING, "4 processes would share 2 GPUs", job(nproc_per_node="4")),
    (
        "devices",
        WARNING,
        "16 processes would share 8 cores",
        devices(gpus=()) | job(num_gpus=0, nproc_per_node="16"),
    ),
    ("devices", OK, "32 Neuron cores", devices(gpus=()) | job(num_gpus=0, num_neurons=32)),
    ("torch", OK, "torch 2.8.0 for CUDA 12.8, NCCL 2.27.3", {}),
    ("torch", PROBLEM, "torch is not installed", torch(missing=True)),
    ("torch", PROBLEM, "ImportError", torch(version="", problem="ImportError: libcudart")),
    (
        "torch",
        PROBLEM,
        "let this user execute it",
        torch(version="", problem="p cannot be started", was_started=False),
    ),
    (
        "torch",
        PROBLEM,
        "torch 2.8.0, asked for its backends and devices: it did not end",
        torch(problem="it did not end within 60 s", is_late=True),
    ),
    (
        "torch",
        WARNING,
        "asked for its backends",
        torch(problem="it did not end within 60 s", is_late=True)
        | devices(gpus=())
        | job(num_gpus=0),
    ),
    (
        "devices",
        PROBLEM,
        "this host has none",
        devices(gpus=()) | job(num_gpus=0, nproc_per_node="gpu"),
    ),
    ("torch", WARNING, "run it again", torch(version="", problem="late", is_late=True)),
    ("torch", PROBLEM, "no torch.distributed", torch(distributed=False)),
    ("torch", WARNING, "install torch 2.4 or later", torch(version="2.3.1+cu121")),
    ("backends", WARNING, "no nccl", torch(backends=("gloo",))),
    ("backends", OK, "gloo, mpi", torch(backends=("gloo", "mpi")) | job(num_gpus=0)),
    (
        "memory",
        WARNING,
        "900 MiB of 64 GiB free (this machine), for 2",
        machine(memory=Limit(64 * GIB, 64 * GIB - (900 << 20))),
    ),
    ("/dev/shm", WARNING, "64 MiB of 64 MiB free", machine(shm=Limit(64 << 20, 0))),
    ("/dev/shm", WARNING, "missing or read-only", machine(shm=Limit(0))),
    (
        "disk",
        WARNING,
        "1000 MiB left -> raise volume_size",
        machine(folders=(Folder("/m", "the model", free=1000 << 20),)),
    ),
    (
        "disk",
        WARNING,
        "no files left",
        machine(folders=(Folder("/m", "the model", free=9 * GIB, no_inodes=True),)),
    ),
    (
        "disk",
        WARNING,
        "make it writable for this user",
        machine(folders=(Folder("/m", "the model", "Read-only file system"),)),
    ),
    (
        "disk",
        PROBLEM,
        "cannot make a folder",
        machine(folders=(Folder("/t", "TMPDIR", "cannot make a folder"),)),
    ),
    (
        "disk",
        PROBLEM,
        "name a folder that this user may",
        machine(folders=(Folder("/l", "--launcher-log-dir", "it is not a folder"),)),
    ),
    ("open files", WARNING, "256, 65536 (soft, hard)", machine(open_files=(256, 65536))),
    ("open files", PROBLEM, "torchrun needs 26", machine(open_files=(25, 65536))),
    (
        "open files",
        PROBLEM,
        "needs 33 for 3 hosts",
        machine(open_files=(20, 20)) | job(current_host="algo-1"),
    ),
    ("open files", OK, "unlimited", machine(open_files=(65536, None))),
    ("processes", PROBLEM, "too few for 2 ranks", machine(processes=Limit(100, 90))),
    ("processes", WARNING, "60 more processes", machine(processes=Limit(100, 40))),
    ("processes", OK, "no limit", machine(processes=Limit())),
    ("stop", OK, "`sm-launch init` is above", {}),
    ("stop", OK, "would be PID 1", stop(own_pid=1, init_answers=False)),
    (
        "stop",
        OK,
        "`sm-launch init` is above",
        pid_1("/usr/bin/python3", "-u", "/usr/local/bin/sm-launch", "init", "train", parents=(0,)),
    ),
    ("stop", OK, "PID 1 is a launcher", pid_1("python", "launcher/__main__.py", "--epochs", "3")),
    (
        "stop",
        OK,
        "PID 1 is a launcher",
        pid_1("python3", "-m", "launcher", "--train-script", "t.py"),
    ),
    (
        "stop",
        WARNING,
        "AWS's start script: a stop reaches no rank -> put the launcher's `init` in front",
        pid_1("bash", "-m", "start_with_right_hostname.sh", "train", parents=(7,)),
    ),
    (
        "stop",
        WARNING,
        "which ignores stops: none reaches a rank -> put the launcher's `init` in front",
        pid_1("/usr/bin/python3", "/usr/local/bin/train", parents=(7,)),
    ),
    (
        "stop",
        WARNING,
        "PID 1 is a shell (`/bin/sh -c sm-launch",
        pid_1("/bin/sh", "-c", "sm-launch --train-script t.py; true", parents=(7,)),
    ),
    ("stop", OK, "tini is PID 1 and passes", pid_1("/sbin/tini", "--", "sm-launch")),
    ("stop", WARNING, "its own child alone", pid_1("/sbin/tini", "--", "train", parents=(7,))),
    ("stop", OK, "no container's PID 1", pid_1("/lib/systemd/systemd", parents=(7,))),
    ("stop", OK, "no container's PID 1", pid_1("sleep", "9", parents=(0,))),
    ("stop", OK, "if it passes SIGTERM on", pid_1("python", "my_init.py", parents=(7,))),
    ("stop", OK, "cannot be seen", pid_1()),
    (
        "stop",
        OK,
        "`sm-launch local`",
        stop(
            init_answers=False,
            pid_1=("bash",),
            ancestors=((7, ("python", "-m", "launcher", "local", "--doctor")),),
        ),
    ),
    ("times", WARNING, "use --launcher-grace 110", job(grace=111)),
    ("times", OK, "missing for 900 s", job(grace=110)),
    ("settings", PROBLEM, "remove distribution=", job(distribution=("sagemaker_mpi_enabled",))),
    (
        "settings",
        WARNING,
        "remove distribution=",
        job(distribution=("sagemaker_mpi_enabled",)) | versions(toolkit=""),
    ),
    (
        "settings",
        WARNING,
        "LAUNCHER_GRCE is not",
        job(unknown=("LAUNCHER_GRCE",), said=("warning: LAUNCHER_GRCE is odd.",)),
    ),
    ("settings", OK, "PET_NPROC_PER_NODE: for torchrun", job(pet=("PET_NPROC_PER_NODE",))),
    ("job", OK, "algo-2 is node 1 of 3 -> ", {}),
    ("job", OK, "no script is named", job(names_script=False)),
    ("job", PROBLEM, "there is no such file", job(error="there is no such file.")),
    ("job", OK, "none of the groups", job(takes_part=False, summary="none of the groups")),
]


@pytest.mark.parametrize(("check", "level", "words", "facts"), ROWS)
def test_a_fact_makes_a_finding(check, level, words, facts):
    found = doctor_judge_job.judge(changed(**facts))
    texts = {f"{finding.seen} -> {finding.to_do}": finding.level for finding in found}
    ours = [text for text in texts if words in text]
    assert ours and texts[ours[0]] is level, texts
    assert check in {
        finding.check for finding in found if words in f"{finding.seen} -> {finding.to_do}"
    }
    worst = {finding.level for finding in found}
    assert (PROBLEM in worst) is (level is PROBLEM)


@pytest.mark.parametrize("facts", [Facts(), Facts(job=JobFacts(error="SM_HOSTS is odd"))])
def test_nothing_has_to_be_known(facts):
    found = doctor_judge_job.judge(facts)
    wrong = [finding.seen for finding in problems(found)]
    assert wrong == ([facts.job.error] if facts.job.error else [])
    assert WARNING not in {finding.level for finding in found}
    assert doctor_report.text(facts, found) and json.loads(doctor_report.as_json(facts, found))


def test_a_missing_torch_is_said_once():
    found = doctor_judge_job.judge(
        changed(**torch(missing=True), **job(error="torch is not installed"))
    )
    assert len(problems(found)) == 1


def test_many_hosts_are_counted():
    hosts = tuple(f"algo-{number}" for number in range(1000))
    names = tuple(Name(host, None if number % 2 else ()) for number, host in enumerate(hosts))
    facts = changed(job={"hosts": hosts}, network={"names": names})
    text = doctor_report.text(facts, doctor_judge_job.judge(facts))
    assert "992 more" in text and max(map(len, text.splitlines())) < 400


def test_control_characters_reach_no_terminal():
    facts = changed(job={"error": "\x1b[31m\nproblem"})
    found = doctor_judge_job.judge(facts)
    for text in (doctor_report.text(facts, found), doctor_report.failure(found)):
        assert "\x1b" not in text and "\nproblem" not in text.replace("\nproblem ", "")


def test_the_report_for_machines_and_for_sagemaker():
    facts = changed(job={"error": "no such file."}, machine={"open_files": (256, 65536)})
    found = doctor_judge_job.judge(facts)
    made = json.loads(doctor_report.as_json(facts, found))
    assert (made["host"], made["hosts"], made["would_run"]) == ("algo-2", 3, False)
    assert {"check": "job", "level": "problem", "seen": "no such file", "to_do": ""} in made[
        "findings"
    ]
    assert doctor_report.failure(found) == "launcher: doctor: a job would fail\njob: no such file\n"
    assert doctor_report.text(facts, found).endswith("fail on algo-2: 1 problem; 1 warning.")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 MiB"), (64 << 20, "64 MiB"), (3 << 29, "1.5 GiB"), (250 << 30, "250 GiB")],
)
def test_sizes_are_for_people(number, text):
    assert size(number) == text


# What is looked at


def files(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_the_tightest_cgroup_limits_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)  # whose own limit does not count
    root = files(
        tmp_path / "root",
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/pids.max": "100\n",
            "sys/fs/cgroup/a/pids.current": "90\n",
            "sys/fs/cgroup/a/b/pids.max": "50\n",
            "sys/fs/cgroup/a/b/pids.current": "7\n",
        },
    )
    assert doctor_look_machine._processes(root) == Limit(100, 90)
    assert doctor_look_machine._processes("/nowhere") == Limit()


@pytest.mark.parametrize(
    ("texts", "limit", "whose"),
    [
        (
            {  # v2: files that can be given back do not count
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            },
            Limit(4 * GIB, GIB),
            "the memory cgroup",
        ),
        (
            {  # v1 without a limit
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            Limit(16 * GIB, 6 * GIB),
            "this machine",
        ),
    ],
)
def test_the_memory_is_the_cgroups_or_the_machines(tmp_path, texts, limit, whose):
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\nHuge: 0\n"
    root = files(tmp_path / "root", {"proc/meminfo": meminfo, **texts})
    assert doctor_look_machine._memory(root) == (limit, whose)
    assert doctor_look_machine._memory("/nowhere") == (Limit(), "")


def test_names_are_looked_up_within_a_limit():
    hosts = ["localhost", *(f"host-{number}.invalid" for number in range(1000))]
    began = time.monotonic()
    found = doctor_look_network.look_up_all(hosts, str, 0.5)
    assert time.monotonic() - began < 10
    assert [name.host for name in found] == hosts
    assert found[0].addresses and not any(name.addresses for name in found[1:])


def test_a_port_of_another_host_is_asked_for(free=free_port):
    import socket

    port = free()
    assert doctor_look_network._answer(["127.0.0.1"], port) is PortState.REFUSES
    with socket.create_server(("127.0.0.1", port)):
        assert doctor_look_network._answer(["127.0.0.1"], port) is PortState.ANSWERS
        assert doctor_look_network._state([], port) is PortState.TAKEN
    assert doctor_look_network._state([], port) is PortState.FREE
    assert doctor_look_network._answer([], port) is PortState.SILENT


@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        ((), {}, False),
        (("train",), {}, True),  # a word for a script; look_at_job knows SageMaker's
        (("--launcher-grace", "3"), {}, False),
        (("--train-module", "m"), {}, True),
        (("--train-script=t.py",), {}, True),
        (("t.py",), {}, True),  # a mistake, which the launcher refuses
        (("--launcher-grac", "3"), {}, True),  # another one
    ],
)
def test_whether_a_script_is_named(argv, environ, names):
    assert doctor_look_job._names_script(argv, environ) is names


def test_what_distribution_switches_on():
    params = {"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_enabled": False}
    environ = {"SM_HOSTS": "[]", "SM_FRAMEWORK_PARAMS": json.dumps(params)}
    assert doctor_look_job._distribution(environ) == ("sagemaker_torch_distributed_enabled",)
    assert doctor_look_job._distribution({**environ, "SM_FRAMEWORK_PARAMS": "{"}) == ()
    ours = {**environ, "SAGEMAKER_TRAINING_MODULE": "sm_launch:train"}  # obeys none of them
    assert doctor_look_job._distribution(ours) == ()


HANGS = "#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho begins\nsleep 600\n"


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    program = tmp_path / "hangs"
    program.write_text(HANGS)
    program.chmod(0o755)
    mark = {**os.environ, "HANGS": str(tmp_path)}
    began = time.monotonic()
    answer = Child([str(program)], mark).answer(1)
    assert time.monotonic() - began < 10
    assert answer.out == "begins\n" and answer.is_late and "within 1 s" in answer.problem

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HANGS") == str(tmp_path):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    try:
        poll(lambda: not left(), 10)
    finally:
        for process in left():
            process.kill()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 0", ""),
        ("exit 3", "it ended with exit code 3"),
        ("kill -9 $$", "it was killed by signal 9"),
    ],
)
def test_how_a_command_ended(script, problem):
    assert Child(["/bin/sh", "-c", script], os.environ).answer(60).problem == problem
    assert "cannot be started" in Child(["/no/such"], {}).answer(1).problem


def test_tasks_end_in_time_or_are_given_up():
    release = threading.Event()
    with Signals() as signals:
        tasks = Tasks(signals)
        tasks.start("fast", lambda: 3)
        tasks.start("slow", release.wait)
        tasks.start("wrong", lambda: 1 / 0)
        tasks.wait(["fast"], 60)
        tasks.wait(["slow"], 0.1)
        assert (tasks.result("fast", 0), tasks.result("slow", "late")) == (3, "late")
        with pytest.raises(ZeroDivisionError):
            tasks.wait(["wrong"], 60)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped):
            tasks.wait(["slow"], 60)
        assert not tasks.has_ended("slow") and tasks.has_ended("wrong")
        release.set()
        tasks.wait(["slow"], 60)
        assert tasks.result("slow", "late") is True


# The program itself, with a torch that is only a text


@pytest.fixture
def fake_torch(tmp_path, monkeypatch):
    """Put a torch first in PYTHONPATH: what the launcher's child process asks it."""

    def make(begin="", devices=0, cuda=None):
        site = tmp_path / "site"
        files(
            site / "torch",
            {
                "__init__.py": f"""
import os
open({str(tmp_path / "imported")!r}, "w").write(str(os.getpid()))
{begin}
from . import cuda, version
__version__ = "2.8.0"
""",
                "version.py": f"__version__ = '2.8.0'\ncuda = {cuda!r}\n",
                "cuda/__init__.py": f"""
from . import nccl
def device_count(): return {devices}
def init():
    if not {devices}: raise RuntimeError("the driver is too old")
""",
                "cuda/nccl.py": "def version(): return (2, 27, 3)\n",
                "distributed/__init__.py": f"""
def is_available(): return True
def is_nccl_available(): return {bool(cuda)}
def is_gloo_available(): return True
""",
                "distributed/run.py": "",
            },
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(REPO)]))
        return tmp_path / "imported"

    return make


def doctor(*args, code=0, command=LAUNCHER, **environ):
    return completed(*command, "doctor", *args, code=code, **environ)


def found(done):
    """Return what --json says, by check."""
    by_check = {}
    for finding in json.loads(done.stdout)["findings"]:
        text = f"{finding['seen']} -> {finding['to_do']}"
        by_check.setdefault(finding["check"], []).append((finding["level"], text))
    return by_check


def test_a_host_alone(fake_torch, tmp_path):
    imported = fake_torch()
    done = doctor(LAUNCHER_GRCE="3")
    assert done.stderr == "" and not (tmp_path / "output" / "failure").exists()
    assert "torch 2.8.0 for CPU" in done.stdout and "no script is named" in done.stdout
    assert "LAUNCHER_GRCE is not a launcher option" in done.stdout
    assert re.search(r"^A job would run; \d warnings?\.$", done.stdout, re.MULTILINE)
    assert imported.exists()


def test_what_a_job_would_log_is_in_the_report_alone(fake_torch):
    fake_torch()
    done = doctor(LAUNCHER_GRCE="3")
    assert "ok       settings   neither SM_HOSTS nor SageMaker's config files exist" in done.stdout
    assert done.stderr == ""


def test_torch_is_imported_in_a_child_alone(fake_torch):
    imported = fake_torch()
    process = subprocess.Popen([*LAUNCHER, "doctor"], stdout=subprocess.DEVNULL)
    assert process.wait(60) == 0
    assert imported.read_text() not in ("", str(process.pid))


def test_a_job_of_this_script(fake_torch, script, tmp_path):
    fake_torch()
    path = script("raise SystemExit('was started')")
    log_dir = tmp_path / "logs" / "of ranks"
    done = doctor("--json", "--train-script", path, "--launcher-nproc-per-node", "2", "--json",
                  "--launcher-log-dir", log_dir)  # fmt: skip
    ((level, text),) = found(done)["job"]
    assert level == "ok" and ": 2 ranks on " in text
    assert not (tmp_path / "logs").exists()
    (tmp_path / "logs").write_text("a file")
    done = doctor("--train-script", path, "--launcher-log-dir", log_dir, code=2)
    assert f"problem  disk       {tmp_path}/logs (--launcher-log-dir): it is not a f" in done.stdout


def test_a_job_that_would_not_start(fake_torch, tmp_path):
    fake_torch()
    done = doctor("--train-script", "missing.py", code=2, LAUNCHER_GRCE="3")
    assert done.stdout.count("LAUNCHER_GRCE") == 1
    assert "problem  job        --train-script missing.py: there is" in done.stdout
    assert (
        (tmp_path / "output/failure")
        .read_text()
        .startswith("launcher: doctor: a job would fail\njob: --train-script missing.py")
    )


@pytest.mark.parametrize(
    ("args", "environ", "words"),
    [
        (("--launcher-grac", "3"), {}, "Did you mean --launcher-grace?"),
        (("train.py",), {}, "train.py is taken for an argument of the script"),
        ((), {"SM_HOSTS": "["}, "which is not JSON"),
        ((), {"LOCAL_RANK": "0"}, "another launcher started this one"),
        ((), {"TMPDIR": "/proc"}, "cannot make a folder in /proc"),
        ((), {"SAGEMAKER_BASE_DIR": "/nowhere"}, "/nowhere/input/config does not exist"),
        (("--launcher-grace",), {}, "--launcher-grace"),
        ((), {"LOGLEVEL": "info"}, "LOGLEVEL is 'info'; expected INFO, DEBUG"),
        ((), {"PET_MONITOR_INTERVAL": "abc"}, "PET_MONITOR_INTERVAL is 'abc'; expected seconds"),
        ((), {"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND is 'etcd'; expected c10d"),
    ],
)
def test_a_mistake_is_a_problem_without_a_traceback(fake_torch, args, environ, words):
    fake_torch()
    done = doctor(*args, code=2, **environ)
    assert words in done.stdout and done.stderr == ""


def test_a_hyperparameter_that_no_process_can_get(fake_torch, tmp_path):
    fake_torch()
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
    (config / "inputdataconfig.json").write_text("{}")
    for length, code in ((1000, 0), (1 << 17, 2)):
        (config / "hyperparameters.json").write_text(json.dumps({"text": "x" * length}))
        done = doctor("--json", code=code, SAGEMAKER_BASE_DIR=str(tmp_path / "ml"))
        assert ("variables of the job are too long" in done.stdout) == bool(code)


def test_a_host_that_takes_no_part(fake_torch):
    fake_torch()
    groups = {"a": {"hosts": ["algo-1"]}, "b": {"hosts": ["algo-2"]}}
    environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    environ["SM_INSTANCE_GROUPS_DICT"] = json.dumps(groups)
    done = doctor("--launcher-instance-groups", "a", **environ)
    assert "This host takes no part in the job." in done.stdout


def test_torch_that_cannot_be_imported(fake_torch):
    fake_torch("raise ImportError('libcudart.so is missing')")
    done = doctor("--json", code=2)
    assert found(done)["torch"][0][0] == "problem"
    assert "ImportError: libcudart.so is missing" in done.stdout
    fake_torch("os._exit(3)")
    assert "it ended with exit code 3" in doctor(code=2).stdout


NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA A10G (UUID: GPU-1)" ;;
*) echo "NVIDIA A10G, 550.163.01" ;;
esac
"""


def nvidia_smi(tmp_path, monkeypatch, text):
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be another user")
def test_the_threads_that_a_user_has_already(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert doctor_look_machine._own_threads() == 0
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], user=54321)  # doctor's own child
    try:
        poll(lambda: doctor_look_machine._own_threads() == 1)
    finally:
        for process in (*psutil.Process(shell.pid).children(), shell):
            process.kill()
        shell.wait()


def test_a_gpu_that_the_kernel_has(tmp_path):
    assert not doctor_look_machine.sees_gpu(str(tmp_path))
    (tmp_path / "sys/bus/pci/devices/0").mkdir(parents=True)
    vendor = tmp_path / "sys/bus/pci/devices/0/vendor"
    vendor.write_text("0x1d0f\n")
    assert not doctor_look_machine.sees_gpu(str(tmp_path))
    vendor.write_text("0x10de\n")
    assert doctor_look_machine.sees_gpu(str(tmp_path))
    vendor.unlink()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not doctor_look_machine.sees_gpu(str(tmp_path))
    (tmp_path / "dev/nvidia0").touch()
    assert doctor_look_machine.sees_gpu(str(tmp_path))


def test_a_gpu(fake_torch, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, NVIDIA_SMI)
    fake_torch(devices=1, cuda="12.8")
    seen = found(doctor("--json"))
    assert seen["devices"] == [("ok", "1 GPU for the job: NVIDIA A10G, driver 550.163.01 -> ")]
    assert "CUDA 12.8, NCCL 2.27.3" in seen["torch"][0][1]
    fake_torch(devices=0, cuda="12.8")
    assert "can use no GPU (the driver is too old)" in doctor("--json", code=2).stdout


def test_a_driver_that_is_broken(fake_torch, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, "#!/bin/sh\necho NVML: mismatch\nexit 18\n")
    fake_torch()
    text = "nvidia-smi: it ended with exit code 18 (NVML: mismatch) -> replace this host"
    seen = found(doctor("--json", code=2, SM_NUM_GPUS="1"))["devices"]
    assert ("problem", f"{text}, or its driver") in seen


@pytest.mark.systems
def test_a_driver_that_hangs(fake_torch, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, HANGS)
    fake_torch()
    began = time.monotonic()
    said = doctor(code=2, SM_NUM_GPUS="1").stdout
    assert "nvidia-smi: it did not end within 15 s" in said
    assert time.monotonic() - began < 40


HOSTS = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.1"}


def test_ports_that_are_taken(fake_torch):
    import socket

    fake_torch()
    mine, free = free_port(), free_port()
    args = ("--json", "--launcher-rdzv-port", mine, "--launcher-peer-port", free)
    with socket.create_server(("127.0.0.1", mine)):
        seen = found(doctor(*args, code=2, **HOSTS))
        assert [level for level, _ in seen["ports"]] == ["problem", "ok"]
        there = found(doctor(*args, **{**HOSTS, "SM_CURRENT_HOST": "127.0.0.2"}))
        assert "answers at" in there["ports"][0][1] and "nothing listens" in there["ports"][1][1]
    assert [level for level, _ in found(doctor(*args, **HOSTS))["ports"]] == ["ok"]


READY_AND_HANG = "print('importing', flush=True)\nimport time\ntime.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_doctor_and_its_child(fake_torch, start, number):
    imported = fake_torch(READY_AND_HANG)
    host = start(command=[*LAUNCHER, "doctor"])
    poll(lambda: imported.exists() and imported.read_text())
    host.signal(number)
    assert host.wait(30) == 128 + number
    poll(lambda: not host.processes())
    assert host.failure is None and host.out == ""


def test_nobody_reads_the_report(fake_torch):
    fake_torch()
    for closed in (">&- 2>&- <&-", ">/dev/full 2>/dev/full", "| head -1"):
        line = f'"$@" {closed}'
        words = ["sh", "-c", line, "sh", *LAUNCHER, "doctor"]
        done = subprocess.run(words, timeout=60, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_from_an_archive(fake_torch, tmp_path):
    fake_torch()
    archive = tmp_path / "one.py"
    with zipfile.ZipFile(archive, "w") as file:
        for path in [*(REPO / "launcher").rglob("*.py"), *(REPO / "launcher_tools").rglob("*.py")]:
            file.write(path, path.relative_to(REPO))
        file.writestr(
            "__main__.py", "import sys\nfrom launcher.cli import main\nsys.exit(main())\n"
        )
    done = doctor("--json", command=[sys.executable, archive], PYTHONPATH=str(tmp_path / "site"))
    assert found(done)["torch"] == [("ok", "torch 2.8.0 for CPU -> ")]


def test_a_users_modules_are_not_taken_for_pythons(fake_torch, tmp_path):
    fake_torch()
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    command = [sys.executable, REPO / "launcher" / "__main__.py"]
    assert found(doctor("--json", command=command))["torch"][0][0] == "ok"


@pytest.mark.parametrize("args", [("--help",), ("--train-script", "t.py", "--launcher-help")])
def test_help(args):
    assert doctor(*args).stdout.startswith("usage: sm-launch doctor [--json]")


# Of made-up hosts


def local(*args, code=0):
    return completed(*LAUNCHER, "local", *args, code=code)


def test_made_up_hosts(fake_torch, script, tmp_path):
    fake_torch()
    done = local("--hosts", 2, "--doctor")
    assert done.stdout.endswith("A job would run on every host.\n")
    for host in ("1", "2"):
        assert f"algo-{host} | A job would run on algo-{host}" in done.stdout
    assert "`sm-launch local` passes stops on" in done.stdout
    assert "names      all are given: algo-1 is 127.0.0.1\n" in done.stdout
    done = local(
        "--hosts", 1, "--doctor", "--", script("1"), "--launcher-grace", "119", "--epochs", 3
    )
    assert "use --launcher-grace 110 at most" in done.stdout and "no script" not in done.stdout
    done = local("--hosts", 2, "--doctor", "--", "--launcher-grace", "118")
    assert "118 s to save" in done.stdout and "no script is named" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not [name for name in os.listdir(os.environ["TMPDIR"]) if "doctor" in name]


def test_made_up_hosts_with_a_problem(fake_torch):
    fake_torch("raise ImportError('broken')")
    done = local("--hosts", 2, "--doctor", code=2)
    assert done.stdout.endswith("A job would fail, for what algo-1, algo-2 found.\n")


# With the real torch, and the page


@pytest.mark.torch
def test_the_real_torch():
    import torch

    seen = found(doctor("--json"))
    assert f"torch {torch.__version__} " in seen["torch"][0][1]
    assert ("gloo" in seen["backends"][0][1]) is torch.distributed.is_gloo_available()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--monitor-interval=x", "argument --monitor-interval/--monitor_interval: invalid float"),
        ("--role x other.py", "unrecognized arguments: other.py"),
        ("--help", "its arguments ask for its help, not for a job"),
        ("--role x --tee 3", ""),
    ],
)
def test_torchruns_own_parser_is_asked(script, arguments, says):
    words = ("--train-script", script(""), f"--launcher-torchrun-args={arguments}")
    done = doctor("--json", *words, code=2 if says else 0)
    ((level, text),) = found(done)["job"]
    assert level == ("problem" if says else "ok")
    if says:
        assert text.startswith(f"torchrun would fail: {says}")
        assert text.endswith(" -> correct --launcher-torchrun-args")


def test_the_page_names_every_check_and_field():
    page = (REPO / "docs" / "doctor.md").read_text()
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    checks = {check for check, *_ in ROWS}
    assert checks | {"hosts", "versions"} == rows & {*checks, "hosts", "versions"}
    made = json.loads(doctor_report.as_json(WELL, doctor_judge_job.judge(WELL)))
    for field in (*made, *made["findings"][0]):
        assert f'"{field}"' in page
