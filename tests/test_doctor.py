"""`sm-launch doctor`: each check on a folder and an environment made for it; the whole program."""

import json
import os
import re
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import LAUNCHER, REPO, completed, findings, free_port, has_ended, poll, write_config

from launcher.host.child import Answer, ask
from launcher.host.signals import Signals
from launcher.job.job import Cluster, Job, LaunchPlan
from launcher.job.options import Options
from launcher_tools import doctor
from launcher_tools import doctor_checks as checks
from launcher_tools.doctor import ReportLine, planned

MIB, GIB = 1 << 20, 1 << 30
NAMES = ("algo-1", "algo-2", "algo-3")
ON_AWS = {"TRAINING_JOB_ARN": "arn:aws:sagemaker:..."}


def host(current="algo-2", gpus=0, names=NAMES, neurons=0, ranks=1, addresses=(), **options):
    """Return the job of a host, with its number of ranks."""
    models = ("NVIDIA A10G",)
    cluster = Cluster(
        tuple(names), current, "job", gpus, neurons, "", dict(addresses), gpu_models=models
    )
    return Job(cluster, Options(**options), LaunchPlan((), {}, str(ranks), ()))


ALONE = host("algo-1", names=["algo-1"])


def says(findings, *expected):
    """Hold that there are these findings and no others: each begins with its level."""
    texts = [f"{level} {seen} -> {' '.join(to_do)}" for level, seen, *to_do in findings]
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


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({"algo-1": "10.0.0.1", "algo-3": "10.0.0.3"}, "ok all resolve: algo-1 is 10.0.0.1, algo-"),
        ({"algo-1": "10.0.0.1"}, "warning no address within 60 s for algo-3"),
        ({"algo-1": "127.0.0.1", "algo-3": "10.0.0.3"}, "warning algo-1 resolves to this host's"),
    ],
)
def test_the_names_of_other_hosts(monkeypatch, addresses, expected):
    def look_up(host):
        return [(0, (addresses[host], 0))] if host in addresses else []

    monkeypatch.setattr(checks, "NAMES_SECONDS", 60)
    monkeypatch.setattr(checks, "look_up", look_up)
    says(checks.names(host(), {}), expected)
    says(checks.names(host(addresses={"algo-1": "127.0.0.1", "algo-3": "127.0.0.3"}), {}))
    says(checks.names(ALONE, {}))


@pytest.fixture
def hang():
    """Return a function that does not return before the test's end."""
    release = threading.Event()
    yield lambda *_: release.wait() and []
    release.set()


def test_names_whose_resolution_hangs(monkeypatch, hang):
    monkeypatch.setattr(checks, "NAMES_SECONDS", 0.1)
    monkeypatch.setattr(checks, "look_up", hang)
    says(checks.names(host(), {}), "warning no address within 0.1 s for algo-1, algo-3")


@pytest.mark.parametrize(
    ("job", "environ", "expected"),
    [
        (host(gpus=1), {"NCCL_SOCKET_IFNAME": "eth7"}, "problem =eth7, but this host has eth0, lo"),
        (host(gpus=1), {"GLOO_SOCKET_IFNAME": "eth7"}, "warning GLOO_SOCKET_IFNAME=eth7"),
        (host(), {"GLOO_SOCKET_IFNAME": "eth0,ib"}, "problem GLOO_SOCKET_IFNAME=eth0,ib"),
        (ALONE, {"GLOO_SOCKET_IFNAME": "^lo,docker"}, "problem GLOO_SOCKET_IFNAME=^lo,docker"),
        (host(), {"NCCL_SOCKET_IFNAME": "eth,ib"}, "ok as you set it"),
        (host(), {"NCCL_SOCKET_IFNAME": "^lo,docker"}, "ok as you set it"),
        (host(), {"NCCL_SOCKET_IFNAME": "=eth"}, "warning =eth"),
        (ALONE, {}, None),
    ],
)
def test_an_interface_that_the_user_names(monkeypatch, job, environ, expected):
    monkeypatch.setattr(checks.resources, "network_interfaces", lambda: {"lo", "eth0"})
    says(checks.interface(job, environ), *filter(None, [expected]))


def test_the_ports_of_the_first_host(monkeypatch):
    first, second = free_port(), free_port()
    chosen = {"names": ("127.0.0.1", "127.0.0.2"), "rdzv_port": first, "peer_port": second}

    def seen(current, **environ):
        return checks.ports(host(current, **chosen), environ)

    one, other = f"port {first} (--launcher-rdzv-port)", f"port {second} (--launcher-peer-port)"
    silent = "ok 127.0.0.1 can be reached; nothing is listening yet at "
    says(seen("127.0.0.1"), f"ok {other} is free", f"ok {one} is free")
    says(seen("127.0.0.2"), silent + other, silent + one)
    with socket.create_server(("127.0.0.1", first)):
        taken = f"problem this host cannot listen on {one}: Address already in use -> choose"
        says(seen("127.0.0.1"), f"ok {other}", taken)
        says(seen("127.0.0.2"), silent + other, f"ok 127.0.0.1 answers at {one}")
        says(seen("127.0.0.1", PET_RDZV_ENDPOINT="x:1"), f"ok {other}")
    says(checks.ports(ALONE, {}))
    for name in ("nowhere.invalid", "no..name"):
        away = f"warning {name} did not answer at port 1 (--launcher-peer-port)"
        job = host(names=[name, "x"], current="x", peer_port=1)
        says(checks.ports(job, {"PET_RDZV_ENDPOINT": "x:1"}), away)


def test_efa(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_ROOT", str(tmp_path))
    limits(monkeypatch, resource.RLIM_INFINITY)
    says(checks.efa(host(), {}), "ok this host has no EFA device")
    says(checks.efa(ALONE, {}))
    device = tmp_path / "sys/class/infiniband/rdma0/device"
    device.mkdir(parents=True)
    (tmp_path / "efa").mkdir()
    (device / "driver").symlink_to(tmp_path / "efa")
    says(checks.efa(host(), {}), "ok this host has an EFA device -> ")
    says(checks.efa(host(gpus=8), {}), "warning install aws-ofi-nccl")
    files(tmp_path, {"opt/aws-ofi-nccl/lib/libnccl-net.so": "", "mine/libnccl-net-1.so.0": ""})
    expected = f"ok NCCL's plugin is {tmp_path}/opt/aws-ofi-nccl/lib/libnccl-net.so"
    says(checks.efa(host(gpus=8), {}), expected)
    limits(monkeypatch, 65536)
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}/mine"}
    found = [*checks.efa(host(gpus=8), environ)]
    says(found, "warning 64 KiB may be locked -> start the container with --ulimit memlock=-1, or")
    found = [*checks.efa(host(gpus=8), {**environ, **ON_AWS})]
    says(found, "warning 64 KiB may be locked -> have NCCL use TCP")


# Devices and torch

USE = "use --launcher-nproc-per-node"


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (host(gpus=2, ranks=2), []),
        (host(gpus=2, ranks=4), [f"warning 4 ranks would share 2 GPUs (NVIDIA A10G) -> {USE} 2"]),
        (host(gpus=2, ranks="gpu"), []),  # torchrun counts
        (host(neurons=32, ranks=33), ["warning 33 ranks would share 32 Neuron cores"]),
        (host(ranks=1000), ["warning 1000 ranks would share no GPU; "]),
    ],
)
def test_devices(tmp_path, monkeypatch, job, expected):
    monkeypatch.setattr(checks, "_ROOT", str(tmp_path))
    says(checks.devices(job, {}), *expected)


def test_a_gpu_that_nvidia_smi_does_not_list(tmp_path, monkeypatch):
    root = files(tmp_path, {"sys/bus/pci/devices/0/vendor": "0x10de\n"})
    monkeypatch.setattr(checks, "_ROOT", root)
    seen = "problem this host has an NVIDIA GPU, but nvidia-smi lists none"
    says(checks.devices(ALONE, {}), seen)
    says(checks.devices(ALONE, {"CUDA_VISIBLE_DEVICES": ""}))
    unknown, _ = planned(["--launcher-no-such"], dict(os.environ))
    says(checks.devices(unknown, {}))  # it was not asked


@pytest.mark.parametrize(
    ("err", "problem", "is_late", "expected"),
    [
        ("", "", False, []),
        ("first\nlast\n", "it was killed by signal 11", False, ["problem 11 (last) -> reinstall"]),
        ("", "it did not finish", True, ["warning it did not finish () -> run doctor again"]),
    ],
)
def test_what_the_child_process_says_of_torch(monkeypatch, err, problem, is_late, expected):
    out = 'a warning\n["ok", "torch 2.8.0", ""]\n\n[1]\n7\n[0, 1, 2]\n["warning", "old", "newer"]\n'
    monkeypatch.setattr(checks, "ask", lambda *_: Answer(out, err, problem, is_late))
    says(checks.torch(ALONE, {}), "ok torch 2.8.0", "warning old -> newer", *expected)


# The machine


def test_shared_memory(monkeypatch):
    """SageMaker has no option for its size, and nobody is told of one there."""
    space(monkeypatch, free=2 * GIB)
    says(checks.disk(ALONE, {}), "ok 2.0 GiB free: ")
    space(monkeypatch, free=64 * MIB)
    small = "warning /dev/shm (data loader workers and NCCL pass data through it): 64 MiB of 20.0"
    small += " GiB left -> "
    full = "warning (TMPDIR): 64 MiB of 20.0 GiB left -> raise volume_size"
    says(checks.disk(ALONE, {}), full, f"{small}start the container with --shm-size=2g, or use fe")
    says(checks.disk(ALONE, ON_AWS), full, f"{small}use fewer data loader workers (num_workers)")


def space(monkeypatch, free, inodes=1):
    """Have each disk seem to have 20 GiB, some of them free."""
    blocks = {"f_frsize": 1, "f_blocks": 20 * GIB, "f_bavail": free}
    seen = SimpleNamespace(**blocks, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: seen)


def test_folders_on_disks(tmp_path, monkeypatch):
    environ = {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml"), "TMPDIR": os.environ["TMPDIR"]}
    temporary = f"{environ['TMPDIR']} (TMPDIR)"

    def disk(environ, log_dir=""):
        found = checks.disk(host(log_dir=log_dir), environ)
        return [one for one in found if not re.match(r"(\S+ \S+ free: )?/dev/shm", one[1])]

    (tmp_path / "ml" / "input" / "config").mkdir(parents=True)
    missing = "No such file or directory -> create it, make it writable for this user"
    model, output = f"{tmp_path}/ml/model (the model)", f"{tmp_path}/ml/output (the failure reason)"
    expected = (f"warning {model}: {missing}", f"warning {output}: {missing}")
    says(disk(environ), *expected, f"ok free: {temporary}")
    for name in ("model", "output", "checkpoints"):
        (tmp_path / "ml" / name).mkdir()
    space(monkeypatch, free=9 * GIB)
    (found,) = disk(environ, str(tmp_path / "logs" / "of ranks"))
    uses = ("the model", "the failure reason", "checkpoints", "--launcher-log-dir", "TMPDIR")
    assert found[1].startswith("9.0 GiB free: ") and all(f"({use})" in found[1] for use in uses)
    environ = {"TMPDIR": environ["TMPDIR"]}
    space(monkeypatch, free=1000 * MIB)
    says(disk(environ), f"warning {temporary}: 1000 MiB of 20.0 GiB left -> raise vol")
    space(monkeypatch, free=9 * GIB, inodes=0)
    says(disk(environ), f"warning {temporary}: no files left")
    monkeypatch.setattr(os, "access", lambda *_: False)
    denied = "this user cannot make a file there -> create it"
    expected = f"problem {tmp_path} (--launcher-log-dir): {denied}"
    says(disk(environ, str(tmp_path)), expected, f"problem {temporary}: {denied}")


@pytest.mark.parametrize(
    ("job", "hard", "expected"),
    [
        (ALONE, resource.RLIM_INFINITY, "ok any number of files"),
        (ALONE, 1024, "warning may have 1024 files open -> start the container with --ulimit nof"),
        (host(names=[f"algo-{n}" for n in range(9000)]), 8192, "warning 8192 files open -> "),
    ],
)
def test_open_files(tmp_path, monkeypatch, job, hard, expected):
    limits(monkeypatch, 25, hard)
    monkeypatch.setattr(checks, "_ROOT", str(tmp_path))
    says(checks.limits(job, {}), expected)


@pytest.mark.parametrize(
    ("ranks", "most", "environ", "expected"),
    [
        (1, "max", {}, None),
        (1, "500", {}, "ok 490 more processes and threads may be started"),
        (8, "120", {"OMP_NUM_THREADS": "4"}, "warning 110 more processes and threads may be start"),
        (8, "120", ON_AWS, "warning need about 144 -> use fewer data loader workers"),
        (8, "120", {}, "warning with 1 thread and 1 data loader worker each need about 144 "),
    ],
)
def test_processes_and_threads(tmp_path, monkeypatch, ranks, most, environ, expected):
    """As many as ranks start, with their threads and with workers of data loaders."""
    texts = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/pids.max": f"{most}\n"}
    root = files(tmp_path, {**texts, "sys/fs/cgroup/a/pids.current": "10\n"})
    monkeypatch.setattr(checks, "_ROOT", root)
    monkeypatch.setattr(checks.resources, "physical_cores", lambda: [{0}] * 8)
    limits(monkeypatch, 1024)
    says([*checks.limits(host(ranks=ranks), environ)][1:], *filter(None, [expected]))


# How a stop travels


@pytest.mark.parametrize(
    ("pid_1", "pids", "expected"),  # those of this process and of all above it
    [
        ("/usr/bin/python3 -u /bin/sm-launch init train", [9, 7, 1], "ok PID 1 is the launcher"),
        ("python launcher/__main__.py --epochs 3", [9, 7, 1], "ok PID 1 is the launcher, or its"),
        ("/usr/bin/python3 /usr/bin/train", [9, 7, 1], "warning a stop reaches ranks only"),
        ("/bin/sh -c sm-launch; true", [9, 1], "warning PID 1 is `/bin/sh -c sm-launch; true`: a "),
        ("/sbin/tini -- sm-launch", [9, 1], "ok PID 1 is `/sbin/tini -- sm-launch`, which forward"),
        ("/sbin/tini -- train", [9, 7, 1], "warning -> start the container with `sm-launch init`"),
        ("python my_init.py", [9, 1], "warning PID 1 is `python my_init.py`: a stop reaches ranks"),
        ("/lib/systemd/systemd", [9, 1], "ok not under a container's PID 1"),
        ("gosu train", [1], "ok PID 1 is the launcher, or its `init`"),
        ("bash", [9, 7], "ok not under a container's PID 1"),
        ("/bin/sm-launch\0init\0train\0", [9, 7], "ok PID 1 is the launcher, or its `init`"),
    ],
)
def test_whether_a_stop_reaches_the_ranks(tmp_path, monkeypatch, pid_1, pids, expected):
    monkeypatch.setattr(checks, "_ROOT", files(tmp_path, {"proc/1/cmdline": pid_1}))
    monkeypatch.setattr(checks, "_up_to_the_top", lambda: pids)
    says(checks.stop(ALONE, {}), expected)
    says(checks.stop(ALONE, {"LAUNCHER_HOST_ADDRESSES": "{}"}), "ok `sm-launch local` forwards")


# The job


def test_a_job_of_sdk_v3_is_that_of_its_hyperparameters(pretend_torch, script):
    """With `command`; without a script among them they belong to another command."""
    pretend_torch("2.8.0")
    script("")
    environ = {**os.environ, "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    job, has_script = planned([], {**environ, "SM_HPS": '{"train-script": "script.py", "lr": 1}'})
    assert has_script and job.plan.argv[-3:] == ("script.py", "--lr", "1")
    job, has_script = planned([], {**environ, "SM_HPS": '{"lr": 1}'})
    assert not has_script and not job.error


def test_what_is_logged_twice_is_reported_once(pretend_torch, program, capfd):
    """Without a script, where nvidia-smi counts the GPUs of SageMaker's files and fails."""
    pretend_torch("2.8.0")
    write_config(Path("ml"))
    environ = {**os.environ, **program("nvidia-smi", "exit 3"), "SAGEMAKER_BASE_DIR": "ml"}
    environ = {name: text for name, text in environ.items() if not name.startswith("SM_")}
    doctor.run([], environ, SimpleNamespace(stop=0))
    assert capfd.readouterr().out.count("nvidia-smi -L failed") == 1


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        ([], {}, ""),
        (["train"], {}, ""),  # SageMaker's word
        (["--launcher-grace", "3"], {"LAUNCHER_GRCE": "3"}, ""),
        (["--launcher-grac", "3"], {}, "Did you mean --launcher-grace?"),
        (["train.py"], {}, "train.py was taken as an argument of the script"),
    ],
)
def test_a_host_without_a_script_or_a_job_that_would_not_start(pretend_torch, argv, environ, words):
    pretend_torch("2.8.0")
    job, has_script = planned(argv, {**os.environ, **environ})
    assert words in str(job.error) if words else not (job.error or has_script)


# The report


def test_the_report_for_people_for_machines_and_for_sagemaker():
    found = [
        ReportLine("names", "ok", "fine"),
        ReportLine("disk", "warning", "full", "empty it"),
        ReportLine("job", "problem", "\x1b\n"),
    ]
    assert doctor.as_text(host(), found) == (
        "ok       names      fine\n"
        "warning  disk       full\n"
        "                    -> empty it\n"
        "problem  job        \\x1b\\n\n"
        "A job would fail on algo-2: 1 problem; 1 warning."
    )
    assert doctor.as_failure(found) == "launcher: doctor: a job would fail\njob: \\x1b\\n\n"
    made = json.loads(doctor.as_json(host(), found))
    assert (made["host"], made["hosts"], made["would_run"]) == ("algo-2", 3, False)
    assert made["findings"][2] == found[2]._asdict()
    page = (REPO / "docs" / "development" / "tools.md").read_text()
    for field in (*made, *made["findings"][0]):
        assert f'"{field}"' in page
    assert doctor.as_text(host(), found[:2]).endswith("A job would run on algo-2; 1 warning.")
    (table,) = re.findall(r"^\| check \| .*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert [*checks.CHECKS, "settings", "job"] == rows


# What may hang


HANGS = "#!/bin/sh\ntrap '' TERM\nsleep 600 &\necho $!\nsleep 600\n"


def test_a_command_that_hangs_is_killed_with_what_it_started():
    began = time.monotonic()
    answer = ask(["/bin/sh", "-c", HANGS], os.environ, 5)
    assert time.monotonic() - began < 60
    assert answer.is_late and "within 5 s" in answer.problem
    below = int(answer.out)
    poll(lambda: has_ended(below))


def test_how_a_command_ended():
    killed = ask(["/bin/sh", "-c", "kill -9 $$"], os.environ, 60)
    assert killed.problem == "it was killed by signal 9"
    assert ask(["/bin/sh", "-c", "exit 3"], os.environ, 60).problem == "it ended with exit code 3"
    assert ask(["/no/such"], {}, 1).problem == "/no/such was not found"


def test_what_a_command_leaves_behind_is_not_waited_for():
    """As a driver's daemon, which holds the output open."""
    answer = ask(["/bin/sh", "-c", "sleep 600 & echo $!"], os.environ, 60)
    os.kill(int(answer.out), signal.SIGKILL)
    assert answer.problem == ""


def test_what_hangs_is_left_behind(pretend_torch, monkeypatch, capfd, hang):
    pretend_torch("2.8.0")
    monkeypatch.setattr(doctor, "CHECKS", {"disk": hang})
    monkeypatch.setattr(doctor, "SECONDS", 0.1)
    doctor.run([], dict(os.environ), SimpleNamespace(stop=0))
    assert "warning  disk       could not be checked within 70 s" in capfd.readouterr().out


def test_a_stop_ends_the_wait_for_a_check(monkeypatch, hang):
    monkeypatch.setattr(Signals, "stop", signal.SIGTERM)
    assert checks.at_once(hang, ["disk"], 600) == {}


def test_an_error_of_a_check_is_not_taken_for_a_hang():
    with pytest.raises(ZeroDivisionError):
        checks.at_once(lambda name: 1 / 0, ["disk"], 60)


# The program itself, with a torch that is only a text


@pytest.fixture
def fake_torch(pretend_torch, tmp_path):
    """Put a torch first in PYTHONPATH: what the launcher's child process asks it."""

    def make(begin="", devices=0, cuda=None):
        pretend_torch("2.8.0")
        torch = {
            "__init__.py": f"""
import os
open({str(tmp_path / "imported")!r}, "w").write(str(os.getpid()))
{begin}
from . import cuda, version
__version__ = "2.8.0"
""",
            "version.py": f"__version__ = '2.8.0'\ncuda = {cuda!r}\n",
            "cuda.py": f"""
class nccl:
    def version(): return (2, 27, 3)
def init():
    if not {devices}: raise RuntimeError("the driver is too old")
""",
            "distributed/__init__.py": f"""
def is_available(): return True
def is_nccl_available(): return {bool(cuda)}
def is_gloo_available(): return True
""",
        }
        files(tmp_path / "site" / "torch", torch)
        return tmp_path / "imported"

    return make


def run_doctor(*args, code=0, **environ):
    return completed(*LAUNCHER, "doctor", *args, code=code, **environ)


def test_a_host_alone(fake_torch, start):
    imported = fake_torch()
    host = start(command=[*LAUNCHER, "doctor"], LAUNCHER_GRCE="3")
    assert (host.wait(), host.err, host.failure) == (0, "", None)
    assert imported.read_text() not in ("", str(host.process.pid))  # by a child process
    assert "torch 2.8.0 for CPU" in host.out and "no script was given" in host.out
    assert "warning  settings   warning: LAUNCHER_GRCE is not a launcher option" in host.out
    # What a job would log is in the report alone.
    assert "(found neither SM_HOSTS nor SageMaker's config files): 1 rank on CPU\n" in host.out
    assert re.search(r"^A job would run; \d warnings?\.$", host.out, re.MULTILINE)


def test_a_job_of_this_script(fake_torch, script, tmp_path):
    fake_torch()
    path = script("raise SystemExit('was started')")
    job = ("--train-script", path, "--launcher-log-dir", tmp_path / "logs" / "of ranks")
    done = run_doctor("--json", *job, "--launcher-nproc-per-node", "2", "--json")
    ((level, text),) = findings(done.stdout)["job"]
    assert level == "ok" and ": 2 ranks on " in text
    assert not (tmp_path / "logs").exists()
    (tmp_path / "logs").write_text("a file")
    done = run_doctor(*job, code=2)
    failure = (tmp_path / "output/failure").read_text()
    problem = f"{tmp_path}/logs (--launcher-log-dir): this user cannot"
    assert failure.startswith(f"launcher: doctor: a job would fail\ndisk: {problem}")
    assert f"problem  disk       {problem}" in done.stdout


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
    assert findings(done.stdout)["torch"][0][0] == "problem"
    assert "ImportError: libcudart.so is missing" in done.stdout


def test_a_gpu(fake_torch, program, monkeypatch):
    listed = program("nvidia-smi", 'echo "GPU 0: NVIDIA A10G (UUID: GPU-1)"')
    monkeypatch.setenv("PATH", listed["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake_torch(devices=1, cuda="12.8")
    seen = findings(run_doctor("--json").stdout)
    assert "on 1 GPU (NVIDIA A10G)" in seen["job"][0][1]
    (torch,) = seen["torch"]
    assert torch == ("ok", "torch 2.8.0 for CUDA 12.8, NCCL 2.27.3; backends: nccl, gloo -> ")
    fake_torch(devices=0, cuda="12.8")
    assert "cannot use any GPU (the driver is too old)" in run_doctor("--json", code=2).stdout
    fake_torch()
    assert "torch 2.8.0 is a CPU build, but this host has GPUs" in run_doctor(code=2).stdout


READY_AND_HANG = "print('importing', flush=True)\nimport time\ntime.sleep(600)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_doctor_and_its_child(fake_torch, start, number):
    imported = fake_torch(READY_AND_HANG)
    host = start(command=[*LAUNCHER, "doctor"])
    poll(lambda: imported.exists() and imported.read_text())
    host.signal(number)
    assert host.wait() == 128 + number
    poll(lambda: not host.processes())
    assert host.failure is None and host.out == ""


# Of made-up hosts


def test_made_up_hosts(fake_torch, script, tmp_path):
    fake_torch()
    local = (*LAUNCHER, "local", "--doctor", "--hosts")
    done = completed(*local, 2)
    assert done.stdout.endswith("A job would run on every host.\n")
    for host in ("1", "2"):
        assert f"algo-{host} | A job would run on algo-{host}" in done.stdout
    assert "`sm-launch local` forwards stops" in done.stdout
    done = completed(*local, 1, "--", script("1"), "--launcher-grace", "121", "--epochs", 3)
    assert "--launcher-grace is 121 s, but" in done.stdout and "no script" not in done.stdout
    assert not (tmp_path / "runs").exists()
    assert not [name for name in os.listdir(os.environ["TMPDIR"]) if "doctor" in name]


# With the real torch


@pytest.mark.torch
def test_the_real_torch():
    import torch

    seen = findings(run_doctor("--json").stdout)
    assert f"torch {torch.__version__} " in seen["torch"][0][1]
    assert ("gloo" in seen["torch"][0][1]) is torch.distributed.is_gloo_available()
