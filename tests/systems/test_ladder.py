"""The reference scripts, minimal_ddp.py and its page; and what tunes DDP for one system."""

import ast
import re

import pytest
from conftest import REPO, SYSTEMS

pytestmark = pytest.mark.torch

SCRIPTS = REPO / "train_scripts"
MINIMAL_DDP = SCRIPTS / "minimal_ddp.py"


def accuracy():
    """Return how much of the spiral the saved model knows; half of it is chance."""
    import torch

    layers = (torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU())
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))
    model.load_state_dict(torch.load("model.pt", weights_only=True))
    points = torch.rand(2000, 2) * 4 - 2
    angle = torch.atan2(points[:, 1], points[:, 0]) + 2 * points.norm(dim=1)
    return (model(points).argmax(1) == (torch.sin(angle) > 0)).float().mean().item()


@pytest.mark.parametrize("count", [0, 3])  # 0: plain `python minimal_ddp.py`
def test_the_minimal_script_learns(ranks, count):
    done = ranks.run(MINIMAL_DDP, count=count)
    assert set(done.codes) == {0}, done.err
    assert len(re.findall(r"^epoch=\d loss=[\d.]+ ", done.out, re.MULTILINE)) == 5
    assert accuracy() > 0.9


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
    page = (REPO / "docs" / "frameworks.md").read_text()
    rows = re.findall(r"^\| `(\w+\.py)` \| (\d+) \| ", page, re.MULTILINE)
    lines = {path.name: len(path.read_text().splitlines()) for path in SCRIPTS.glob("*.py")}
    assert {name: int(count) for name, count in rows} == lines


@pytest.mark.systems
def test_the_learning_rate_grows_with_the_ranks_after_a_warm_up(ranks):
    done = ranks.run(SYSTEMS / "large_batch.py", count=2)
    assert done.codes == [0, 0], done.err
    rates = [float(rate) for rate in re.findall(r"lr=([\d.]+)", done.out)]
    assert rates == pytest.approx([0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.1, 0.1])
    assert float(re.search(r"accuracy=([\d.]+)", done.out)[1]) > 0.9


# torch_xla's place: what the script uses of it, over gloo.
XLA = {
    "torch_xla/__init__.py": """
import torch
def device(): return torch.device("cpu")
def sync(): pass
""",
    "torch_xla/distributed/__init__.py": "",
    "torch_xla/distributed/xla_backend.py": """
import torch.distributed as dist
def make(store, rank, size, timeout):
    print("xla", rank, flush=True)
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("xla", make, devices=["cpu"])
""",
}


def test_a_model_trains_by_torch_xlas_backend(ranks, tmp_path, script):
    for name, text in XLA.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys, runpy; sys.path.insert(0, {str(tmp_path / 'packages')!r})\n"
    code += f"runpy.run_path({str(SYSTEMS / 'trainium.py')!r}, run_name='__main__')\n"
    done = ranks.run(script(code), count=2)
    assert done.codes == [0, 0], done.err
    assert done.out.count("xla") == 2 and "ranks=2 y = 3.0" in done.out


@pytest.mark.systems
def test_compressed_gradients_train_as_well(ranks):
    """Two ranks over gloo; PowerSGD compresses from its 101st of 256 steps on."""
    reached = []
    for method in ("none", "powersgd"):
        done = ranks.run(SYSTEMS / "compressed_gradients.py", "--compress", method, count=2)
        assert done.codes == [0, 0], done.err
        ((found),) = re.findall(rf"^compress={method} accuracy=([\d.]+)$", done.out, re.MULTILINE)
        reached.append(float(found))
    assert min(reached) > 0.9 and reached[1] > reached[0] - 0.05


def test_bf16_in_a_torch_that_was_built_without_cuda(reference, monkeypatch):
    import torch

    monkeypatch.syspath_prepend(str(SYSTEMS))
    compression = reference("compressed_gradients")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TypeError, match="BF16"):  # the reason for a hook of our own
        model.register_comm_hook(None, compression.default_hooks.bf16_compress_hook)
    compression.compress(model, "bf16")
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1, 1], [1, 1]]
