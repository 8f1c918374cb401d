"""How a job of two hosts ends under each launcher: the rows of docs/development/measurements.md.

    python benchmarks/launchers.py                     # all launchers that are installed, all cases
    python benchmarks/launchers.py --of torchrun ft_launcher --case raise stop

Needs root, Linux, and in this Python's environment torch and the launchers: accelerate,
nvidia-resiliency-ext, sagemaker-training with sagemaker-pytorch-training, and for SDK v3's driver
sagemaker-train, of which only files are read (`pip install --no-deps` will do).

Each host is a process id 1, as the command of a container is, with /opt/ml, /tmp, /etc/hosts and a
host name of its own. The two share a network that has nothing but a loopback interface.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
HOSTS = ("algo-1", "algo-2")
LONGEST_START = 60  # seconds
LONGEST_END = 40  # after that a host "runs on": torchrun's 30 s before SIGKILL are over by then
SCRIPT = """
import json, os, signal, sys, time
import torch, torch.distributed as dist

case, rank, folder = os.environ["CASE"], int(os.environ["RANK"]), "/opt/ml/output/"
json.dump(sys.argv[1:], open(folder + "argv", "w"))

def save(*_):
    if case == "workers":
        list(loader)
    else:
        time.sleep(5)
    open(folder + "saved", "w").close()
    sys.exit(0)

if case in ("stop", "stop one"):
    signal.signal(signal.SIGTERM, save)
if case == "workers":
    heard = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, persistent_workers=True)
    list(loader)  # from now on its workers run
dist.init_process_group("gloo")
dist.barrier()
open(folder + "ready", "w").close()
while not os.path.exists(folder + "now"):
    time.sleep(0.02)
    if case == "training":
        dist.all_reduce(torch.ones(1))
if case in ("raise", "training") and rank == 1:
    raise ValueError("loss is nan")
if case == "exit" and rank == 1:
    sys.exit(3)
if case == "restart":
    again = os.path.exists(folder + "again")
    open(folder + "again", "w").close()
    if again or rank == 1:
        sys.exit(0 if again else 3)
while case in ("raise", "exit", "stop", "stop one", "lost", "restart"):
    time.sleep(0.1)
if case == "workers":
    while not heard:
        list(loader)
    save()
if case == "hang" and rank == 1:
    time.sleep(600)
while case in ("training", "hang"):
    dist.all_reduce(torch.ones(1))
"""
ARGUMENTS = {"log": "a", "t": "b", "text": "$$", "lr": "1e-05"}
CASES = {
    "raise": "a rank of algo-2 raises, the other is in no collective",
    "training": "a rank of algo-2 raises, the other is in a collective",
    "exit": "a rank of algo-2 ends with exit code 3, the other is in no collective",
    "restart": "a rank of algo-2 fails once, and one restart is allowed",
    "lost": "algo-2 is killed",
    "hang": "a rank of algo-2 sleeps, and the other waits for it in a collective",
    "stop": "SIGTERM to both hosts, and ranks that take 5 s to save",
    "stop one": "SIGTERM to algo-2 alone, and ranks that take 5 s to save",
    "workers": "SIGTERM to both hosts, and ranks that save with the workers of a data loader",
    "absent": "algo-2 never starts",
    "differ": "the hosts have different arguments",
    "arguments": "hyperparameters named log and t, and a value $$",
    "own name": "the hosts cannot look up their own names",
}


def elastic(name, *options):
    """Return the command of a launcher with torchrun's options, on each host."""
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "algo-1:29400", "--rdzv-id", "job")
    return lambda host: [BIN / name, "--nnodes", 2, "--nproc-per-node", 1, *meet, *options, "S"]


def accelerate(host):
    rank = ("--multi_gpu", "--num_machines", 2, "--num_processes", 2, "--machine_rank")
    where = ("--main_process_ip", "algo-1", "--main_process_port", 29500)
    return [BIN / "accelerate", "launch", *rank, HOSTS.index(host), *where, "S"]


def sdk_v3(host):
    return ["bash", "/opt/ml/input/data/sm_drivers/sm_train.sh"]


LAUNCHERS = {
    "sm-launch": lambda host: [BIN / "sm-launch", "--train-script", "S"],
    "torchrun": elastic("torchrun"),
    "accelerate": accelerate,
    "ft_launcher": elastic("ft_launcher", "--ft-rank-heartbeat-timeout", 600),
    "ft_launcher min-healthy": elastic(
        "ft_launcher", "--ft-rank-heartbeat-timeout", 600, "--restart-policy", "min-healthy"
    ),
    "toolkit": lambda host: [BIN / "train"],
    "sdk v3": sdk_v3,
}


def installed(launcher: str) -> bool:
    if launcher == "sdk v3":
        return importlib.util.find_spec("sagemaker") is not None and (BIN / "torchrun").exists()
    return Path(LAUNCHERS[launcher](HOSTS[0])[0]).exists()


class Host:
    def __init__(self, launcher: str, case: str, name: str, folder: Path):
        self.name, self.ml = name, folder / name / "ml"
        self.ended: float | None = None
        self.output = self.ml / "output"
        arguments = dict(ARGUMENTS) if case == "arguments" else {}
        if case == "differ":
            arguments["lr"] = str(HOSTS.index(name))
        self.write_sagemakers_files(launcher, arguments)
        command = list(map(str, LAUNCHERS[launcher](name)))
        if (launcher, case) == ("accelerate", "restart"):
            command[2:2] = ["--max_restarts", "1"]  # where others have a variable
        if command[-1] == "S":
            command[-1] = "/opt/ml/code/script.py"
            if launcher != "sm-launch":  # which reads hyperparameters itself
                command += [word for key in arguments for word in (f"--{key}", arguments[key])]
        own_name = "nobody-knows-it" if case == "own name" else name
        setup = f"mount --bind {self.ml.parent} /opt && mount --bind {folder}/hosts /etc/hosts"
        setup += f" && mount -t tmpfs tmp /tmp && cd / && hostname {own_name}"
        setup += f" && exec {shlex.join(command)}"
        unshare = ["unshare", "--pid", "--mount-proc", "--uts", "--fork", "--kill-child"]
        environment = {
            "PATH": f"{BIN}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
            "CASE": case,
            "CUDA_VISIBLE_DEVICES": "",
            "TRAINING_JOB_NAME": "job",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
            **({} if case == "own name" else {"GLOO_SOCKET_IFNAME": "lo"}),
            "LAUNCHER_START_TIMEOUT": "10",
            "LAUNCHER_WATCH": "1",
            "LAUNCHER_HANG_NOTIFY": "5",
            "LAUNCHER_HANG_TIMEOUT": str(10 * (case == "hang")),
            "LAUNCHER_MAX_RESTARTS": str(int(case == "restart")),
            "PET_MAX_RESTARTS": str(int(case == "restart")),
            "HOME": str(folder),
        }
        with open(folder / name / "log", "wb") as log:
            self.process = subprocess.Popen(
                [*unshare, "sh", "-c", setup], env=environment, stdout=log, stderr=log
            )

    def write_sagemakers_files(self, launcher: str, arguments: dict[str, str]) -> None:
        for part in ("input/config", "input/data/code", "output/data", "model", "code"):
            (self.ml / part).mkdir(parents=True)
        values = {key: json.dumps(value) for key, value in arguments.items()}
        if launcher == "toolkit":
            values["sagemaker_program"] = '"script.py"'
            values["sagemaker_submit_directory"] = '"/opt/ml/code"'
            values["sagemaker_torch_distributed_enabled"] = "true"
            values["sagemaker_instance_type"] = '"ml.m5.xlarge"'
        group = {"instance_group_name": "all", "instance_type": "ml.m5.xlarge", "hosts": HOSTS}
        resources = {"current_host": self.name, "hosts": HOSTS, "network_interface_name": "lo"}
        resources |= {"current_instance_type": "ml.m5.xlarge", "current_group_name": "all"}
        resources["instance_groups"] = [group]
        config = {"hyperparameters": values, "resourceconfig": resources, "inputdataconfig": {}}
        for name, content in config.items():
            (self.ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
        for folder in ("code", "input/data/code"):
            (self.ml / folder / "script.py").write_text(SCRIPT)
        if launcher == "sdk v3":
            self.write_sdks_files()

    def write_sdks_files(self) -> None:
        """Have what ModelTrainer uploads: its drivers, and the script that calls them."""
        sdk = Path(importlib.util.find_spec("sagemaker").submodule_search_locations[0], "train")
        drivers = self.ml / "input" / "data" / "sm_drivers"
        shutil.copytree(sdk / "container_drivers", drivers)
        (drivers / "sourcecode.json").write_text('{"entry_script": "script.py"}')
        (drivers / "distributed.json").write_text('{"process_count_per_node": 1}')
        templates: dict[str, str] = {}
        exec((sdk / "templates.py").read_text(), templates)
        driver = templates["EXEUCTE_DISTRIBUTED_DRIVER"].format(
            driver_name="Torchrun", driver_script="torchrun_driver.py"
        )
        text = templates["TRAIN_SCRIPT_TEMPLATE"].format(
            working_dir="cd /opt/ml/input/data/code", install_requirements="", execute_driver=driver
        )
        (drivers / "sm_train.sh").write_text(text)

    def send(self, number: int) -> None:
        for first in psutil.Process(self.process.pid).children():
            first.send_signal(number)

    def has_ended(self) -> bool:
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()
        return self.ended is not None

    def says(self, since: float, case: str) -> str:
        end = (
            f"{self.process.returncode} after {self.ended - since:.1f}" if self.ended else "runs on"
        )
        said = [f"{self.name}: {end}"]
        if case in ("stop", "stop one", "workers"):
            said.append("saved" if (self.output / "saved").exists() else "not saved")
        if case in ("arguments", "differ") and (self.output / "argv").exists():
            said.append((self.output / "argv").read_text())
        failure = self.output / "failure"
        said.append(repr(failure.read_text()[:300]) if failure.exists() else "no failure file")
        return ", ".join(said)


def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def run(launcher: str, case: str, folder: Path) -> list[str]:
    (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.0.11 algo-1\n127.0.0.12 algo-2\n")
    names = HOSTS[:1] if case == "absent" else HOSTS
    hosts = [Host(launcher, case, name, folder) for name in names]
    try:

        def ready() -> bool:
            return all((host.output / "ready").exists() for host in hosts)

        until(lambda: ready() or sum(host.has_ended() for host in hosts), LONGEST_START)
        said = ["started" if ready() else "not started"]
        struck = time.monotonic()
        for host in hosts:
            (host.output / "now").touch()
            if case in ("stop", "workers") or (case == "stop one" and host.name == "algo-2"):
                host.send(signal.SIGTERM)
        left = hosts[:1] if case == "lost" else hosts
        if case == "lost":
            hosts[1].send(signal.SIGKILL)
        until(lambda: sum(host.has_ended() for host in left) == len(left), LONGEST_END)
        return said + [host.says(struck, case) for host in left]
    finally:
        for host in hosts:
            host.process.kill()  # and with it, by --kill-child, all of the host
            host.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--of", nargs="+", choices=LAUNCHERS, default=list(filter(installed, LAUNCHERS))
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", help="a folder for the hosts' logs and files")
    parser.add_argument("--in-a-network", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("needs root, for namespaces; try it with sudo")
    for launcher in arguments.of:
        if not installed(launcher):
            parser.error(f"{launcher} is not installed beside {sys.executable}")
    if not arguments.in_a_network:  # a network of this job alone
        up = 'ip link set lo up && exec "$0" "$@"'
        again = ["sh", "-c", up, sys.executable, *sys.argv, "--in-a-network"]
        os.execvp("unshare", ["unshare", "--net", "--mount", *again])
    for case in arguments.case:
        print(f"\n{CASES[case]}", flush=True)
        for launcher in arguments.of:
            with tempfile.TemporaryDirectory(prefix="launchers-") as folder:
                said = run(launcher, case, Path(folder))
                print(f"  {launcher}: {'; '.join(said)}", flush=True)
                if arguments.keep:
                    kept = Path(arguments.keep, case, launcher)
                    shutil.copytree(folder, kept, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
