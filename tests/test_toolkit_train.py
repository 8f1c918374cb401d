"""The real SageMaker toolkit: its `train` starts the launcher, on two hosts."""

import json
import os
import re
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest
from conftest import LAUNCHER, REPO, ended_by, free_port, make_one_file, poll, write_config
from pages import code

HOSTS = ("127.0.0.1", "127.0.0.2")
FOLDER = "launcher/__main__.py"  # in the source folder
DOCTOR = (REPO / "docs" / "debugging.md").read_text()
ABSENT = "absent.invalid"  # RFC 2606: it resolves nowhere
TRAIN = os.path.join(os.path.dirname(sys.executable), "train")
# As in our image: below `sm-launch init`, with our training module.
INIT = [*LAUNCHER, "init", TRAIN]
ONE_FILE = "my_launcher.py"  # what `make bundle` makes, under any name
OURS = {"SAGEMAKER_TRAINING_MODULE": "sm_launch:train"}


@pytest.fixture
def train(start, tmp_path):
    """Run `train` as one of two hosts; its source folder holds the launcher and a script."""
    port, peer_port = free_port(), free_port()

    def train(name: str, script: Path, *, hosts=HOSTS, command=(TRAIN,), environ=(), **others):
        base = tmp_path / "ml" / name
        for folder in ("output", "model", "source"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        if others.get("sagemaker_program") == ONE_FILE:
            make_one_file(base / "source" / ONE_FILE)
        else:
            shutil.copytree(REPO / "launcher", base / "source" / "launcher")
        for file in script.parent.glob("*.py"):  # a source_dir: the script and its modules
            shutil.copy(file, base / "source")
        shutil.copy(script, base / "source" / f"script{script.suffix}")
        hyperparameters = {
            "train-script": "script.py",
            "launcher-nproc-per-node": 2,
            "launcher-rdzv-port": port,
            "launcher-peer-port": peer_port,
            "sagemaker_program": FOLDER,
            "sagemaker_submit_directory": str(base / "source"),
            **others,
        }
        resources = {"current_host": name, "hosts": hosts, "network_interface_name": "lo"}
        encoded = {key: json.dumps(value) for key, value in hyperparameters.items()}
        write_config(base, encoded, resources)
        variables = {"SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "job", **dict(environ)}
        variables["AWS_DEFAULT_REGION"] = "us-east-1"  # boto3 asks for one
        return start(host=name, command=command, **variables)

    return train


def failure_of(host, tmp_path) -> str | None:
    path = tmp_path / "ml" / host.name / "output" / "failure"
    return path.read_text() if path.exists() else None


@pytest.mark.torch
def test_a_script_that_raises_gives_the_first_line(train, script, tmp_path):
    """Whether the source folder has the package or the one file."""
    fails = "import os\nif os.environ['RANK'] in '13': raise ValueError('loss is nan')\n"
    path, programs = script(fails, "x.py"), (FOLDER, ONE_FILE)
    hosts = [train(name, path, sagemaker_program=one) for name, one in zip(HOSTS, programs)]
    assert [host.wait() for host in hosts] == [1, 1], hosts[0].log() + hosts[1].log()
    (text,) = {failure_of(host, tmp_path) for host in hosts}
    heads = [f"127.0.0.{n}, rank {2 * n - 1} (local rank 1) failed with " for n in (1, 2)]
    assert text.startswith(tuple(head + "ValueError: loss is nan\nexit code 1, " for head in heads))
    assert "127.0.0.2 has node_rank 1 (nnodes=2) in job job: 2 ranks on CPU" in hosts[1].err
    assert "GLOO_SOCKET_IFNAME=lo" in hosts[1].err


DIFFERENT = {
    "PYTHONPATH": "the toolkit adds all of its own sys.path, which ranks have as they have Python",
    "SM_TRAINING_ENV": "what only the toolkit's own distributions use is left out",
    "LAUNCHER_JOB_MARK": "a mark of this one job's processes",
    "MASTER_PORT": "a free port of this one job",
    "TORCHELASTIC_ERROR_FILE": "in the folder of this one job",
    "TMPDIR": "the test's own, as the next one",
    "HOST_UNDER_TEST": "",
}
SURROUNDINGS = """
import json, os, sys
import beside
if os.environ["RANK"] == "0":
    seen = [dict(os.environ), os.getcwd(), sys.argv[1:], sys.path[0]]
    with open(os.path.join(os.environ["SM_MODEL_DIR"], "seen.json"), "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.torch
def test_what_surrounds_a_rank_is_the_same_without_the_toolkit(train, start, script, tmp_path):
    """Every variable, names and values; the current folder; the script's arguments."""
    script("", "beside.py")
    base = tmp_path / "ml" / HOSTS[0]
    common = {"SM_OUTPUT_DIR": str(base / "output"), "PYTHONPATH": str(tmp_path)}
    job = {"hosts": HOSTS[:1], "epochs": 3, "lr": 1e-05, "sagemaker_job_name": "job-7"}

    def seen(host):
        assert host.wait() == 0, host.log()
        return json.loads((base / "model" / "seen.json").read_text())

    real = seen(train(HOSTS[0], script(SURROUNDINGS, "x.py"), environ=common, **job))
    variables = {"SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": "job", **common}
    variables["AWS_DEFAULT_REGION"] = "us-east-1"
    ours = seen(start(host=HOSTS[0], command=[*LAUNCHER, "train"], **variables))
    assert ours[1:] == real[1:] and real[1] == str(base / "code")
    theirs, own = (environ for environ, *_ in (real, ours))
    assert own["PYTHONPATH"] == f"{base}/code:{tmp_path}"
    folders = theirs["PYTHONPATH"].split(":")
    assert folders[0] == f"{base}/code" and str(tmp_path) in folders
    everything, all_of_ours = (json.loads(environ["SM_TRAINING_ENV"]) for environ in (theirs, own))
    assert {**everything, **all_of_ours} == everything
    differ = {name for name in {*theirs, *own} if theirs.get(name) != own.get(name)}
    assert differ == set(DIFFERENT), {name: (theirs.get(name), own.get(name)) for name in differ}


def test_a_missing_host_is_named_in_time(train, script, tmp_path, pretend_torch):
    """The toolkit itself would wait silently for its name, for 15 minutes."""
    pretend_torch("2.13.0")
    hosts, environ = (HOSTS[0], ABSENT), {**OURS, "LAUNCHER_START_TIMEOUT": "2"}
    options = {"command": INIT, "hosts": hosts, "environ": environ, "sagemaker_program": ONE_FILE}
    host = train(HOSTS[0], script("", "x.py"), **options)
    assert host.wait() == 69, host.log()
    seen = f"{ABSENT} did not join within 2 s"
    assert failure_of(host, tmp_path).startswith(seen)
    # The source folder's launcher runs, whatever its version, and not the one that is installed.
    assert f"/{ONE_FILE} --launcher-nproc-per-node 2 " in host.log()


def test_the_toolkit_waits_for_names_where_no_launcher_does(train, script, tmp_path):
    options = {"command": INIT, "hosts": (HOSTS[0], ABSENT), "environ": OURS}
    path = script("echo this must not be started", "x.sh")
    host = train(HOSTS[0], path, sagemaker_program="script.sh", **options)
    program = tmp_path / "ml" / HOSTS[0] / "code" / "script.sh"
    # The last that it does before.
    poll(lambda: program.exists() and program.stat().st_mode & stat.S_IXUSR)
    host.signal(signal.SIGINT)
    assert host.wait() == ended_by(signal.SIGINT), host.log()
    assert "no launcher is running; stopping" in host.err and "not be started" not in host.out
    assert failure_of(host, tmp_path) is None


def test_a_job_that_failed_is_none_that_completed_though_its_failure_file_cannot_be_written(
    train, script, tmp_path, pretend_torch
):
    """The toolkit ends with 0 then, as if all had gone well."""
    pretend_torch("2.13.0")
    run = {"hosts": HOSTS[:1], "environ": OURS, "train-script": "missing.py"}
    (tmp_path / "ml" / HOSTS[0] / "output" / "failure").mkdir(parents=True)
    host = train(HOSTS[0], script("", "x.py"), command=INIT, **run)
    assert host.wait() == 2, host.log()
    assert "--train-script missing.py: there is " in host.err


def test_a_launcher_beside_a_setup_py(train, script, pretend_torch):
    """There the toolkit would run a module, `python -m`, which the file is not."""
    pretend_torch("2.13.0")
    script("", "setup.py")
    script("print('in place of pip, which would install into this environment')", "pip.py")
    options = {"command": INIT, "environ": OURS, "launcher-dry-run": True}
    host = train(HOSTS[0], script("", "x.py"), sagemaker_program=ONE_FILE, **options)
    assert host.wait() == 0, host.log()
    assert "in place of pip" in host.out and " --rdzv-endpoint=127.0.0.1:" in host.out


@pytest.mark.torch  # doctor imports it
def test_doctor_as_the_entry_point(train, script, tmp_path):
    """docs/debugging.md: a shell script beside the one file, and nothing else of the estimator."""
    make_one_file(tmp_path / "launcher.py")
    (line,) = re.findall(r"^exec python launcher.* doctor .*$", DOCTOR, re.MULTILINE)
    line = line.replace("python", sys.executable, 1)
    run = {"sagemaker_program": "script.sh", "epochs": 3}
    host = train(HOSTS[0], script(f"{line}\n", "script.sh"), **run, **{"train-script": "no.py"})
    assert host.wait() == 1, host.log()
    assert "A job would fail on 127.0.0.1: 1 problem" in host.out
    reason = "launcher: doctor: a job would fail\njob: --train-script no.py"
    assert failure_of(host, tmp_path).startswith(reason)


def test_a_shell_script_that_ends_with_the_launcher(train, script, tmp_path, pretend_torch):
    """docs/guide.md: run.sh, which installs something first and passes the hyperparameters on."""
    make_one_file(tmp_path / "launcher.py")
    (lines,) = code(REPO / "docs" / "guide.md", "sh")
    lines = lines.replace("python3", sys.executable).replace("more-requirements.txt", os.devnull)
    lines = lines.replace("pip install", f"{sys.executable} -m pip install", 1)
    run = {"sagemaker_program": "script.sh", "epochs": 3, "launcher-dry-run": True}
    run["train-script"] = script("", "train.py").name
    pretend_torch("2.13.0")
    host = train(HOSTS[0], script(lines, "run.sh"), **run)
    assert host.wait() == 0, host.log()
    assert host.out.rstrip().endswith(" -- train.py --epochs 3")
