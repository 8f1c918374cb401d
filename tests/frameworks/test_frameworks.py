"""Frameworks that people train with: the same under the launcher as under torchrun.

`make test-frameworks` runs these, in an environment of their own; plain pytest leaves them out.
scripts/ has one small job for each. None needs a network. The facts are in docs/frameworks.md.
"""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, REPO, completed, ended_by
from pages import code

SCRIPTS = Path(__file__).resolve().parent / "scripts"
PAGE = REPO / "docs" / "frameworks.md"
pytestmark = [pytest.mark.torch]

BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--"]
# Every way in which the launcher can start ranks: options for all tests.
STARTS = {"cold": [], "warm": ["--launcher-start", "warm"]}
# Nothing is fetched or sent, and sums do not depend on who counts the cores.
ALONE = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "DO_NOT_TRACK": "1",
}

NAMES = sorted(path.stem for path in SCRIPTS.glob("with_*.py"))
# Of the others it is FOLDER alone.
ARGUMENTS = {
    "with_hydra": ["lr=0.5", "model.layers=[1,2]", "+new=a b", "hydra.run.dir=FOLDER"],
    "with_fire": ["one", "two", "--lr=1e-3", "--layers", "[1,2]", "--log=x", "--deep"],
    "with_click": ["--seed", "3", "train", "x", "--lr", "0.5", "--quiet"],
    "with_datasets": [],
}


@pytest.fixture(params=STARTS)
def ours(request):
    """Start a script as the launcher does: ours("--launcher-NAME", ...) -> a command."""

    def ours(*options):
        ranks = ("--launcher-nproc-per-node", "2")
        return [*LAUNCHER, *ranks, *STARTS[request.param], *options, "--train-script"]

    return ours


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.fixture
def run(start, tmp_path, folder):
    """Start a script with two ranks: run(ours(), "with_hydra", ...) -> Host."""

    def run(command, name, *arguments, **environ):
        environ = {**ALONE, "HF_HOME": str(tmp_path / "cache"), **environ}
        arguments = [word.replace("FOLDER", str(folder)) for word in arguments]
        return start(SCRIPTS / f"{name}.py", *arguments, command=command, **environ)

    return run


def values(host):
    """Return what the ranks have said, in no order."""
    return sorted(line for line in host.out.splitlines() if line.startswith('{"rank":'))


def said(host):
    """Return what each rank has said last."""
    return {line["rank"]: line for line in map(json.loads, values(host))}


def files(folder):
    """Return what is in a folder, without times, process ids and random words."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"\d+", "0", path) for path in paths)


# Plain torchrun's rank may be aborted at its end by a thread of torch's, on a busy machine.
ABORTED = "terminate called without an active exception"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_under_torchrun(name, run, ours, folder, tmp_path):
    results, commands = [], [TORCHRUN, TORCHRUN, TORCHRUN, ours()]
    while commands:
        folder.mkdir(exist_ok=True)
        host = run(commands.pop(0), name, *ARGUMENTS.get(name, ["FOLDER"]))
        code, result = host.wait(150), (values(host), files(folder))
        for made in ("folder", "cache"):
            shutil.rmtree(tmp_path / made, ignore_errors=True)
        if not (code and TORCHRUN in commands and ABORTED in host.err):
            assert code == 0, host.log()
            results.append(result)
            commands = commands[-1:]
    assert {json.loads(line)["rank"] for line in results[0][0]} == {0, 1}
    assert results[1] == results[0]
    assert host.processes() == [] and host.failure is None


# What docs/frameworks.md leaves out of its example.
LIGHTNING = """
import sys
import torch
import with_lightning
from with_lightning import points

class Model(with_lightning.Model):
    def validation_step(self, batch, _):
        self.log("valid", self.network(batch[0]).mean(), sync_dist=True)

class Moments(with_lightning.Callback):
    def show(self, trainer, *_):
        if trainer.is_global_zero:
            print("at step", trainer.global_step, flush=True)

    on_train_start = on_train_batch_end = on_validation_batch_end = on_train_epoch_end = show

loaders = [torch.utils.data.DataLoader(points(count), batch_size=8) for count in (320, 160)]
model = Model()
"""


@pytest.mark.timeout(1800)  # for twenty starts
def test_the_pages_example_of_lightning_saves_at_any_moment_and_goes_on(run, ours, script, folder):
    """Twenty stops of one training, which goes on from each: in epochs, validations, at their end.

    A validation of ten batches follows twenty of training.
    """
    (example,) = (text for text in code(PAGE, "python") if "import lightning" in text)
    example = example.replace('"/opt/ml/checkpoints"', repr(str(folder)))
    example = example.replace(
        'strategy="ddp",', 'strategy="ddp", accelerator="cpu", max_epochs=99,'
    )
    example = example.replace("[SaveAtStop()", "[Moments(), SaveAtStop()")
    example = example.replace("(model, data,", "(model, *loaders,")
    path = script(LIGHTNING + example)
    reached = 0
    for moment in range(1, 41, 2):
        host = run(ours(), path.with_suffix(""), PYTHONPATH=str(SCRIPTS))
        host.wait_for("at step", moment, timeout=120)
        host.signal(signal.SIGTERM)
        assert host.wait(120) == ended_by(signal.SIGTERM), host.log()
        steps = [int(step) for step in re.findall(r"at step (\d+)", host.out)]
        assert steps[0] >= reached, host.log()
        reached = steps[0]
        assert "last.ckpt" in files(folder)
        assert "saved nothing" not in host.err and "still running" not in host.err, host.log()
    assert reached > 20  # into a second epoch


CONFIG = SCRIPTS / "conf" / "accelerate.yaml"
(SHOW,) = (text for text in code(PAGE, "python") if text.startswith("# show.py"))


def test_variables_are_to_accelerate_what_its_configuration_is(run, ours, script, folder, tmp_path):
    """`accelerate launch` reads the file, the script does not: the launcher leaves both alone."""
    launch = [BIN / "accelerate", "launch", "--config_file", CONFIG, "--main_process_port", "0"]
    launch += ["--num_machines", "1", "--num_processes", "1"]
    printed = completed(*launch, script(SHOW), **ALONE).stdout
    variables = json.loads(printed.splitlines()[0])
    (tmp_path / "cache" / "accelerate").mkdir(parents=True)
    shutil.copy(CONFIG, tmp_path / "cache" / "accelerate" / "default_config.yaml")
    precisions = []
    for environ in ({}, variables):
        host = run(ours(), "with_accelerate", "FOLDER", **environ)
        assert host.wait(120) == 0, host.log()
        precisions += [line["precision"] for line in said(host).values()]
        shutil.rmtree(folder)
        folder.mkdir()
    assert precisions == ["no", "no", "bf16", "bf16"]


# What a script has to have set before a stop saves, and before a restart resumes, is in scripts/.
SAVED = {
    "with_trainer": "checkpoint-3/model.safetensors",
    "with_trainer_deepspeed": "checkpoint-3/latest",
    "with_accelerate": "model.safetensors",
    "with_accelerate_deepspeed": "pytorch_model/mp_rank_00_model_states.pt",
    "with_deepspeed": "latest",
    "with_hydra": "saved-0",
}


def arguments(name, event):
    is_hydra = name == "with_hydra"
    return ("hydra.run.dir=FOLDER", f"event={event}") if is_hydra else ("FOLDER", event)


@pytest.mark.parametrize("name", SAVED)
def test_a_stop_saves_where_that_is_set(name, run, ours, folder):
    """Loaders have workers, which a stop must not end before the rank has saved."""
    host = run(ours(), name, *arguments(name, "stop"))
    host.wait_for('"ready": true', 2, timeout=120)
    host.signal(signal.SIGTERM)
    assert host.wait(120) == ended_by(signal.SIGTERM), host.log()
    assert (folder / SAVED[name]).exists(), host.log()
    assert "killed by signal" not in host.err
    # torch kills a loader's process that does not end within 5 s; its folder for sockets stays.
    left = [name for name in host.leftovers() if not name.startswith("pymp-")]
    assert host.failure is None and left == []


@pytest.mark.parametrize("name", [*SAVED, "with_lightning"])
def test_a_stop_saves_nothing_by_itself(name, run, ours, folder):
    host = run(ours(), name, *arguments(name, "unset"))
    host.wait_for('"ready": true', 2, timeout=120)
    host.signal(signal.SIGTERM)
    assert host.wait(120) == ended_by(signal.SIGTERM), host.log()
    own = [".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "with_hydra.log"]
    assert [file for file in files(folder) if file not in own] == []
    # Folders for sockets of the loaders' processes stay, as after every death by a signal.
    assert host.failure is None and host.processes() == []


@pytest.mark.parametrize("name", [*SAVED, "with_lightning"])
def test_a_failure_is_named_and_the_restart_resumes(name, run, ours):
    host = run(ours("--launcher-max-restarts", "1"), name, *arguments(name, "fail"))
    assert host.wait(150) == 0, host.log()
    assert host.err.count("rank 1 (local rank 1) failed with ValueError: loss is nan") == 1
    assert said(host)[1]["resumed"] == 4, host.log()
    assert host.failure is None and host.processes() == []


def test_a_folder_of_hydra_by_the_time_is_another_one_after_a_restart(run, ours):
    host = run(ours("--launcher-max-restarts", "1"), "with_hydra", "event=fail")
    assert host.wait(150) == 0, host.log()
    assert said(host)[1]["resumed"] == 0, host.log()


def test_a_failure_file_names_what_click_has_caught(run, ours):
    """It prints it in its own way, and exits later: since click 8.5 only the output has it."""
    host = run(ours(), "with_click", "train", "x", "--lr", "nan")
    assert host.wait(120) == 2, host.log()
    first = host.failure.splitlines()[0]
    assert first.endswith(') ended with exit code 2; its last line: "Error: loss is nan"')
