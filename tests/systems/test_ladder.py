"""The reference scripts, in every way that the documents start and tune such a script."""

import ast
import re
from pathlib import Path

import pytest
from conftest import REPO, TRAIN_DDP, slow

pytestmark = pytest.mark.torch

SCRIPTS = REPO / "train_scripts"
MINIMAL_DDP = SCRIPTS / "minimal_ddp.py"
TWO_RANKS = ("--launcher-nproc-per-node", "2", "--train-script")


def accuracy(folder="."):
    """Return how much of the spiral the saved model knows; half of it is chance."""
    import torch

    layers = (torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU())
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))
    model.load_state_dict(torch.load(Path(folder, "model.pt"), weights_only=True))
    points = torch.rand(2000, 2) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    return (model(points).argmax(1) == (torch.sin(angle) > 0)).float().mean().item()


@pytest.mark.parametrize("count", [0, 3])  # 0: plain `python minimal_ddp.py`
def test_the_minimal_script_learns(ranks, count):
    done = ranks.run(MINIMAL_DDP, count=count)
    assert set(done.codes) == {0}, done.err
    assert len(re.findall(r"^epoch=\d loss=[\d.]+ ", done.out, re.MULTILINE)) == 5
    assert accuracy() > 0.9


@pytest.mark.systems
def test_the_minimal_script_on_two_hosts(start_two):
    hosts = start_two(*TWO_RANKS, MINIMAL_DDP, SM_MODEL_DIR="model")
    assert [host.wait() for host in hosts] == [0, 0], hosts[0].log() + hosts[1].log()
    assert hosts[0].out.count("epoch=") == 5 and hosts[1].out == ""
    assert accuracy("model") > 0.9


def test_the_minimal_script_is_minimal():
    text = MINIMAL_DDP.read_text()
    assert len(text.splitlines()) <= 60
    beside = {path.stem for path in SCRIPTS.glob("*.py")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] == "torch"
        elif isinstance(node, ast.Import):
            assert not {name.name.partition(".")[0] for name in node.names} & beside


def test_the_page_has_a_row_for_each_script_with_its_lines():
    page = (REPO / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| `(\w+\.py)` \| (\d+) \| ", page, re.MULTILINE)
    lines = {path.name: len(path.read_text().splitlines()) for path in SCRIPTS.glob("*.py")}
    assert {name: int(count) for name, count in rows} == lines


# A rank that Open MPI started: none of torchrun's variables, but Open MPI's.
UNDER_MPI = f"""
import os, runpy, sys
os.environ.pop("MASTER_ADDR")
for theirs, ours in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_RANK"),
                     ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")):
    os.environ["OMPI_COMM_WORLD_" + theirs] = os.environ.pop(ours)
sys.path.insert(0, {str(SCRIPTS)!r})
runpy.run_path({str(TRAIN_DDP)!r}, run_name="__main__")
"""


def test_ranks_meet_by_the_variables_of_open_mpi(ranks, script, monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["127.0.0.1"]')
    done = ranks.run(script(UNDER_MPI), "--epochs", "1", count=2)
    assert done.codes == [0, 0], done.err
    assert done.out.count("epoch=0 ") == 1  # of one group of two, not of two groups


FIRST_HOSTS = {
    "MASTER_ADDR": ({"MASTER_ADDR": "a", "SM_HOSTS": '["b", "c"]'}, "a"),
    "smdistributed": ({"SMDATAPARALLEL_SERVER_ADDR": "b", "SMDATAPARALLEL_SERVER_PORT": "1"}, "b"),
    "SageMaker's hosts": ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "algo-1"),
    "one host": ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "localhost"),
}
MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in MPI.items()}


@pytest.mark.parametrize("case", FIRST_HOSTS)
def test_the_first_host_under_mpirun(reference, case):
    more, first = FIRST_HOSTS[case]
    variables = reference("process_group").from_open_mpi({**MPI, **more})
    assert variables["MASTER_ADDR"] == first
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("3", "4", "1")


def test_several_hosts_of_which_none_is_known_to_be_the_first(reference):
    with pytest.raises(SystemExit, match=r"^mpirun started several hosts; .*-x MASTER_ADDR=HOST$"):
        reference("process_group").from_open_mpi(MPI)


BAD = {
    "nccl without GPUs": (["--backend", "nccl"], "nccl needs a GPU per rank: 0 GPUs, 2 ranks; "),
    "no smddp": (["--backend", "smddp"], "--backend smddp is not installed here (No module named "),
    "no xla": (["--backend", "xla"], "--backend xla is not installed here (No module named 'torch"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_backend_that_is_not_there_is_said_once(ranks, case):
    arguments, says = BAD[case]
    done = ranks.run(TRAIN_DDP, *arguments, count=2)
    assert done.codes == [1, 1]
    assert done.err.startswith(says) and done.err.count("\n") == 1, done.err


@pytest.mark.systems
def test_a_backend_that_is_not_there_is_the_cause(start):
    host = start(*TWO_RANKS, TRAIN_DDP, "--backend", "nccl")
    assert host.wait() == 1, host.log()
    assert "exited: nccl needs a GPU per rank: 0 GPUs, 2 ranks; use --backend gloo" in host.failure
    assert host.err.count("\nnccl needs a GPU per rank") == 1


def test_deterministic_with_powersgd(ranks):
    done = ranks.run(TRAIN_DDP, "--deterministic", "True", "--compress", "powersgd")
    assert done.codes == [2] and "whose state no checkpoint keeps" in done.err


# torch_xla's place: what the script uses of it, over gloo.
XLA = {
    "torch_xla/__init__.py": "import torch\ndef device(): return torch.device('cpu')\n",
    "torch_xla/distributed/__init__.py": "",
    "torch_xla/distributed/xla_backend.py": """
import torch.distributed as dist
def make(store, rank, size, timeout):
    print("xla", rank, flush=True)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("xla", make, devices=["cpu"])
""",
}


def test_xla_is_imported_if_it_is_asked_for(ranks, tmp_path, monkeypatch, script):
    for name, text in XLA.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys, runpy; sys.path[:0] = [{str(tmp_path / 'packages')!r}, {str(SCRIPTS)!r}]\n"
    code += f"runpy.run_path({str(TRAIN_DDP)!r}, run_name='__main__')\n"
    for backend, seen in (("xla", 2), ("gloo", 0)):
        done = ranks.run(script(code), "--backend", backend, "--samples", "256", count=2)
        assert done.codes == [0, 0], done.err
        assert done.out.count("xla ") == seen


@pytest.mark.parametrize("how", ["powersgd", slow("fp16"), slow("bf16")])
def test_compressed_gradients_train_as_well(ranks, how):
    """Two ranks over gloo; PowerSGD compresses from its 101st of 256 steps on."""
    last = {}
    for arguments in ((), ("--compress", how)):
        done = ranks.run(TRAIN_DDP, "--epochs", "4", *arguments, count=2)
        assert done.codes == [0, 0], done.err
        last[arguments] = float(re.findall(r"loss=([\d.]+)", done.out)[-1])
        assert accuracy() > 0.9
    plain, compressed = last.values()
    assert compressed < plain * 1.3


def test_bf16_in_a_torch_that_was_built_without_cuda(reference, monkeypatch):
    import torch

    compression = reference("compression")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TypeError, match="BF16"):  # the reason for a hook of our own
        model.register_comm_hook(None, compression.default_hooks.bf16_compress_hook)
    compression.compress(model, "bf16")
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1], [1, 1]]


# Tells at the end how many steps PowerSGD has counted: its state begins anew with the process.
COUNTED = """
import sys
sys.path.insert(0, {folder!r})
import compression, train_ddp

compress = compression.powerSGD_hook.PowerSGDState
def noted(*args, **options):
    global state
    state = compress(*args, **options)
    return state
compression.powerSGD_hook.PowerSGDState = noted
train_ddp.main()
sys.stdout.write(f"counted {{state.iter}}\\n")
"""


@pytest.mark.systems
def test_powersgd_begins_anew_when_a_job_resumes(ranks, script):
    path = script(COUNTED.format(folder=str(SCRIPTS)))
    job = (path, "--compress", "powersgd", "--checkpoint-dir", "checkpoints", "--epochs")
    for epochs in ("3", "5"):
        done = ranks.run(*job, epochs, count=2)
        assert done.codes == [0, 0], done.err
        steps = {"3": 3 * 64, "5": 2 * 64}[epochs]
        assert done.out.count(f"counted {steps}\n") == 2, done.out
    assert accuracy() > 0.9
