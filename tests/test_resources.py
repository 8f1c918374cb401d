"""What this host has, asked of the real system; drivers' commands are scripts in a PATH."""

import os
import socket

import psutil
import pytest

from launcher.errors import LaunchError
from launcher.host import cgroups
from launcher.job import resources
from launcher.result.causes import of_error


@pytest.fixture
def driver(tmp_path):
    """Put a command with a given text in a PATH of its own; return the environment."""

    def make(name: str, text: str) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    return make


def test_gpus_are_counted_with_nvidia_smi(driver):
    lines = "echo 'GPU 0: NVIDIA A10G (UUID: GPU-1)'; echo '  MIG 1g'; echo 'GPU 1: NVIDIA'"
    found = resources.gpus(driver("nvidia-smi", f'[ "$1" = -L ] && {{ {lines}; }}'))
    assert [gpu.name for gpu in found] == ["NVIDIA A10G", "NVIDIA"]


def test_a_failing_driver_is_reported(driver, logged):
    assert resources.gpus(driver("nvidia-smi", "echo no driver; exit 9")) == []
    assert "nvidia-smi -L failed" in logged()


def test_neuron_cores(driver, logged):
    environ = driver("neuron-ls", """[ "$1" = -j ] && echo '[{"nc_count": 2}, {"nc_count": 2}]'""")
    assert resources.count_neuron_cores("ml.trn1.2xlarge", environ) == 4
    assert resources.count_neuron_cores("ml.trn2.48xlarge", environ) == 64  # as the toolkit has it
    assert resources.count_neuron_cores("", driver("neuron-ls", "echo garbage")) == 0
    assert "cannot read the output of neuron-ls" in logged()


def test_usable_cores_follow_the_affinity_mask():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert resources.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {  # the tightest on the way up counts
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
            },
            1,
        ),
        (
            {  # version 1, in a container: the path is the host's
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ({"proc/self/cgroup": "garbage\n"}, None),
        ({}, None),
    ],
)
def test_the_cgroups_quota(tmp_path, files, cpus):
    write(tmp_path / "root", files)
    assert resources.cgroup_cpus(str(tmp_path / "root")) == cpus


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


OOM = "out of memory: {} recorded an OOM kill (oom_kill)"
CGROUP, MACHINE = OOM.format("the memory cgroup"), OOM.format("the machine")


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        (  # version 2, in a container: the root is its own group
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom 3\noom_kill 1\n"},
            {CGROUP: 1},
        ),
        (  # and nested: what is above, and the machine, count the kills of others, too
            {
                "proc/self/cgroup": "0::/system.slice/job\n",
                "sys/fs/cgroup/system.slice/memory.events": "oom_kill 70\n",
                "sys/fs/cgroup/system.slice/job/memory.events": "oom_kill 2\noom_group_kill 1\n",
                "proc/vmstat": "nr_free_pages 5\noom_kill 90\n",
            },
            {CGROUP: 2},
        ),
        (  # version 1, in a container: the path is the host's; `docker` is what it runs itself
            {
                "proc/self/cgroup": "4:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 3\n",
                "sys/fs/cgroup/memory/docker/memory.oom_control": "oom_kill 70\n",
            },
            {CGROUP: 3},
        ),
        (  # and in a group of the container's own
            {
                "proc/self/cgroup": "4:memory:/docker/x/job\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 70\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill 4\n",
            },
            {CGROUP: 4},
        ),
        ({"proc/self/cgroup": "garbage\n", "proc/vmstat": "oom_kill 6\n"}, {MACHINE: 6}),
        ({}, {}),
    ],
)
def test_out_of_memory_kills_are_those_of_the_own_group(tmp_path, files, kills):
    write(tmp_path / "root", files)
    assert cgroups.oom_kills(str(tmp_path / "root")) == kills


def test_the_limits_of_processes_are_those_of_all_groups(tmp_path):
    files = {"max 3": "pids", "max 0": "pids/docker/x"}
    groups = {f"sys/fs/cgroup/{path}/pids.events": f"{text}\n" for text, path in files.items()}
    limits = {f"sys/fs/cgroup/{path}/pids.max": "512\n" for path in files.values()}
    write(tmp_path / "root", {"proc/self/cgroup": "8:pids:/docker/x\n", **groups, **limits})
    says = "out of processes and threads: /sys/fs/cgroup/{}/pids.max allows 512"
    counts = {says.format("pids"): 3, says.format("pids/docker/x"): 0}
    assert cgroups.refused_processes(str(tmp_path / "root")) == counts


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
