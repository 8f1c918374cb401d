"""What all tests share: a clean environment, hosts to run, and a look for what is left."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from free_ports import free_port, ports  # noqa: F401  (for the tests)
from ranks import Ranks

from launcher.errors import STOPS
from launcher.job import resources
from launcher.text import log

REPO = Path(__file__).resolve().parent.parent
TRAIN_DDP = REPO / "train_scripts" / "train_ddp.py"
TRAIN_HYMENOPTERA = REPO / "train_scripts" / "train_hymenoptera.py"
DRAW_PICTURES = REPO / "examples" / "draw_pictures.py"
SYSTEMS = REPO / "examples" / "systems"
# `WITH_LOG_DIR=1 LAUNCHER_START=warm make matrix`: options that launchers of all hosts have, too.
WITH_LOG_DIR = os.environ.get("WITH_LOG_DIR")  # each keeps its ranks' output in files
OPTIONS = {name: value for name, value in os.environ.items() if name.startswith("LAUNCHER_")}
LAUNCHER = [sys.executable, "-m", "launcher"]
ONE_HOST = {"current_host": "algo-1", "hosts": ["algo-1"]}  # in resourceconfig.json
RANK = str(REPO / "launcher" / "run" / "rank.py")  # runs the script of one rank

# A script that runs until it is stopped, and then saves.
SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("runs", flush=True)
time.sleep(1000)
"""

with contextlib.suppress(ImportError):  # where the frameworks are, it is not
    from hypothesis import HealthCheck, settings

    # A busy machine takes its time, for the making of examples as well.
    slow_or_shared = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile(
        "tests", None, deadline=None, database=None, suppress_health_check=slow_or_shared
    )
    settings.load_profile("tests")

TORCH = (0, 0)  # major, minor: the fast tests need none
with contextlib.suppress(metadata.PackageNotFoundError):
    TORCH = tuple(map(int, metadata.version("torch").split(".")[:2]))

if os.path.isdir("/opt/ml/input/config"):
    pytest.exit("these tests need a machine without /opt/ml/input/config", 2)

# Started by nohup or by `make test &`, these tests inherit signals that are ignored, and maybe a
# blocked mask, and so would all that they start. A handler, which execve(2) puts back to the
# default, undoes that and leaves this process itself as deaf as it was meant to be. SIGPIPE and
# SIGXFSZ are ignored by Python, and given back to children by subprocess.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# What SageMaker, torchrun, MPI and the launcher itself put into an environment.
OURS = ("SM_", "SAGEMAKER_", "PET_", "LAUNCHER_", "MASTER_", "TORCHELASTIC_", "OMPI_", "NCCL_")
EXACT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRAINING_JOB_NAME", "CUDA_VISIBLE_DEVICES")
EXACT += ("LOGLEVEL", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "CURRENT_HOST")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Have one process of `make test` run what needs torch in a process that stays: one import.

    Groups, of which each is the work of one process, begin first: else they are what ends last.
    """
    for item in items:
        if {"ranks", "reference"} & set(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group("torch"))
    yield
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Drop every variable that a launcher reads, and give the test folders of its own."""
    for name in list(os.environ):
        if name.startswith(OURS) or name in EXACT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the tests are of hosts without GPUs
    # Threads of torch that wait for one another sleep, and leave the cores to other tests: where
    # these are busy, those that spin can take a hundred times as long.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    (tmp_path / "output").mkdir()
    monkeypatch.setenv("SM_OUTPUT_DIR", str(tmp_path / "output"))
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(prefix="test-") as temporary:  # short, for sockets in it
        monkeypatch.setenv("TMPDIR", temporary)
        yield


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, [] once it has ended: perhaps since it was listed."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def is_rank(process: psutil.Process) -> bool:
    """Tell whether a keeper's child is a script's process, and nothing that one has left."""
    with contextlib.suppress(psutil.Error, OSError):
        return os.getsid(process.pid) == process.pid
    return False


def has_signal(process: psutil.Process, number: int, *sets: str) -> bool:
    """Tell whether one of a process's sets of signals has this one (proc(5)), or it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as status:
        masks = [int(line.split()[1], 16) for line in status if line.startswith(sets)]
        return any(mask >> number - 1 & 1 for mask in masks)
    return True


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or is to be reaped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def poll(condition, timeout: float = 150, every: float = 0.05):
    """Wait until condition() is true and return what it returned; fail after timeout seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not so after {timeout} s: {condition}"
        time.sleep(every)


def completed(*command, code=0, timeout=240, **environ):
    """Run a command to its end, which has to be with code; return what it did."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environ},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def make_one_file(path: Path) -> Path:
    """Make the launcher in one file; return its path."""
    completed(sys.executable, REPO / "bundle" / "build.py", path)
    return path


def findings(report: str) -> dict[str, list[tuple[str, str]]]:
    """Return what a report of doctor's --json has found: by check, the level and text of each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in json.loads(report)["findings"]:
        text = f"{finding['seen']} -> {finding['to_do']}"
        found.setdefault(finding["check"], []).append((finding["level"], text))
    return found


def write_config(base: Path, hyperparameters=None, resources=ONE_HOST, channels=None) -> None:
    """Write SageMaker's files into a folder that is to be /opt/ml."""
    files = {"hyperparameters": hyperparameters, "inputdataconfig": channels}
    folder = base / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {**files, "resourceconfig": resources}.items():
        (folder / f"{name}.json").write_text(json.dumps({} if value is None else value))


def more(*values: object):
    """Make a parameter one more case of a kind that `make test` has: only `make matrix` runs it."""
    return pytest.param(*values, marks=pytest.mark.more)


def slow(*values: object):
    """Make a parameter a slow case of a kind that `make test` has: `make test-systems` runs it."""
    return pytest.param(*values, marks=pytest.mark.systems)


class Ran(NamedTuple):
    """What became of a process that a keeper might have started, and what it has told."""

    code: int
    out: str
    err: str
    told: list[dict[str, Any]]
    crash: str  # what faulthandler has written

    @property
    def end(self) -> tuple[int, str, str]:
        return self.code, self.out, self.err


def run_as_rank(argv: list[str], env: Mapping[str, str] | None = None) -> Ran:
    """Run rank.py as a keeper does, to its end; nobody requests anything of it."""
    ours, its = socket.socketpair()
    told: list[dict[str, Any]] = []
    crash: list[str] = []  # the lines of faulthandler

    def listen() -> None:
        with ours, ours.makefile("rb") as lines:
            for line in lines:
                if line.startswith(b"{"):
                    told.append(json.loads(line))
                else:
                    crash.append(line.decode())

    listens = threading.Thread(target=listen)
    listens.start()
    with its:
        ran = subprocess.run(
            argv,
            env={**(os.environ if env is None else env), "LAUNCHER_KEEPER": str(its.fileno())},
            pass_fds=(its.fileno(),),
            capture_output=True,
            text=True,
            timeout=150,
        )
    listens.join()
    return Ran(ran.returncode, ran.stdout, ran.stderr, told, "".join(crash))


class Host:
    """One real launcher process, its output in files, its failure file if any."""

    def __init__(self, name: str, folder: Path, argv: list[str], environment: dict[str, str]):
        self.name = name
        self.folder = folder
        (folder / "output").mkdir(parents=True)
        # A short name, which a socket can have in it; what a killed job leaves there goes in end().
        self.tmp = tempfile.mkdtemp(prefix="host-")
        self.environment = {
            **os.environ,
            "SM_OUTPUT_DIR": str(folder / "output"),
            "TMPDIR": self.tmp,
            "HOST_UNDER_TEST": str(folder),  # finds the processes of the job, wherever they went
            **({"LAUNCHER_LOG_DIR": str(folder / "logs")} if WITH_LOG_DIR else {}),
            **environment,
        }
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            self.process = subprocess.Popen(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # with a process group of its own, as in a terminal
            )

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def failure(self) -> str | None:
        path = self.folder / "output" / "failure"
        return path.read_text() if path.exists() else None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def torchrun(self) -> psutil.Process:
        """The job's torchrun, or what runs it. Raises StopIteration while it does not run."""
        words = "torch.distributed.run"
        return next(one for one in self.children if any(words == word for word in words_of(one)))

    @property
    def stubs(self) -> list[psutil.Process]:
        """torchrun's children, in the order of their ranks; none while one is being started."""
        with contextlib.suppress(StopIteration, KeyError, psutil.Error):
            children = self.torchrun.children()
            return sorted(children, key=lambda one: int(one.environ()["RANK"]))
        return []

    @property
    def keepers(self) -> list[psutil.Process]:
        """The ranks' keepers, in their order; those of a warm start in any."""
        cold = [one for stub in self.stubs for one in stub.children()]
        forks = psutil.Process(self.process.pid).children(recursive=True)
        forks = [one for one in forks if any("/warm/warm.py" in word for word in words_of(one))]
        return cold + [one for one in forks if has_signal(one, signal.SIGTERM, "SigBlk")]

    @property
    def ranks(self) -> list[psutil.Process]:
        """The scripts' processes, in the order of their ranks."""
        return [one for keeper in self.keepers for one in keeper.children() if is_rank(one)]

    @property
    def children(self) -> list[psutil.Process]:
        """The launcher's own."""
        return psutil.Process(self.process.pid).children()

    def wait_for(self, line: str, count: int = 1, timeout: float = 150) -> None:
        """Wait until the output holds line count times."""

        def there() -> bool:
            assert self.process.poll() is None or self.out.count(line) >= count, self.log()
            return self.out.count(line) >= count

        poll(there, timeout)

    def wait(self, timeout: float = 240) -> int:
        """Wait for the end; return the exit code as a shell has it."""
        code = self.process.wait(timeout)
        return code if code >= 0 else 128 - code

    def ends(self, code: int) -> None:
        """See that it ends with a code, and leaves nothing; a reason only if that is a failure."""
        assert self.wait() == code, self.log()
        assert self.leftovers() == [], self.log()
        is_failure = code != 0 and code not in map(ended_by, STOPS)
        assert is_failure or self.failure is None, self.log()

    def log(self) -> str:
        return f"--- {self.name} stdout\n{self.out}\n--- {self.name} stderr\n{self.err}"

    def processes(self) -> list[psutil.Process]:
        """Return every process that has this host's environment, orphans too."""
        environs = {one: one.info["environ"] or {} for one in psutil.process_iter(["environ"])}
        folder = str(self.folder)
        return [one for one, own in environs.items() if own.get("HOST_UNDER_TEST") == folder]

    def leftovers(self) -> list[str]:
        """Return what the job left behind: processes and temporary files."""
        files = os.listdir(self.tmp)
        # torch's own cache, made by its optimizers in the ranks and kept between runs
        files = [file for file in files if "torchinductor" not in file]
        killed = signal.SIGKILL, "SigPnd", "ShdPnd"  # they need no more than a core to die on
        return [str(one) for one in self.processes() if not has_signal(one, *killed)] + files

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(60)
        shutil.rmtree(self.tmp)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    """Start launchers: start("--train-script", ..., host="127.0.0.1", SM_HOSTS=...) -> Host."""
    hosts: list[Host] = []

    def start(*args: object, host: str = "host", command=LAUNCHER, **environment: str) -> Host:
        argv = [*command, *map(str, args)]
        folder = tmp_path / f"{len(hosts)}-{host}"
        hosts.append(Host(host, folder, argv, environment))
        return hosts[-1]

    yield start
    for host in hosts:
        host.end()
        print(host.log())  # which pytest shows of a failed test: another host may have the cause


@pytest.fixture
def start_two(start) -> Iterator:
    """Start launchers as the hosts of one job: the first two of TWO_HOSTS, or `count`."""

    def start_two(*args: object, count: int = 2, **environment: str) -> list[Host]:
        common = {**of_two_hosts(count), **environment}
        names = TWO_HOSTS[:count]
        return [start(*args, host=name, SM_CURRENT_HOST=name, **common) for name in names]

    return start_two


TWO_HOSTS = ("127.0.0.1", "127.0.0.2")


def of_two_hosts(count: int = 2) -> dict[str, str]:
    """Return the variables that launchers have in common that are hosts of one job."""
    hosts = {"SM_HOSTS": json.dumps(TWO_HOSTS[:count]), "TRAINING_JOB_NAME": "two-hosts"}
    return {**hosts, "SM_NUM_GPUS": "0", **ports()}


@pytest.fixture
def script(tmp_path: Path):
    """Write a training script: script("print(1)") -> its path."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def program(tmp_path: Path):
    """Write a program: program("nvidia-smi", "exit 9") -> variables, with it first in PATH."""

    def write(name: str, text: str) -> dict[str, str]:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        resources._printed.clear()
        return {"PATH": f"{path.parent}:{os.environ['PATH']}"}

    return write


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str]):
    """Return what the launcher's own code has logged in this process since the last call."""

    def read() -> str:
        log._WRITER.flush(60)
        return capfd.readouterr().err

    return read


STOPPING = """
import os, sys, time
import psutil
sys.path.insert(0, {folder!r})
import torch
import torch.distributed as dist
import {name} as script

count = script.Progress.count
steps = int(os.environ["STOP_AT"])

def counted(self, *args):
    global steps
    count(self, *args)
    steps -= not torch.is_inference_mode_enabled()  # which a validation is in
    if steps == 0 and dist.get_rank() == 1 and not script.stops:
        psutil.Process().parent().terminate()  # what stands for torchrun
        while not script.stops:
            time.sleep(0.01)

script.Progress.count = counted
script.main()
"""


@pytest.fixture
def stopping(script):
    """Write a reference script that is told to stop in its step STOP_AT, or never: -1."""

    def write(path: Path) -> Path:
        return script(STOPPING.format(folder=str(path.parent), name=path.stem), "stopping.py")

    return write


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Import a module of the scripts, in a process group of one: reference("checkpoints")."""
    import torch.distributed as dist

    monkeypatch.syspath_prepend(str(REPO / "train_scripts"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield importlib.import_module
    for number, handler in handlers.items():  # which a script sets as it is imported
        signal.signal(number, handler)
    importlib.import_module("checkpoints").leave_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Run scripts as ranks without a launcher, with torch imported once for all of them."""
    with Ranks() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ants_and_bees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make small pictures: 42 in train/, 18 in val/, of two classes that differ."""
    folder = tmp_path_factory.mktemp("pictures")
    options = ("--train", "42", "--val", "18", "--size", "72")
    subprocess.run([sys.executable, str(DRAW_PICTURES), str(folder), *options], check=True)
    return folder


@pytest.fixture
def pretend_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a torch that is only a version first in PYTHONPATH: plans need no more of it."""

    def pretend(version: str) -> None:
        folder = tmp_path / "site" / "torch"
        (folder / "distributed").mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise RuntimeError('the launcher imported torch')")
        (folder / "distributed" / "run.py").write_text("")
        (folder / "version.py").write_text(f"__version__ = '{version}'\n")
        monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)
        monkeypatch.syspath_prepend(str(folder.parent))

    return pretend


def ended_by(number: int) -> int:
    """Return a shell's exit code for a death by signal."""
    return 128 + signal.Signals(number)


MATRIX = pytest.StashKey[list[tuple[str, ...]]]()


@pytest.fixture
def matrix(pytestconfig) -> list[tuple[str, ...]]:
    """The lines of the fault matrix, printed at the end."""
    return pytestconfig.stash.setdefault(MATRIX, [])


def pytest_terminal_summary(terminalreporter, config) -> None:
    rows = config.stash.get(MATRIX, [])
    if not rows:
        return
    terminalreporter.section("fault matrix")
    terminalreporter.write_line("| fault | exit code | bound, s | ended after, s | says |")
    terminalreporter.write_line("|---|---|---|---|---|")
    for row in rows:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
