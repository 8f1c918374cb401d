"""SMDDP's PyTorch API and backend: the launcher's own implementation, and AWS's where it is."""

import os
import sys
from pathlib import Path

import pytest
from conftest import SYSTEMS, completed

from launcher.job import smddp

CALLS = Path(__file__).with_name("smddp_calls.py")
OWN = "smdistributed.dataparallel: AWS's is not installed; using the launcher's own, an open"
API = (
    "before_init lifecycle all_reduce averages reduce_op broadcast all_gather all_to_all_single "
    "shapes barrier groups data_parallel"
)


@pytest.mark.torch
@pytest.mark.parametrize("names", [API, "backend", "mixed_backend"])
def test_every_documented_call_on_four_ranks(ranks, names):
    done = ranks.run(CALLS, *names.split(), count=4)
    assert done.codes == [0] * 4, done.err
    if names == API:  # FSDP, in "backend", warns of what it calls itself
        assert "Warning" not in done.err


@pytest.mark.torch
def test_a_process_that_no_launcher_started_is_no_distributed_job(ranks, script):
    path = script(f"""
import sys
sys.path.append({smddp.OURS!r})
import smdistributed.dataparallel.torch.distributed as dist
assert dist.is_available() is False and dist.is_initialized() is False
""")
    assert ranks.run(path).codes == [0]


@pytest.mark.torch
@pytest.mark.systems
def test_the_example_trains_on_two_hosts(start_two):
    job = ("--launcher-nproc-per-node", "2", "--train-script", SYSTEMS / "smddp_mnist.py")
    hosts = start_two(*job, LAUNCHER_SMDDP_COMPAT="true", SM_MODEL_DIR=os.getcwd())
    for host in hosts:
        host.ends(0)
        assert host.err.count(OWN) == 1
    assert "accuracy=0.9" in hosts[0].out
    assert hosts[1].out == ""  # rank 0 speaks


# What the launcher finds, and what Python then imports.


def library(folder: Path, *packages: str) -> None:
    """Make a library that says where it is, with __init__.py in the packages named."""
    torch = folder / "smdistributed" / "dataparallel" / "torch"
    torch.mkdir(parents=True)
    for package in (*packages, "smdistributed/dataparallel/torch"):
        (folder / package / "__init__.py").write_text("")


@pytest.fixture
def site_packages(tmp_path, monkeypatch) -> Path:
    """Return a folder that comes last in sys.path, as site-packages does, in every Python."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    code = f"import sys; sys.path.append({str(folder)!r})"
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"), prepend=os.pathsep)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


def imported(name="smdistributed.dataparallel.torch", **environment: str) -> str:
    """Return the file that a Python finds for a module, without importing it."""
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}).origin)"
    return completed(sys.executable, "-c", code, **environment).stdout.strip()


LAYOUTS = {
    "regular packages": ("smdistributed", "smdistributed/dataparallel"),
    "smdistributed is a namespace": ("smdistributed/dataparallel",),
    "both are namespaces": (),
}


@pytest.mark.parametrize("packages", LAYOUTS.values(), ids=LAYOUTS)
def test_an_installed_library_is_used(site_packages, packages):
    library(site_packages, *packages)
    name, variables, line = smddp.chosen(os.environ)
    assert (name, variables) == ("installed", {})
    assert line.startswith("smdistributed.dataparallel: using the installed one, ")
    assert str(site_packages) in line
    assert imported().startswith(str(site_packages))


@pytest.mark.parametrize("name", ["regular packages", "smdistributed is a namespace"])
def test_ours_hides_no_library_that_comes_later(site_packages, name):
    """Another Python of the job may have one, and the script may install one."""
    _, variables, _ = smddp.chosen(os.environ)
    assert imported(**variables).startswith(smddp.OURS)
    library(site_packages, *LAYOUTS[name])
    assert imported(**variables).startswith(str(site_packages))


def test_ours_is_added_to_the_end_of_pythonpath(site_packages):
    name, variables, line = smddp.chosen(os.environ)
    assert name == "the launcher's own"
    assert variables == {"PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + smddp.OURS}
    assert line.startswith(OWN) and "API 1.0.0" in line
    assert smddp.chosen({"PYTHONPATH": ""})[1] == {"PYTHONPATH": smddp.OURS}


def test_an_image_with_modelparallel_alone(site_packages):
    (site_packages / "smdistributed" / "modelparallel").mkdir(parents=True)
    (site_packages / "smdistributed" / "modelparallel" / "__init__.py").write_text("")
    _, variables, _ = smddp.chosen(os.environ)
    assert imported(**variables).startswith(smddp.OURS)
    assert imported("smdistributed.modelparallel", **variables).startswith(str(site_packages))
