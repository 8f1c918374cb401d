"""The ways to start a job that benchmarks/beside.py compares: what each runs on a host.

Hosts are loopback addresses of this machine. A way is given a job and one of its hosts, and
returns the command and the variables that it has to have.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple

REPO = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# With torch from this environment: `make bench` makes them.
ACCELERATE, NVRX = REPO / ".venv-accelerate", REPO / ".venv-nvrx"
# A whole Debian, whose Python differs: so it has a torchrun of its own to be compared with.
NEW_NVRX = REPO / ".venv-nvrx-0.7"


class Job(NamedTuple):
    """A job of a script, which all ways run with the same arguments."""

    hosts: tuple[str, ...]
    ranks: int  # on each host
    restarts: int
    script: str
    arguments: tuple[str, ...]
    folder: Path
    port: int  # and the next one are free

    def of_host(self, host: str) -> Path:
        """Return a folder of that host's own."""
        folder = self.folder / host
        folder.mkdir(exist_ok=True)
        return folder


Command = tuple[list[str], dict[str, str]]
Way = Callable[[Job, str], Command]


def elastic(*program: str | Path) -> Way:
    """Return the way of a program with torchrun's options."""

    def way(job: Job, host: str) -> Command:
        words = [
            *map(str, program),
            "--nnodes",
            str(len(job.hosts)),
            "--nproc-per-node",
            str(job.ranks),
        ]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{job.hosts[0]}:{job.port}"]
        words += ["--rdzv-id", "job", "--max-restarts", str(job.restarts)]
        return [*words, job.script, *job.arguments], store_on_the_first(job, host)

    return way


def store_on_the_first(job: Job, host: str) -> dict[str, str]:
    """Return torchrun's variable for it: by a loopback address each host takes itself for that."""
    return {"PET_RDZV_CONF": f"is_host={int(host == job.hosts[0])}"}


def sagemakers_variables(job: Job, host: str) -> dict[str, str]:
    """Return those that SageMaker's toolkit sets, as far as launchers read them."""
    return {
        "SM_HOSTS": json.dumps(job.hosts),
        "SM_CURRENT_HOST": host,
        "SM_NUM_GPUS": str(job.ranks),
        "SM_OUTPUT_DIR": str(job.of_host(host)),
        "SAGEMAKER_JOB_NAME": "job",
        "TRAINING_JOB_NAME": "job",
    }


def ours(*options: str) -> Way:
    def way(job: Job, host: str) -> Command:
        folder = str(job.of_host(host))
        given = [option.format(folder=folder) for option in options]
        words = [str(BIN / "sm-launch"), *given, "--launcher-nproc-per-node", str(job.ranks)]
        words += ["--launcher-max-restarts", str(job.restarts)]
        ports = {"LAUNCHER_RDZV_PORT": str(job.port), "LAUNCHER_PEER_PORT": str(job.port + 1)}
        variables = {**sagemakers_variables(job, host), **ports}
        return [*words, "--train-script", job.script, *job.arguments], variables

    return way


# What the notebook describes: SageMaker's variables become the arguments of a torchrun, whose exit
# code is looked at. Its number of restarts can only be set by torchrun's variable.
NOTEBOOK = """
import argparse, json, os, subprocess, sys

parser = argparse.ArgumentParser()
parser.add_argument("--train-script")
chosen, others = parser.parse_known_args()
hosts = json.loads(os.environ["SM_HOSTS"])
torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
torchrun += [f"--node_rank={hosts.index(os.environ['SM_CURRENT_HOST'])}"]
torchrun += [f"--nproc_per_node={os.environ['SM_NUM_GPUS']}", "--rdzv_backend=c10d"]
torchrun += [f"--rdzv_endpoint={hosts[0]}:{os.environ['RDZV_PORT']}"]
torchrun += [f"--rdzv_id={os.environ['SAGEMAKER_JOB_NAME']}", chosen.train_script, *others]
process = subprocess.Popen(torchrun, env=os.environ)
if process.wait() != 0:
    raise subprocess.CalledProcessError(process.returncode, torchrun)
"""


def notebook(job: Job, host: str) -> Command:
    launcher = job.of_host(host) / "launcher.py"
    launcher.write_text(NOTEBOOK)
    words = [sys.executable, str(launcher), "--train-script", job.script, *job.arguments]
    variables = {"RDZV_PORT": str(job.port), "PET_MAX_RESTARTS": str(job.restarts)}
    variables.update(store_on_the_first(job, host))
    return words, {**sagemakers_variables(job, host), **variables}


# `train` has it start one rank on a host without GPUs; here it starts as many as the others do.
TOOLKIT = """
import json, sys
from sagemaker_training.torch_distributed import TorchDistributedRunner

arguments = json.loads(sys.argv[1])
TorchDistributedRunner(**arguments).run(capture_error=True)
"""


def toolkit(job: Job, host: str) -> Command:
    base = job.of_host(host)
    script = base / "code" / Path(job.script).name
    launcher = base / "runner.py"
    for folder in ("code", "input/config"):
        (base / folder).mkdir(parents=True)
    script.write_text(Path(job.script).read_text())
    launcher.write_text(TOOLKIT)
    resources = {"current_host": host, "hosts": job.hosts, "network_interface_name": "lo"}
    files = {"resourceconfig": resources, "hyperparameters": {}, "inputdataconfig": {}}
    for name, content in files.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    arguments = {
        "user_entry_point": script.name,
        "args": job.arguments,
        "env_vars": {},
        "processes_per_host": job.ranks,
        "master_hostname": job.hosts[0],
        "hosts": job.hosts,
        "current_host": host,
        "network_interface_name": "lo",
        "instance_type": "ml.m5.xlarge",
    }
    variables = {"SAGEMAKER_BASE_DIR": str(base), "PET_MAX_RESTARTS": str(job.restarts)}
    words = [sys.executable, str(launcher), json.dumps(arguments)]
    return words, {**sagemakers_variables(job, host), **variables}


def accelerate(job: Job, host: str) -> Command:
    processes = len(job.hosts) * job.ranks
    words = [str(ACCELERATE / "bin" / "accelerate"), "launch", "--multi_gpu"]
    words += ["--num_machines", str(len(job.hosts)), "--num_processes", str(processes)]
    words += ["--machine_rank", str(job.hosts.index(host)), "--main_process_ip", job.hosts[0]]
    words += ["--main_process_port", str(job.port), "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", "--max_restarts", str(job.restarts)]
    return [*words, job.script, *job.arguments], {}


def in_a_debian(program: str) -> Way:
    start = elastic("chroot", NEW_NVRX, f"/venv/bin/{program}")

    def way(job: Job, host: str) -> Command:
        words, variables = start(job, host)
        variables["PATH"] = "/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables["NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE"] = "1"  # its word for hosts on one machine
        return words, variables

    return way


def mount_for_the_debian() -> None:
    """Give it, in this mount namespace, what jobs need of this machine."""
    for path in (Path("/proc"), Path("/dev"), Path(tempfile.gettempdir())):
        inside = NEW_NVRX / path.relative_to("/")
        inside.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--rbind", path, inside], check=True)


WAYS: dict[str, Way] = {
    "torchrun": elastic(BIN / "torchrun"),
    "notebook": notebook,
    "toolkit": toolkit,
    "accelerate": accelerate,
    "ft_launcher 0.4": elastic(NVRX / "bin" / "ft_launcher"),
    "torchrun beside 0.7": in_a_debian("torchrun"),
    "ft_launcher 0.7": in_a_debian("ft_launcher"),
    "sm-launch": ours(),
    "sm-launch warm": ours("--launcher-start", "warm"),
    "sm-launch logs": ours("--launcher-log-dir", "{folder}"),
}


def starts(way: str, ranks: int) -> bool:
    """Return whether a way starts jobs of so many ranks as torchrun does."""
    return way != "accelerate" or ranks > 1  # one is a plain process, without torchrun's variables


def missing(way: str) -> str:
    """Return why a way cannot be tried here, or ""."""
    if way == "sm-launch warm":
        said = subprocess.run([BIN / "sm-launch", "--help"], capture_output=True, text=True).stdout
        return "" if "--launcher-start " in said else "sm-launch has no --launcher-start"
    needs = {
        "toolkit": Path(sysconfig.get_path("purelib"), "sagemaker_training"),
        "accelerate": ACCELERATE / "bin" / "accelerate",
        "ft_launcher 0.4": NVRX / "bin" / "ft_launcher",
        "torchrun beside 0.7": NEW_NVRX / "venv" / "bin" / "torchrun",
        "ft_launcher 0.7": NEW_NVRX / "venv" / "bin" / "ft_launcher",
    }
    path = needs.get(way, BIN / "sm-launch")
    target = "make nvrx" if NEW_NVRX in path.parents else "make bench"
    return "" if path.exists() else f"{path} does not exist: {target} makes it"


def versions() -> list[str]:
    """Return the names and versions of the packages behind the ways, as far as they are there."""
    found = []
    for name, environment in (
        ("torch", BIN.parent),
        ("sagemaker-torch-launcher", BIN.parent),
        ("sagemaker_training", BIN.parent),
        ("accelerate", ACCELERATE),
        ("nvidia-resiliency-ext", NVRX),
        ("nvidia-resiliency-ext", NEW_NVRX / "venv"),
    ):
        for where in environment.glob("lib/python3*/site-packages"):
            for one in importlib.metadata.distributions(name=name, path=[str(where)]):
                with_python = (
                    f" (Python {where.parent.name[6:]})" if NEW_NVRX in where.parents else ""
                )
                found.append(f"{name} {one.version}{with_python}")
    return found
