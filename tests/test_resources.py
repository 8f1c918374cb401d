"""What this host has, asked of the real system; drivers' commands are scripts in a PATH."""

import os
import socket

import psutil
import pytest

from launcher.errors import LaunchError
from launcher.host import cgroups
from launcher.job import resources
from launcher.result.causes import of_error


def test_gpus_are_counted_with_nvidia_smi(program):
    lines = "echo 'GPU 0: NVIDIA A10G (UUID: GPU-1)'; echo '  MIG 1g'; echo 'GPU 1: NVIDIA'"
    found = resources.gpus(program("nvidia-smi", f'[ "$1" = -L ] && {{ {lines}; }}'))
    assert [gpu.name for gpu in found] == ["NVIDIA A10G", "NVIDIA"]


def test_a_driver_is_asked_once_and_its_failure_reported_once(program, logged):
    """Without the toolkit the number of GPUs and their models are asked for."""
    environ = program("nvidia-smi", "echo no driver; exit 9")
    assert resources.gpus(environ) == resources.gpus(environ) == []
    assert logged().count("nvidia-smi -L failed") == 1


def test_neuron_cores(program, logged):
    environ = program("neuron-ls", """[ "$1" = -j ] && echo '[{"nc_count": 2}, {"nc_count": 2}]'""")
    assert resources.count_neuron_cores("ml.trn1.2xlarge", environ) == 4
    assert resources.count_neuron_cores("ml.trn2.48xlarge", environ) == 64  # as the toolkit has it
    for text in ("garbage", '[{"nc_count": 1e999}]', "[" * 100_000, "[[]]"):
        environ = program("neuron-ls", f"cat <<X\n{text}\nX")
        assert resources.count_neuron_cores("", environ) == 0
        assert "cannot read the output of neuron-ls" in logged()


def test_usable_cores_follow_the_affinity_mask():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert len(resources.physical_cores()) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def root(tmp_path):
    """Make a root folder for a process of some cgroups: root("0::/a", {"a/cpu.max": "9 9"})."""

    def make(own, files):
        texts = {"proc/self/cgroup": own, "proc/vmstat": "nr_free_pages 5\noom_kill 6"}
        texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return str(tmp_path)

    return make


QUOTAS = [
    ("0::/", {"cpu.max": "max 9"}, None),
    # The tightest on the way up counts.
    ("0::/a/b", {"cpu.max": "max 9", "a/cpu.max": "9 9", "a/b/cpu.max": "27 9"}, 1),
    # Version 1, in a container: the path is the host's.
    ("4:cpu,cpuacct:/docker/x", {"cpu/cpu.cfs_quota_us": "36", "cpu/cpu.cfs_period_us": "9"}, 4),
    ("garbage", {}, None),
]


@pytest.mark.parametrize(("own", "files", "cpus"), QUOTAS)
def test_the_cgroups_quota(root, own, files, cpus):
    assert resources.cgroup_cpus(root(own, files)) == cpus
    assert resources.cgroup_cpus("/nowhere") is None


OOM = "out of memory: {} recorded an OOM kill (oom_kill)"
CGROUP, MACHINE = OOM.format("the memory cgroup"), OOM.format("the machine")
V1, OTHERS = "memory.oom_control", "oom_kill 70"
ABOVE, BELOW = f"memory/{V1}", f"memory/docker/{V1}"
KILLS = [
    # Version 2, in a container: the root is its own group.
    ("0::/", {"memory.events": "oom 3\noom_kill 1"}, {CGROUP: 1}),
    # Nested: what is above, and the machine, count the kills of others, too.
    ("0::/a/job", {"a/memory.events": OTHERS, "a/job/memory.events": "oom_kill 2"}, {CGROUP: 2}),
    # Version 1, in a container: the path is the host's; `docker` is what it runs itself.
    ("4:memory:/docker/x", {ABOVE: "x 0\noom_kill 3", BELOW: OTHERS}, {CGROUP: 3}),
    # In a group of the container's own.
    ("4:memory:/docker/x/job", {ABOVE: OTHERS, f"memory/job/{V1}": "oom_kill 4"}, {CGROUP: 4}),
    ("garbage", {}, {MACHINE: 6}),
]


@pytest.mark.parametrize(("own", "files", "kills"), KILLS)
def test_out_of_memory_kills_are_those_of_the_own_group(root, own, files, kills):
    assert cgroups.oom_kills(root(own, files)) == kills
    assert cgroups.oom_kills("/nowhere") == {}


def test_the_limits_of_processes_are_those_of_all_groups(root):
    files = {"pids/pids.events": "max 3", "pids/docker/x/pids.events": "max 0"}
    limits = {"pids/pids.max": "512", "pids/docker/x/pids.max": "512"}
    says = "out of processes and threads: /sys/fs/cgroup/{}/pids.max allows 512"
    counts = {says.format("pids"): 3, says.format("pids/docker/x"): 0}
    assert cgroups.refused_processes(root("8:pids:/docker/x", {**files, **limits})) == counts


@pytest.mark.parametrize(("driver", "efa"), [("efa", True), ("mlx5_core", False)])
def test_an_efa_device_is_one_with_that_driver(tmp_path, driver, efa):
    (tmp_path / "drivers" / driver).mkdir(parents=True)
    (tmp_path / "class" / "rdmap0s6" / "device").mkdir(parents=True)
    (tmp_path / "class/rdmap0s6/device/driver").symlink_to(tmp_path / "drivers" / driver)
    assert resources.has_efa(str(tmp_path / "class")) is efa
    assert resources.has_efa("/nowhere") is False


def test_the_interface_of_a_host_is_the_one_with_its_address():
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if name != "lo" and own:
            assert resources.interface_of(own[0]) == name
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "no-such-host.invalid", "a..b"):
        assert resources.interface_of(host) == ""


@pytest.mark.parametrize(
    ("version", "seen"),
    [("2.4.0", (2, 4)), ("2.13.0+cpu", (2, 13)), ("3.0.0a0+git1", (3, 0))],
)
def test_torch_version_is_read_not_imported(pretend_torch, version, seen):
    pretend_torch(version)
    assert resources.torch_version(resources.torch_folder()) == version
    assert resources.read_resources().torch_version == seen


def test_an_unreadable_version_counts_as_the_oldest(pretend_torch, logged):
    pretend_torch("unknown")
    assert resources.torch_version(resources.torch_folder()) == "2.4"
    assert "cannot read the version of torch" in logged()


def test_torch_without_torchrun(pretend_torch, tmp_path):
    pretend_torch("2.4.0")
    (tmp_path / "site" / "torch" / "distributed" / "run.py").unlink()
    with pytest.raises(LaunchError, match=r"has no torch.distributed.run") as caught:
        resources.torch_folder()
    assert of_error(caught.value).exit_code == 127
