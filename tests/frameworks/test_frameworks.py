"""Frameworks that people train with: the same under the launcher as under torchrun.

`make test-frameworks` runs these, in an environment of their own; plain pytest leaves them out.
scripts/ has one small job for each. None needs a network.
"""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, ended_by

SCRIPTS = Path(__file__).resolve().parent / "scripts"
pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--"]
OURS = [*LAUNCHER, "--launcher-nproc-per-node", "2", "--train-script"]
# Nothing is fetched or sent, and sums do not depend on who counts the cores.
ALONE = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "DO_NOT_TRACK": "1",
}

ARGUMENTS = {
    "with_lightning": ["FOLDER"],
    "with_trainer": ["FOLDER"],
    "with_accelerate": ["FOLDER"],
    "with_hydra": ["lr=0.5", "model.layers=[1,2]", "+new=a b", "hydra.run.dir=FOLDER"],
    "with_fire": ["one", "two", "--lr=1e-3", "--layers", "[1,2]", "--log=x", "--deep"],
    "with_click": ["--seed", "3", "train", "x", "--lr", "0.5", "--quiet"],
    "with_datasets": [],
    "with_wandb": ["FOLDER"],
    "with_compile": [],
}


@pytest.fixture
def run(start, tmp_path):
    """Start a script with two ranks: run(OURS, "with_hydra", ...) -> Host."""

    def run(command, name, *arguments):
        caches = {"HF_HOME": tmp_path / "cache", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "compiled"}
        environ = {**ALONE, **{name: str(path) for name, path in caches.items()}}
        arguments = [word.replace("FOLDER", str(tmp_path / "folder")) for word in arguments]
        return start(SCRIPTS / f"{name}.py", *arguments, command=command, **environ)

    return run


def values(host):
    """Return what the ranks have said, in no order."""
    return sorted(line for line in host.out.splitlines() if line.startswith('{"rank":'))


def files(folder):
    """Return what is in a folder, without times, process ids and random words."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"\d+", "0", path) for path in paths)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_same_as_under_torchrun(name, run, tmp_path):
    results = []
    for command in (TORCHRUN, OURS):
        (tmp_path / "folder").mkdir()
        host = run(command, name, *ARGUMENTS[name])
        assert host.wait(150) == 0, host.log()
        results.append((values(host), files(tmp_path / "folder")))
        for folder in ("folder", "cache", "compiled"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    said = [json.loads(line) for line in results[0][0]]
    assert {line["rank"] for line in said} == {0, 1}
    assert results[1] == results[0]
    assert host.processes() == [] and host.failure is None


SAVED = {
    "with_lightning": "stopped.ckpt",
    "with_trainer": "checkpoint-3/model.safetensors",
    "with_accelerate": "model.safetensors",
}


@pytest.mark.parametrize("name", SAVED)
def test_a_stop_saves_as_the_framework_does(name, run, tmp_path):
    """Their loaders have workers, which a stop must not end before the rank has saved."""
    (tmp_path / "folder").mkdir()
    host = run(OURS, name, "FOLDER", "--stop")
    host.wait_for('"ready": true', 2)
    host.signal(signal.SIGTERM)
    assert host.wait(120) == ended_by(signal.SIGTERM), host.log()
    assert (tmp_path / "folder" / SAVED[name]).exists(), host.log()
    assert "killed by signal" not in host.err
    assert host.failure is None and host.leftovers() == []


@pytest.mark.parametrize(
    ("name", "arguments", "exit_code", "says"),
    [
        (
            "with_hydra",
            ["fails=true", "hydra.run.dir=FOLDER"],
            1,
            "failed with ValueError: loss is nan",
        ),
        ("with_click", ["train", "x", "--lr", "nan"], 2, "exited: loss is nan"),
    ],
    ids=["hydra", "click"],
)
def test_an_exit_says_what_it_came_from(name, arguments, exit_code, says, run):
    """Both print an exception in their own way, and call sys.exit() for it."""
    host = run(OURS, name, *arguments)
    assert host.wait(120) == exit_code, host.log()
    first = host.failure.splitlines()[0]
    assert re.fullmatch(rf"localhost, rank [01] \(local rank [01]\) {says}", first)
