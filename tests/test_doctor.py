"""`sm-launch doctor`: each check on a folder and an environment made for it; the whole program."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import LAUNCHER, REPO, completed, free_port, has_ended, poll

from launcher.host.child import Answer, Child
from launcher.host.signals import Signals
from launcher.job.job import Cluster
from launcher.job.options import Options
from launcher_tools import doctor, doctor_job, doctor_machine, doctor_network, doctor_stop
from launcher_tools.doctor_job import PlannedJob, ok, plan_job, problem, warning
from launcher_tools.doctor_machine import Torch
from launcher_tools.doctor_network import HostName

MIB, GIB = 1 << 20, 1 << 30
NAMES = ("algo-1", "algo-2", "algo-3")


def host(current="algo-2", gpus=0, names=NAMES, interface="", neurons=0, **options):
    """Return the job of a host whose plan is not known."""
    cluster = Cluster(tuple(names), current, "job", gpus, neurons, interface)
    return PlannedJob(cluster, Options(**options))


def says(findings, *expected):
    """Hold that there are these findings and no others: each begins with its level."""
    texts = [f"{level} {seen} -> {to_do}" for _, level, seen, to_do in findings]
    assert len(texts) == len(expected), texts
    for text, words in zip(texts, expected):
        level, _, part = words.partition(" ")
        assert text.startswith(level) and part in text, texts


def files(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def limits(monkeypatch, soft, hard=resource.RLIM_INFINITY):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


# The network


def one(host, *addresses, **how):
    return HostName(host, addresses, **how)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([one("algo-1", "10.0.0.1")], "ok all resolve: algo-1 is 10.0.0.1"),
        ([one("algo-1", "127.0.0.1", is_given=True)], "ok all are given: algo-1 is 127.0.0.1"),
        ([one("127.0.0.1", "127.0.0.1")], "ok all resolve: 127.0.0.1"),
        ([one("algo-3")], "warning no address is known for algo-3"),
        ([HostName("algo-1", None)], "warning no answer within 10 s for algo-1"),
        ([one("algo-3", "127.0.0.1")], "warning algo-3 resolves to this host's own loopback"),
        (
            [one("algo-1", "10.0.0.1"), one("algo-3", "10.0.0.3", "10.0.0.1")],
            "warning algo-1, algo-3 all have the address 10.0.0.1",
        ),
    ],
)
def test_the_names_of_other_hosts(others, expected):
    says(doctor_network.names(host(), others), expected)


def test_this_hosts_own_name_is_not_needed():
    job = host(names=("localhost", "127.0.0.2"), current="localhost")
    (found,) = [found for found in doctor_network.check(job, {}) if found.check == "names"]
    assert found.level == "ok" and "own loopback" not in found.seen


def test_names_are_looked_up_within_a_limit():
    hosts = ["localhost", *(f"host-{number}.invalid" for number in range(1000))]
    began = time.monotonic()
    found = doctor_network.look_up_all(hosts, str, 0.5)
    assert time.monotonic() - began < 60
    assert [name.host for name in found] == hosts
    assert found[0].addresses and not any(name.addresses for name in found[1:])


@pytest.mark.parametrize(
    ("job", "environ", "expected"),
    [
        (host(), {}, "ok none is set; this host has eth0, lo; gloo uses the one at"),
        (host(gpus=1), {"NCCL_SOCKET_IFNAME": "eth7"}, "problem NCCL_SOCKET_IFNAME=eth7, but"),
        (host(gpus=1), {"GLOO_SOCKET_IFNAME": "eth7"}, "warning GLOO_SOCKET_IFNAME=eth7"),
        (host(), {"GLOO_SOCKET_IFNAME": "eth0,ib"}, "problem GLOO_SOCKET_IFNAME=eth0,ib"),
        (host(), {"NCCL_SOCKET_IFNAME": "eth,ib"}, "ok as you set it"),
        (host(), {"NCCL_SOCKET_IFNAME": "=eth"}, "warning =eth"),
    ],
)
def test_which_interface_is_used(job, environ, expected):
    says(doctor_network.interface(job, environ, ["eth0", "lo"]), expected)


def test_an_interface_that_sagemaker_names(pretend_torch):
    pretend_torch("2.8.0")
    two = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    for name, expected in (
        ("lo", ["ok lo (from resourceconfig.json)"]),
        (
            "ethwe",
            ["ok resourceconfig.json names ethwe, which does not exist here", "ok none is set"],
        ),
    ):
        environ = {**two, "SM_NETWORK_INTERFACE_NAME": name}
        job = plan_job([], {**os.environ, **environ})
        says(doctor_network.interface(job, environ, ["lo"]), *expected)


def test_the_ports_of_the_first_host():
    first, second = free_port(), free_port()
    chosen = {"names": ("127.0.0.1", "127.0.0.2"), "rdzv_port": first, "peer_port": second}

    def seen(current, **environ):
        return doctor_network.ports(host(current, **chosen), ["127.0.0.1"], environ)

    one, other = f"{first} (--launcher-rdzv-port)", f"{second} (--launcher-peer-port)"
    free, silent = (
        "ok free on this host, where all hosts connect: ",
        "ok 127.0.0.1 can be reached; n",
    )
    says(seen("127.0.0.1"), free + one, free + other)
    says(seen("127.0.0.2"), silent, f"ok nothing is listening yet at port {other}")
    with socket.create_server(("127.0.0.1", first)):
        says(seen("127.0.0.1"), f"problem already in use on this host: {one}", free + other)
        says(seen("127.0.0.2"), f"ok 127.0.0.1 answers at port {one}", silent)
        says(seen("127.0.0.1", PET_RDZV_ENDPOINT="x:1"), free + other)
    says(doctor_network.ports(host("127.0.0.2", **chosen), [], {}))


def test_ports_that_cannot_be_had(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(doctor_network, "listen", refuse)
    denied = "problem this user is not allowed to listen on port "
    says(doctor_network.ports(host("algo-1"), [], {}), f"{denied}29400", f"{denied}29401")
    silent = "warning algo-1 did not answer at port 1 (--x)"
    says(doctor_network.first_hosts_port("algo-1", [], 1, "--x"), silent)


def test_efa(tmp_path, monkeypatch):
    limits(monkeypatch, resource.RLIM_INFINITY)
    says(doctor_network.efa(host(), {}, str(tmp_path)), "ok this host has no EFA device")
    says(doctor_network.efa(host("algo-1", names=["algo-1"]), {}, str(tmp_path)))
    device = tmp_path / "sys/class/infiniband/rdma0/device"
    device.mkdir(parents=True)
    (tmp_path / "efa").mkdir()
    (device / "driver").symlink_to(tmp_path / "efa")
    says(doctor_network.efa(host(), {}, str(tmp_path)), "ok this host has an EFA device -> ")
    says(doctor_network.efa(host(gpus=8), {}, str(tmp_path)), "warning install aws-ofi-nccl")
    files(tmp_path, {"opt/aws-ofi-nccl/lib/libnccl-net.so": "", "mine/libnccl-net-1.so.0": ""})
    expected = f"ok NCCL's plugin is {tmp_path}/opt/aws-ofi-nccl/lib/libnccl-net.so"
    says(doctor_network.efa(host(gpus=8), {}, str(tmp_path)), expected)
    limits(monkeypatch, 65536)
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}/mine"}
    says(doctor_network.efa(host(gpus=8), environ, str(tmp_path)), "warning 64 KiB may be locked")


# Devices and torch

CUDA = Torch("2.8.0", backends=("nccl", "gloo"), cuda="12.8", devices=2, nccl="2.27.3")
CPU = Torch("2.8.0", backends=("gloo", "mpi"))
DRIVER = Answer("NVIDIA A10G, 550.1\nNVIDIA A10G, 550.1\n", "", "")
BROKEN = Answer("", "NVML: mismatch\n", "it ended with exit code 18")
SLICES = host(gpus=1)._replace(cluster=host(gpus=1).cluster._replace(mig=4))
LISTED = "ok 2 GPUs for the job: NVIDIA A10G, driver 550.1"


@pytest.mark.parametrize(
    ("job", "driver", "torch", "expected"),
    [
        (host(gpus=2), DRIVER, CUDA, [LISTED]),
        (host(gpus=2), DRIVER, CPU, [LISTED, "problem torch 2.8.0 is a CPU build, but"]),
        (
            host(gpus=2),
            DRIVER,
            CUDA._replace(devices=0, cuda_problem="too old"),
            [LISTED, "problem torch 2.8.0 for CUDA 12.8 cannot use any GPU (too old)"],
        ),
        (
            SLICES,
            DRIVER,
            CUDA._replace(devices=1),
            ["ok 1 MIG slice for the job: NVIDIA A10G, driver 550.1"],
        ),
        (host(), DRIVER, CPU, ["ok 0 GPUs for the job: NVIDIA A10G"]),
        (host(neurons=32), None, CPU, ["ok 32 Neuron cores, "]),
        (host(gpus=2), BROKEN, CUDA, ["problem nvidia-smi: it ended with exit code 18 (NVML: mi"]),
        (host(), BROKEN, CPU, ["warning (NVML: mismatch); no GPU is seen here -> a job would run"]),
    ],
)
def test_devices(tmp_path, job, driver, torch, expected):
    says(doctor_machine.devices(job, driver, torch, str(tmp_path)), *expected)


@pytest.mark.parametrize(
    ("environ", "driver", "torch", "expected"),
    [
        (
            {"SM_NUM_GPUS": "2", "LAUNCHER_NPROC_PER_NODE": "4"},
            DRIVER,
            CUDA,
            [LISTED, "warning 4 processes would share 2 GPUs -> use --launcher-nproc-per-node 2"],
        ),
        (
            {"PET_NPROC_PER_NODE": "gpu"},
            None,
            CPU,
            ["problem one process per GPU was requested, but this host has none"],
        ),
    ],
)
def test_more_ranks_than_devices(pretend_torch, environ, driver, torch, expected):
    pretend_torch("2.8.0")
    job = plan_job([], {"PATH": "/bin", **environ})
    says(doctor_machine.devices(job, driver, torch), *expected)


@pytest.mark.parametrize(
    ("job", "torch", "expected"),
    [
        (
            host(gpus=2),
            CUDA,
            ["ok torch 2.8.0 for CUDA 12.8, NCCL 2.27.3; backends: nccl, gloo -> "],
        ),
        (
            host(gpus=2),
            CPU,
            ["ok", "warning there is no nccl backend, but this host has GPUs; torch has gloo, mpi"],
        ),
        (host(), Torch(missing=True), ["problem torch is not installed -> install torch 2.4"]),
        (PlannedJob(error="torch is not installed"), Torch(missing=True), []),
        (host(), Torch("2.3.1+cu121"), ["warning install torch 2.4 or later, with which"]),
        (host(), Torch(problem="ImportError: x"), ["problem cannot be imported: ImportError: x"]),
        (
            host(gpus=2),
            CUDA._replace(problem="hangs"),
            ["problem could not be read: hangs -> replace this"],
        ),
    ],
)
def test_torch(job, torch, expected):
    says(doctor_machine.torch(job, torch), *expected)


def test_what_the_child_process_says_of_torch():
    out = 'a warning\n{"version": "2.8.0", "cuda": ""}\n\n{"backends": ["gloo"], "new": 1}\n[1]\n'
    read = doctor_machine.read_torch(Answer(out, "", ""))
    assert read == Torch("2.8.0", backends=["gloo"])
    crashed = Answer(out, "first\nlast words\n", "it was killed by signal 11")
    assert doctor_machine.read_torch(crashed).problem == "it was killed by signal 11 (last words)"


# The machine


def test_shared_memory(monkeypatch):
    space(monkeypatch, free=2 * GIB)
    assert [found.level for found in doctor_machine.disk({})] == ["ok"]
    space(monkeypatch, free=64 * MIB)
    small = "warning /dev/shm (data loader workers and NCCL pass data through it): 64 MiB left -> s"
    says(doctor_machine.disk({}), "warning (TMPDIR): 64 MiB left -> raise volume_size", small)


def space(monkeypatch, free, inodes=1):
    """Have each disk seem to have 20 GiB, some of them free."""
    blocks = {"f_frsize": 1, "f_blocks": 20 * GIB, "f_bavail": free}
    seen = SimpleNamespace(**blocks, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: seen)


def test_folders_on_disks(tmp_path, monkeypatch):
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "TMPDIR": os.environ["TMPDIR"]}
    temporary = f"{environ['TMPDIR']} (TMPDIR)"

    def disk(*args):
        found = doctor_machine.disk(*args)
        return [one for one in found if not re.match(r"(\S+ \S+ free: )?/dev/shm", one.seen)]

    (tmp_path / "ml" / "input" / "config").mkdir(parents=True)
    missing = "No such file or directory -> create it, or make it writable"
    model, output = f"{tmp_path}/ml/model (the model)", f"{tmp_path}/ml/output (the failure reason)"
    expected = (f"warning {model}: {missing}", f"warning {output}: {missing}")
    says(disk(environ), *expected, f"ok free: {temporary}")
    for name in ("model", "output", "checkpoints"):
        (tmp_path / "ml" / name).mkdir()
    space(monkeypatch, free=9 * GIB)
    (found,) = disk(environ, str(tmp_path / "logs" / "of ranks"))
    uses = ("the model", "the failure reason", "checkpoints", "--launcher-log-dir", "TMPDIR")
    assert found.seen.startswith("9.0 GiB free: ") and all(f"({use})" in found.seen for use in uses)
    says(disk({"TMPDIR": "/proc"}), "problem /proc (TMPDIR): cannot create a folder in /proc")
    environ = {"TMPDIR": environ["TMPDIR"]}
    space(monkeypatch, free=1000 * MIB)
    says(disk(environ), f"warning {temporary}: 1000 MiB left -> raise volume_size")
    space(monkeypatch, free=9 * GIB, inodes=0)
    says(disk(environ), f"warning {temporary}: no files left")
    monkeypatch.setattr(os, "access", lambda *_: False)
    expected = f"problem {tmp_path} (--launcher-log-dir): this user may not write to it -> name a"
    says(disk(environ, str(tmp_path)), expected, f"problem {temporary}: this user may not")


@pytest.mark.parametrize(
    ("job", "soft", "hard", "expected"),
    [
        (host("algo-1"), 256, 65536, "warning 256, 65536 (soft, hard) -> start the container with"),
        (host("algo-1"), 25, 65536, "problem torchrun needs 26"),
        (host("algo-1"), 32, 32, "problem the launcher of the first host needs 33 for 3 hosts"),
        (host("algo-2"), 32, 32, "warning 32, 32 (soft, hard)"),
    ],
)
def test_open_files(monkeypatch, job, soft, hard, expected):
    limits(monkeypatch, soft, hard)
    says(doctor_machine.open_files(job), expected)


# How a stop travels

STOPS = [
    # PID 1; what is between that and this process; what is found
    (
        "/usr/bin/python3 -u /bin/sm-launch init train",
        "x",
        "ok the launcher would run under `sm-launch init`",
    ),
    ("python launcher/__main__.py --epochs 3", "x", "ok PID 1 is a launcher"),
    ("bash start_with_right_hostname.sh train", "x", "warning AWS's start script: no rank gets"),
    ("/usr/bin/python3 /usr/bin/train", "x", "warning which ignores stops: no rank gets a stop"),
    ("/bin/sh -c sm-launch; true", "x", "warning PID 1 is a shell (`/bin/sh -c sm-launch; true`)"),
    ("/sbin/tini -- sm-launch", "nothing", "ok tini is PID 1 and forwards stops to the"),
    ("/sbin/tini -- train", "x", "warning only to its own child -> use the exec form"),
    ("python my_init.py", "x", "ok PID 1 is `python my_init.py`: a stop works if it forwards"),
    ("bash", "python -m launcher local --doctor", "ok `sm-launch local` forwards stops"),
]


@pytest.mark.parametrize(("pid_1", "between", "expected"), STOPS)
def test_whether_a_stop_reaches_the_ranks(tmp_path, pid_1, between, expected):
    parent = {"nothing": 1, "no way": 0}.get(between, 7)
    texts = {
        "proc/1/cmdline": pid_1.replace(" ", "\0") + "\0",
        "proc/1/status": "Name:\tx\nPPid:\t0\n",
        "proc/7/cmdline": between.replace(" ", "\0") + "\0",
        "proc/7/status": "PPid:\t1\n",
        "proc/9/status": f"Name:\tsm-launch\nPPid:\t{parent}\n",
    }
    says(doctor_stop.stop({}, files(tmp_path / "root", texts), 9), expected)


def test_the_launcher_itself_as_pid_1(tmp_path):
    says(doctor_stop.stop({}, str(tmp_path), 1), "ok the launcher would be PID 1")


def test_an_init_that_answers(tmp_path):
    root = files(tmp_path, {"proc/1/cmdline": "sh\0"})
    environ = {"LAUNCHER_INIT": f"test-doctor-{os.getpid()}"}
    says(doctor_stop.stop(environ, root, 9), "warning PID 1 is a shell")  # it has ended
    with socket.socket(socket.AF_UNIX) as init:
        init.bind(f"\0{environ['LAUNCHER_INIT']}")
        init.listen()
        says(doctor_stop.stop(environ, root, 9), "ok the launcher would run under `sm-launch init`")


# The job


def test_settings():
    job = host(unknown_twins=("LAUNCHER_GRCE",))
    said = ["warning: LAUNCHER_GRCE is odd.", "environment: OMP_NUM_THREADS=4."]
    environ = {"PET_NPROC_PER_NODE": "2", "PET_EMPTY": ""}
    expected = [
        "ok PET_NPROC_PER_NODE: passed to torchrun",
        "warning LAUNCHER_GRCE is not a launcher",
    ]
    says(doctor_job.settings(job, environ, said), *expected, "ok environment: OMP_NUM_THREADS=4 -")
    says(doctor_job.settings(host(grace=110), {}, []))
    too_long = (
        "warning 111 s to save, but SageMaker kills everything 120 s after a stop -> use at most "
    )
    says(doctor_job.settings(host(grace=111), {}, []), f"{too_long}--launcher-grace 110")
    replaced = "ok PET_NPROC_PER_NODE is replaced"  # said once
    says(doctor_job.settings(host(), environ, [replaced[3:]]), replaced)


def test_what_distribution_switches_on(monkeypatch):
    params = {"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_enabled": False}
    environ = {"SM_HOSTS": "[]", "SM_FRAMEWORK_PARAMS": json.dumps(params)}
    for level in ("problem", "warning"):
        monkeypatch.setattr(doctor_job, "_is_installed", lambda _, level=level: level == "problem")
        expected = (
            f"{level} distribution= is set (sagemaker_torch_distributed_enabled): SageMaker's"
        )
        says(doctor_job.settings(host(), environ, []), expected)
    says(doctor_job.settings(host(), {**environ, "SM_FRAMEWORK_PARAMS": "{"}, []))
    ours = {**environ, "SAGEMAKER_TRAINING_MODULE": "sm_launch:train"}  # obeys none of them
    says(doctor_job.settings(host(), ours, []))


def test_a_job_of_sdk_v3_is_that_of_its_hyperparameters(pretend_torch, script):
    """With `command`; without a script among them they belong to another command."""
    pretend_torch("2.8.0")
    script("")
    environ = {**os.environ, "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    job = plan_job([], {**environ, "SM_HPS": '{"train-script": "script.py", "lr": 1}'})
    assert job.names_script and job.plan.argv[-3:] == ("script.py", "--lr", "1")
    job = plan_job([], {**environ, "SM_HPS": '{"lr": 1}'})
    assert not (job.names_script or job.error)


@pytest.mark.parametrize(
    ("argv", "names_script"),
    [
        ((), False),
        (("train",), False),  # SageMaker's word
        (("--launcher-grace", "3"), False),
        (("--train-module", "m"), True),
        (("--train-script=t.py",), True),
        (("t.py",), True),  # a mistake, which the launcher refuses
    ],
)
def test_whether_a_script_is_named(pretend_torch, argv, names_script):
    pretend_torch("2.8.0")
    job = plan_job(argv, dict(os.environ))
    assert (job.names_script, bool(job.error)) == (names_script, names_script)
    expected = "problem " if names_script else "ok no script was given, so only this host was chec"
    says(doctor_job.plan(job, ""), expected)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--launcher-grac", "3"], {}, "Did you mean --launcher-grace?"),
        (["train.py"], {}, "train.py was taken as an argument of the script"),
        ([], {"SM_HOSTS": "["}, "which is not JSON"),
        ([], {"LOCAL_RANK": "0"}, "another launcher started this one"),
        ([], {"PET_MAX_RESTARTS": "x"}, "PET_MAX_RESTARTS is 'x'; expected a whole number"),
        ([], {"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND is 'etcd'; expected c10d"),
    ],
)
def test_why_a_job_would_not_start(pretend_torch, argv, environ, words):
    pretend_torch("2.8.0")
    says(doctor_job.plan(plan_job(argv, {**os.environ, **environ}), ""), f"problem {words}")


# The report


def test_the_report_for_people_for_machines_and_for_sagemaker():
    found = [ok("hosts", "fine"), warning("disk", "full", "empty it"), problem("job", "\x1b\n", "")]
    assert doctor.as_text(host(), found) == (
        "ok       hosts      fine\n"
        "warning  disk       full\n"
        "                    -> empty it\n"
        "problem  job        \\x1b\\n\n"
        "A job would fail on algo-2: 1 problem; 1 warning."
    )
    assert doctor.as_failure(found) == "launcher: doctor: a job would fail\njob: \\x1b\\n\n"
    made = json.loads(doctor.as_json(host(), found))
    assert (made["host"], made["hosts"], made["would_run"]) == ("algo-2", 3, False)
    assert made["findings"][2] == {
        "check": "job",
        "level": "problem",
        "seen": "\x1b\n",
        "to_do": "",
    }
    page = (REPO / "docs" / "development" / "tools.md").read_text()
    for field in (*made, *made["findings"][0]):
        assert f'"{field}"' in page
    assert doctor.as_text(host(), found[:2]).endswith("A job would run on algo-2; 1 warning.")
    unknown = json.loads(doctor.as_json(PlannedJob(error="x"), []))
    assert (unknown["host"], unknown["hosts"], unknown["would_run"]) == ("", 0, True)


def test_the_page_names_every_check():
    page = (REPO / "docs" / "development" / "tools.md").read_text()
    (table,) = re.findall(r"^\| check \| .*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    code = "".join(path.read_text() for path in (REPO / "launcher_tools").glob("doctor*.py"))
    made = r'\b(?:ok|warning|problem|how)\(\s*"([a-z/ ]+)",'
    assert set(re.findall(made, code)) == set(rows)


# What may hang


HANGS = "#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $!\nsleep 600\n"


def test_a_command_that_hangs_is_killed_with_what_it_started():
    began = time.monotonic()
    answer = Child(["/bin/sh", "-c", HANGS], os.environ).answer(5)
    assert time.monotonic() - began < 60
    assert answer.is_late and "within 5 s" in answer.problem
    below = int(answer.out)
    poll(lambda: has_ended(below))


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


def test_what_hangs_is_left_behind(pretend_torch, monkeypatch, capfd):
    pretend_torch("2.8.0")
    release = threading.Event()
    for module in (doctor_machine, doctor_network):
        monkeypatch.setattr(module, "check", lambda *_: release.wait())
    monkeypatch.setattr(doctor, "HOST_SECONDS", 0.1)
    with Signals() as signals:
        doctor.run([], dict(os.environ), signals)
    release.set()
    out = capfd.readouterr().out
    assert "warning  names      names and ports could not be checked in time" in out
    assert "warning  disk       folders and limits could not be checked in time" in out


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


def run_doctor(*args, code=0, command=LAUNCHER, **environ):
    return completed(*command, "doctor", *args, code=code, **environ)


def found(done):
    """Return what --json says, by check."""
    by_check = {}
    for finding in json.loads(done.stdout)["findings"]:
        text = f"{finding['seen']} -> {finding['to_do']}"
        by_check.setdefault(finding["check"], []).append((finding["level"], text))
    return by_check


def test_a_host_alone(fake_torch, start):
    imported = fake_torch()
    host = start(command=[*LAUNCHER, "doctor"], LAUNCHER_GRCE="3")
    assert (host.wait(), host.err, host.failure) == (0, "", None)
    assert imported.read_text() not in ("", str(host.process.pid))  # by a child process
    assert "torch 2.8.0 for CPU" in host.out and "no script was given" in host.out
    assert "LAUNCHER_GRCE is not a launcher option" in host.out
    # What a job would log is in the report alone.
    assert "ok       settings   found neither SM_HOSTS nor SageMaker's config files" in host.out
    assert re.search(r"^A job would run; \d warnings?\.$", host.out, re.MULTILINE)


def test_a_job_of_this_script(fake_torch, script, tmp_path):
    fake_torch()
    path = script("raise SystemExit('was started')")
    log_dir = tmp_path / "logs" / "of ranks"
    done = run_doctor("--json", "--train-script", path, "--launcher-nproc-per-node", "2", "--json",
                  "--launcher-log-dir", log_dir)  # fmt: skip
    ((level, text),) = found(done)["job"]
    assert level == "ok" and ": 2 ranks on " in text
    assert not (tmp_path / "logs").exists()
    (tmp_path / "logs").write_text("a file")
    done = run_doctor("--train-script", path, "--launcher-log-dir", log_dir, code=2)
    assert f"problem  disk       {tmp_path}/logs (--launcher-log-dir): it is not a f" in done.stdout


def test_a_job_that_would_not_start(fake_torch, tmp_path):
    fake_torch()
    done = run_doctor("--train-script", "missing.py", code=2, LAUNCHER_GRCE="3")
    assert done.stdout.count("LAUNCHER_GRCE") == 1
    assert "problem  job        --train-script missing.py: there is" in done.stdout
    assert (
        (tmp_path / "output/failure")
        .read_text()
        .startswith("launcher: doctor: a job would fail\njob: --train-script missing.py")
    )


def test_a_host_that_takes_no_part(fake_torch):
    fake_torch()
    groups = {"a": {"hosts": ["algo-1"]}, "b": {"hosts": ["algo-2"]}}
    environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
    environ["SM_INSTANCE_GROUPS_DICT"] = json.dumps(groups)
    done = run_doctor("--launcher-instance-groups", "a", **environ)
    assert "This host would not run any part of the job." in done.stdout


def test_torch_that_cannot_be_imported(fake_torch):
    fake_torch("raise ImportError('libcudart.so is missing')")
    done = run_doctor("--json", code=2)
    assert found(done)["torch"][0][0] == "problem"
    assert "ImportError: libcudart.so is missing" in done.stdout
    fake_torch("os._exit(3)")
    assert "it ended with exit code 3" in run_doctor(code=2).stdout


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


def test_a_gpu(fake_torch, tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, NVIDIA_SMI)
    fake_torch(devices=1, cuda="12.8")
    seen = found(run_doctor("--json"))
    assert seen["devices"] == [("ok", "1 GPU for the job: NVIDIA A10G, driver 550.163.01 -> ")]
    assert "CUDA 12.8, NCCL 2.27.3" in seen["torch"][0][1]
    fake_torch(devices=0, cuda="12.8")
    assert "cannot use any GPU (the driver is too old)" in run_doctor("--json", code=2).stdout


READY_AND_HANG = "print('importing', flush=True)\nimport time\ntime.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_doctor_and_its_child(fake_torch, start, number):
    imported = fake_torch(READY_AND_HANG)
    host = start(command=[*LAUNCHER, "doctor"])
    poll(lambda: imported.exists() and imported.read_text())
    host.signal(number)
    assert host.wait(60) == 128 + number
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
    subprocess.run([sys.executable, REPO / "bundle" / "build.py", archive], check=True)
    done = run_doctor(
        "--json", command=[sys.executable, archive], PYTHONPATH=str(tmp_path / "site")
    )
    assert found(done)["torch"] == [("ok", "torch 2.8.0 for CPU; backends: gloo -> ")]


@pytest.mark.parametrize("args", [("--help",), ("--train-script", "t.py", "--launcher-help")])
def test_help(args):
    assert run_doctor(*args).stdout.startswith("usage: sm-launch doctor [--json]")


# Of made-up hosts


def local(*args, code=0):
    return completed(*LAUNCHER, "local", *args, code=code)


def test_made_up_hosts(fake_torch, script, tmp_path):
    fake_torch()
    done = local("--hosts", 2, "--doctor")
    assert done.stdout.endswith("A job would run on every host.\n")
    for host in ("1", "2"):
        assert f"algo-{host} | A job would run on algo-{host}" in done.stdout
    assert "`sm-launch local` forwards stops" in done.stdout
    assert "names      all are given: algo-1 is 127.0.0.1\n" in done.stdout
    done = local(
        "--hosts", 1, "--doctor", "--", script("1"), "--launcher-grace", "119", "--epochs", 3
    )
    assert "use at most --launcher-grace 110" in done.stdout and "no script" not in done.stdout
    done = local("--hosts", 2, "--doctor", "--", "--launcher-grace", "118")
    assert "118 s to save, but" in done.stdout and "no script was given" in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not [name for name in os.listdir(os.environ["TMPDIR"]) if "doctor" in name]


# With the real torch


@pytest.mark.torch
def test_the_real_torch():
    import torch

    seen = found(run_doctor("--json"))
    assert f"torch {torch.__version__} " in seen["torch"][0][1]
    assert ("gloo" in seen["torch"][0][1]) is torch.distributed.is_gloo_available()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--bogus", "'--bogus' is neither an option of this torchrun nor a value"),
        ("--role x --tee 3", ""),
    ],
)
def test_torchruns_own_parser_is_asked(script, arguments, says):
    words = ("--train-script", script(""), f"--launcher-torchrun-args={arguments}")
    done = run_doctor("--json", *words, code=2 if says else 0)
    ((level, text),) = found(done)["job"]
    assert level == ("problem" if says else "ok")
    if says:
        assert says in text
