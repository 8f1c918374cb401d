"""The program as people start it, up to the point where something would be started."""

import json
import os
import subprocess
import sys

import pytest
from conftest import LAUNCHER, REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import cli
from launcher.errors import LaunchError

TWO = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
DRY = ["--train-script", "script.py", "--launcher-dry-run"]


@pytest.fixture(autouse=True)
def a_script_and_a_torch(script, pretend_torch):
    script("raise SystemExit('this script must not be started')")
    pretend_torch("2.13.0")


def launch(*args, command=LAUNCHER, **environ):
    return subprocess.run(
        [*command, *args],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize(
    "command",
    [LAUNCHER, [sys.executable, str(REPO / "launcher" / "__main__.py")], ["sm-launch"]],
    ids=["python -m launcher", "python launcher/__main__.py", "sm-launch"],
)
def test_one_program_under_three_names(command, monkeypatch):
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    done = launch("--help", command=command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: sm-launch")
    done = launch(*DRY, "--epochs", "3", command=command, **TWO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("env ") and " OMP_NUM_THREADS=" in done.stdout
    assert " script script.py --epochs 3\n" in done.stdout


@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH"])
def test_a_users_own_launcher_or_train_never_takes_our_place(script, tmp_path, where, monkeypatch):
    for name in ("launcher.py", "train.py", "cli.py", "plan.py", "errors.py"):
        script("raise SystemExit('shadowed')", name)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    path = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    done = launch(*DRY, command=["sm-launch"], **(path if where == "PYTHONPATH" else {}))
    assert done.returncode == 0, done.stderr


WRONG = [
    # environment, arguments, what the one line says
    ({"SM_HOSTS": "x"}, DRY, "SM_HOSTS is 'x', which is not JSON"),
    ({**TWO, "SM_CURRENT_HOST": "algo-3"}, DRY, "SM_CURRENT_HOST is 'algo-3'"),
    ({**TWO, "SM_NUM_GPUS": "-1"}, DRY, "SM_NUM_GPUS is '-1'"),
    ({}, [], "there is nothing to run"),
    ({}, ["--train-script", "none.py"], "none.py: there is neither"),
    ({}, ["--train-script", "a\nb\x1b.py"], "--train-script a\\nb\\x1b.py: there is"),
    ({}, ["--train-script", "."], "is a folder; expected a Python file"),
    ({}, ["--train-script", "script.py", "--train-module", "m"], "are both given"),
    ({}, ["--train-module", "no_such_module.x"], "there is no 'no_such_module'"),
    ({}, [*DRY, "--launcher-zzz", "1"], "--launcher-zzz is no option"),
    ({}, [*DRY, "--launcher-grace", "x"], "--launcher-grace is 'x'; expected a whole number"),
    ({"LAUNCHER_RDZV_PORT": "70000"}, DRY, "LAUNCHER_RDZV_PORT is '70000'"),
    ({}, [*DRY, "--launcher-peer-port", "29400"], "are both 29400"),
    ({"LOCAL_RANK": "0"}, DRY, "remove distribution= from the estimator"),
    ({"TORCHELASTIC_RUN_ID": "x"}, DRY, "remove distribution= from the estimator"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, DRY, "remove distribution= from the estimator"),
    ({"SAGEMAKER_BASE_DIR": "/nowhere"}, DRY, "/nowhere/input/config is not there"),
    ({"PET_MODULE": "1"}, DRY, "PET_MODULE is '1'"),
]


@pytest.mark.parametrize(("environ", "args", "says"), WRONG, ids=[row[2] for row in WRONG])
def test_a_wrong_configuration_is_one_line_and_exit_2(environ, args, says, tmp_path):
    done = launch(*args, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("launcher: ") and says in done.stderr
    assert done.stderr.count("\n") == 1
    if "SAGEMAKER_BASE_DIR" not in environ:
        assert (tmp_path / "output" / "failure").read_text() == done.stderr


def test_torch_that_is_not_there_is_exit_127(tmp_path):
    # Python as it comes, without the site-packages of this test's environment.
    bare = [sys.executable, "-S", str(REPO / "launcher" / "__main__.py")]
    done = launch(*DRY, command=bare, PYTHONPATH="")
    assert done.returncode == 127
    assert "there is no torch for " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_host_outside_the_chosen_groups_says_so_and_succeeds():
    groups = json.dumps({"a": {"hosts": ["algo-1"]}, "b": {"hosts": ["algo-2"]}})
    environ = {**TWO, "SM_INSTANCE_GROUPS_DICT": groups, "LAUNCHER_INSTANCE_GROUPS": "b"}
    done = launch("--train-script", "script.py", **environ)
    assert done.returncode == 0
    assert (
        done.stderr == "launcher: algo-1 is in none of the instance groups b; nothing to do here.\n"
    )


def test_no_cluster_at_all_is_said_in_one_line():
    done = launch(*DRY)
    assert done.returncode == 0
    assert done.stderr == (
        "launcher: neither SM_HOSTS nor config files are there: this host is alone.\n"
    )


def test_a_misspelt_twin_is_said():
    assert "warning: LAUNCHER_GARCE is no option" in launch(*DRY, LAUNCHER_GARCE="1").stderr


@pytest.fixture
def bare_image(tmp_path):
    """Write the config files of an image without the toolkit."""
    folder = tmp_path / "ml" / "input" / "config"
    folder.mkdir(parents=True)
    hyperparameters = {
        "train-script": '"script.py"',
        "epochs": "3",
        "text": '"it\'s $HOME"',
        "launcher-dry-run": "true",
        "sagemaker_program": '"x"',
    }
    resources = {"current_host": "algo-1", "hosts": ["algo-2", "algo-1"]}
    (folder / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    (folder / "resourceconfig.json").write_text(json.dumps(resources))
    (folder / "inputdataconfig.json").write_text('{"train": {}}')
    return {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}


@pytest.mark.parametrize("args", [[], ["train"]], ids=["no arguments", "SageMaker's word"])
def test_a_bare_image_runs_from_the_config_files(bare_image, args):
    done = launch(*args, **bare_image, SM_MODEL_DIR="/mine")
    assert done.returncode == 0, done.stderr
    assert "--rdzv-endpoint algo-1:29400" in done.stdout
    assert "script script.py --epochs 3 --text 'it'\"'\"'s $$HOME'\n" in done.stdout
    assert "SM_HP_EPOCHS=3" in done.stdout
    assert f"SM_CHANNEL_TRAIN={bare_image['SAGEMAKER_BASE_DIR']}/input/data/train" in done.stdout
    assert "SM_MODEL_DIR=" not in done.stdout  # present already, so untouched


def test_in_a_bare_image_the_command_line_comes_last_and_wins(bare_image, script):
    script("", "other.py")
    done = launch("--train-script", "other.py", "--epochs", "9", **bare_image)
    assert "script other.py --epochs 3 --text" in done.stdout
    assert done.stdout.endswith("--epochs 9\n")


def test_a_script_in_sagemakers_folder_for_code(bare_image, tmp_path, script):
    (tmp_path / "ml" / "code").mkdir()
    script("", "ml/code/baked.py")
    done = launch("--train-script", "baked.py", **bare_image)
    assert f"script {tmp_path}/ml/code/baked.py" in done.stdout
    done = launch("--train-script", "none.py", **bare_image)
    assert f"neither {tmp_path}/none.py nor {tmp_path}/ml/code/none.py" in done.stderr


def test_config_files_with_unusable_hosts_are_named(bare_image, tmp_path):
    path = tmp_path / "ml" / "input" / "config" / "resourceconfig.json"
    path.write_text('{"current_host": "algo-1", "hosts": "algo-1"}')
    done = launch(**bare_image)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"made from {path.parent}" in done.stderr


# Random environments and argument lists: a plan or one line, never a traceback, never a hang.

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
HOSTS = st.lists(st.sampled_from(["algo-1", "algo-2", "algo-10", "a b", "", 3]), max_size=4)
VALUES = st.one_of(
    TEXT, st.sampled_from(["0", "1", "8", "-1", "auto", "true", "algo-1", "[]", "{}", "null"])
)
VARIABLES = {
    "SM_HOSTS": st.one_of(HOSTS.map(json.dumps), st.just('["algo-1", "algo-2"]'), VALUES),
    "SM_CURRENT_HOST": st.one_of(st.just("algo-1"), VALUES),
    "SM_NUM_GPUS": st.one_of(st.integers(-1, 9).map(str), VALUES),
    "SM_NUM_NEURONS": VALUES,
    "SM_NETWORK_INTERFACE_NAME": VALUES,
    "SM_INSTANCE_GROUPS_DICT": VALUES,
    "TRAINING_JOB_NAME": VALUES,
    "SAGEMAKER_JOB_NAME": VALUES,
    "CUDA_VISIBLE_DEVICES": st.one_of(st.just("0,1"), VALUES),
    "PET_NPROC_PER_NODE": VALUES,
    "PET_RDZV_CONF": VALUES,
    "PET_STANDALONE": VALUES,
    "LAUNCHER_NPROC_PER_NODE": VALUES,
    "LAUNCHER_INSTANCE_GROUPS": VALUES,
    "LAUNCHER_GRACE": VALUES,
    "LAUNCHER_TORCHRUN_ARGS": VALUES,
    "LAUNCHER_PEERS": VALUES,
}
ENVIRONS = st.fixed_dictionaries({}, optional=VARIABLES)
WORDS = st.one_of(
    TEXT,
    st.sampled_from(["--train-script", "--train-module", "script.py", "--", "--help", "json"]),
    st.sampled_from(
        ["--launcher-grace", "--launcher-peers", "--launcher-", "--launcher-rdzv-port"]
    ),
    st.sampled_from(["--launcher-bools=flag", "--launcher-torchrun-args", "'", "True", "1"]),
)
ARGUMENTS = st.one_of(
    st.lists(WORDS, max_size=8),
    st.lists(WORDS, max_size=8).map(lambda words: ["--train-script", "script.py", *words]),
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values),
    max_leaves=6,
)
NO_DEADLINE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


def a_plan_or_one_line(argv, environ):
    environ = {"PATH": "/nowhere", **environ}
    try:
        prepared = cli.prepare(argv, environ)
    except LaunchError as error:
        assert str(error) and "\n" not in str(error)
        return
    if prepared is not None:
        plan, _ = prepared
        assert all(isinstance(word, str) for word in plan.argv)
        os.fsencode(plan.command())


@settings(NO_DEADLINE, max_examples=5000)
@given(argv=ARGUMENTS, environ=ENVIRONS)
def test_random_environments_and_arguments(argv, environ):
    a_plan_or_one_line(argv, environ)


@settings(NO_DEADLINE, max_examples=500)
@given(
    hyperparameters=st.dictionaries(st.text(max_size=8), ANY_JSON, max_size=4),
    resources=st.fixed_dictionaries(
        {
            "hosts": st.one_of(HOSTS, ANY_JSON),
            "current_host": st.one_of(st.just("algo-1"), ANY_JSON),
        },
        optional={
            "instance_groups": ANY_JSON,
            "current_group_name": ANY_JSON,
            "topology": ANY_JSON,
        },
    ),
    channels=st.dictionaries(st.text(max_size=8), ANY_JSON, max_size=2),
)
def test_random_config_files(tmp_path, hyperparameters, resources, channels):
    folder = tmp_path / "ml" / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    hyperparameters.setdefault("train-script", "script.py")
    for name, value in {
        "hyperparameters": hyperparameters,
        "resourceconfig": resources,
        "inputdataconfig": channels,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    a_plan_or_one_line([], {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")})
