"""Jobs of real containers: one per host, named algo-1 ... on a network of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import docker
import pytest
from conftest import OPTIONS, REPO, WITH_LOG_DIR, make_one_file, poll, write_config

from cluster.engine import LABEL

# It does not count the time of fixtures, in which the first tests wait until images are built.
LIMIT = pytest.mark.timeout(600, func_only=True)
CONTAINERS = [pytest.mark.containers, pytest.mark.torch, LIMIT]
# Seconds that bounds have on top where other tests run beside these, as in `make test-containers`:
# they are held where none do, as in `make matrix`.
SLACK = 60 if "PYTEST_XDIST_WORKER" in os.environ else 0
# How a container comes to run a script.
TRAIN = "train"  # SageMaker's way: the toolkit's `train`, with the script in a source_dir
ALONE = "the launcher alone"  # arguments for the launcher, with the script in /opt/ml/code
AWS = "train as in AWS's image"  # in conftest's aws_image, with the launcher in the source_dir
CHANNEL = "train below the init of a channel's file"  # one file, and no launcher in the image
INIT_OF_A_CHANNEL = ["python3", "/opt/ml/input/data/launcher/launcher.py", "init"]
FOUND = """
import psutil
def found(word):
    others = (one for one in psutil.process_iter(["cmdline"]) if one != psutil.Process())
    # Some end meanwhile: of a zombie psutil knows no arguments.
    return [one for one in others if any(w.endswith(word) for w in one.info["cmdline"] or ())]
"""
AWS_START = ["bash", "-m", "start_with_right_hostname.sh"]  # what AWS's image starts with


class Host:
    """One container with a folder of its own as /opt/ml. Change it before start()."""

    def __init__(self, name: str, folder: Path, client: docker.DockerClient, network):
        self.name = name
        self.opt_ml = folder / "ml"
        for part in ("output", "model"):
            (self.opt_ml / part).mkdir(parents=True)
        # A folder that can be looked into: for what has changed in an image's own, the engine
        # compares all of the image.
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self.command: list[str] = ["train"]
        self.environment = {"TRAINING_JOB_NAME": "test-job", "AWS_DEFAULT_REGION": "us-east-1"}
        self.environment["OMP_WAIT_POLICY"] = "passive"  # see tests/conftest.py
        self.environment |= OPTIONS
        if WITH_LOG_DIR:
            self.environment["LAUNCHER_LOG_DIR"] = "/opt/ml/logs"
        self.hyperparameters: dict[str, object] = {}
        self.channels: dict[str, Path] = {}  # folders that the job's data are copied from
        self.resource_config: dict[str, object] = {}
        self.options: dict[str, object] = {}  # of docker run
        self.stop_sent = 0.0  # time.time() in seconds
        self._client = client
        self._network = network
        self._container = None

    def write(self, path: str, text: str) -> None:
        """Write a file under /opt/ml."""
        (self.opt_ml / path).parent.mkdir(parents=True, exist_ok=True)
        (self.opt_ml / path).write_text(text)

    def will_first(self, script: str) -> None:
        """Have the container run some shell script before its launcher."""
        script += '\nexec sm-launch init "$@"'
        self.options["entrypoint"] = ["sh", "-c", script, "sh"]

    def write_config(self) -> None:
        """Write the files that SageMaker writes; the SDK has encoded hyperparameters as JSON."""
        for name, folder in self.channels.items():
            shutil.copytree(folder, self.opt_ml / "input" / "data" / name)
        encoded = {name: json.dumps(value) for name, value in self.hyperparameters.items()}
        channels = {name: {"TrainingInputMode": "File"} for name in self.channels}
        write_config(self.opt_ml, encoded, self.resource_config, channels)

    def start(self, image: str) -> None:
        endpoint = self._client.api.create_endpoint_config(aliases=[self.name])
        self._container = self._client.containers.create(
            image,
            self.command,
            name=f"{self._network.name}-{self.name}",
            environment=self.environment,
            volumes=[f"{self.opt_ml}:/opt/ml", f"{self.tmp}:/tmp"],
            network=self._network.name,
            networking_config={self._network.name: endpoint},
            labels={LABEL: str(os.getpid())},
            **self.options,
        )
        self._container.start()

    def wait_for(self, line: str, count: int = 1, timeout: float = 150) -> None:
        """Wait until the log holds line count times."""

        def there() -> bool:
            running = self.running()
            found = self.log().count(line) >= count
            assert found or running, f"{self.name} ended, and has not said {line!r}"
            return found

        poll(there, timeout, every=0.2)

    def wait(self, timeout: float = 120) -> int:
        """Wait until the container has ended; return its exit code."""
        return self._container.wait(timeout=timeout)["StatusCode"]

    def stop(self, limit: int = 120) -> None:
        """Stop as SageMaker does: SIGTERM to PID 1, SIGKILL after limit seconds."""
        self.stop_sent = time.time()
        self._container.stop(timeout=limit)

    def kill(self) -> None:
        """Lose the host without a word."""
        self._container.kill("SIGKILL")

    def send(self, number: int, to: str = "") -> None:
        """Send a signal to PID 1, or to processes with an argument that ends so."""
        if not to:
            self._container.kill(number)
            return
        self.run("python3", "-c", f"{FOUND}\n[one.send_signal({number}) for one in found({to!r})]")

    def cut_off(self) -> None:
        """Cut the host off its network, without a word; it runs on."""
        self._network.disconnect(self._container, force=True)

    def running(self) -> bool:
        self._container.reload()
        return self._container.status in ("created", "running")

    def log(self, *, stderr: bool = True) -> str:
        return self._container.logs(stderr=stderr).decode(errors="replace")

    def printed(self, mark: str) -> list[dict]:
        """Return the JSON objects that ranks printed, each on a line behind a mark."""
        lines = [line.partition(mark + " ") for line in self.log(stderr=False).splitlines()]
        return [json.loads(rest) for before, found, rest in lines if found and not before]

    def processes(self) -> list[dict[str, str]]:
        """Return pid, stat and args of every process in the container."""
        top = self._container.top(ps_args="-eww -o pid,stat,args")
        return [dict(zip(("pid", "stat", "args"), row)) for row in top["Processes"]]

    def run(self, *command: str) -> str:
        """Run a command in the container; return its output."""
        code, output = self._container.exec_run(list(command))
        assert code == 0, output
        return output.decode()

    @property
    def failure(self) -> str | None:
        path = self.opt_ml / "output" / "failure"
        return path.read_text() if path.exists() else None

    @property
    def ended_at(self) -> float:
        """When the container ended, as time.time() gives it."""
        assert not self.running(), f"{self.name} runs"
        text = self._container.attrs["State"]["FinishedAt"]  # nanoseconds; Python reads six digits
        return datetime.fromisoformat(text[:26].rstrip("Z") + "+00:00").timestamp()

    def remove(self) -> None:
        if self._container:
            self._container.remove(force=True, v=True)


class Job(dict[str, Host]):
    """The hosts of one job, by their names; start() starts those that have not been."""

    def __init__(self, client: docker.DockerClient, image: str, folder: Path):
        super().__init__()
        self.image = image
        self.folder = folder
        self._client = client
        self._started: set[str] = set()
        self._network = client.networks.create(
            f"sm-launch-test-{os.getpid()}-{time.time_ns():x}",
            driver="bridge",
            labels={LABEL: str(os.getpid())},
        )

    def add(self, *names: str) -> None:
        """Add hosts, in the order in which resourceconfig lists them."""
        for name in names:
            host = Host(name, self.folder / name, self._client, self._network)
            host.resource_config = {
                "current_host": name,
                "hosts": list(names),
                "network_interface_name": "eth0",
                "current_instance_type": "ml.c5.xlarge",
            }
            self[name] = host

    def will_run(self, script: str, how: str, **hyperparameters: object) -> None:
        """Give all hosts a script, and hyperparameters."""
        for host in self.values():
            host.hyperparameters = {key.replace("_", "-"): v for key, v in hyperparameters.items()}
            if how == ALONE:
                host.command = ["--train-script", "script.py"]
                host.write("code/script.py", script)
                continue
            host.write("source/script.py", script)
            host.hyperparameters["train-script"] = "script.py"
            host.hyperparameters["sagemaker_submit_directory"] = "/opt/ml/source"
            if how == AWS:
                shutil.copytree(REPO / "launcher", host.opt_ml / "source" / "launcher")
                host.hyperparameters["sagemaker_program"] = "launcher/__main__.py"
            elif how == CHANNEL:
                out = make_one_file(host.opt_ml / "source" / "launcher.py")
                host.hyperparameters["sagemaker_program"] = "launcher.py"
                host.channels["launcher"] = host.opt_ml.parent / "launcher"
                host.channels["launcher"].mkdir()
                shutil.copy(out, host.channels["launcher"])
                host.options["entrypoint"] = INIT_OF_A_CHANNEL
                host.command = [*AWS_START, "train"]

    def start(self, *names: str) -> None:
        """Start the hosts named, or all; those that run already are left alone."""
        for name in names or self:
            if name not in self._started:
                self._started.add(name)
                self[name].write_config()
                self[name].start(self.image)

    def stop(self, limit: int = 120) -> None:
        """Stop all hosts at once; return when all have ended."""
        started = [self[name] for name in self._started]
        with ThreadPoolExecutor(len(started)) as pool:
            list(pool.map(lambda host: host.stop(limit), started))

    def wait(self, timeout: float = 120) -> dict[str, int]:
        """Wait until all that were started have ended, for so long each; return their codes."""
        started = [name for name in self if name in self._started]
        return {name: self[name].wait(timeout) for name in started}

    def logs(self) -> str:
        return "".join(f"--- {name}\n{self[name].log()}" for name in sorted(self._started))

    def report(self) -> str:
        """Return what all hosts have said, and the processes of those that run on."""
        report = self.logs()
        with contextlib.suppress(docker.errors.APIError):  # one has ended meanwhile
            for host in (self[name] for name in self._started if self[name].running()):
                report += f"--- {host.name} runs {host.processes()}\n"
        return report

    def remove(self) -> None:
        with contextlib.ExitStack() as stack:  # does the rest where one fails
            stack.callback(poll, self._remove_network, every=0.5)
            for host in self.values():
                stack.callback(host.remove)

    def _remove_network(self) -> bool:
        """The engine may take a moment more than the removal of a host to take it off."""
        try:
            self._network.remove()
        except docker.errors.NotFound:
            return True
        except docker.errors.APIError as error:
            assert "has active endpoints" in str(error), error
            self._network.reload()
            for container in self._network.attrs["Containers"]:
                with contextlib.suppress(docker.errors.APIError):  # off it by now
                    self._network.disconnect(container, force=True)
            return False
        return True
