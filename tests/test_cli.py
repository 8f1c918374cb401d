"""The program as people start it, up to the point where something would be started."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from conftest import LAUNCHER, REPO, completed, write_config

import launcher
from launcher.errors import LaunchError
from launcher.job.options import OPTIONS
from launcher.job.plan import command
from launcher.job.prepare import prepare
from launcher.result.causes import of_error

TWO = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
ALONE = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
MAIN = str(REPO / "launcher" / "__main__.py")
BARE = [sys.executable, "-S", MAIN]  # without the site-packages of this test's environment
DRY = ["--train-script", "script.py", "--launcher-dry-run"]


@pytest.fixture(autouse=True)
def a_script_and_a_torch(script, pretend_torch):
    script("raise SystemExit('this script must not be started')")
    pretend_torch("2.13.0")


def launch(*args, command=LAUNCHER, code=0, **environ):
    return completed(*command, *args, code=code, **environ)


@pytest.mark.parametrize(
    "command",
    [LAUNCHER, [sys.executable, MAIN], ["sm-launch"]],
    ids=["python -m launcher", "python launcher/__main__.py", "sm-launch"],
)
def test_one_program_under_three_names(command, monkeypatch):
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    done = launch("--help", command=command)
    assert done.stderr == "" and done.stdout.startswith("usage: sm-launch")
    words = [*DRY, "--epochs", "3"]
    done = launch(*words, command=command, **TWO, PET_MAX_RESTARTS="3", LAUNCHER_GARCE="1")
    assert "algo-1 has node_rank 0 (nnodes=2)" in done.stderr  # what a run would say
    assert "PET_MAX_RESTARTS=3 is used instead of 0." in done.stderr
    assert "warning: LAUNCHER_GARCE is not a launcher option" in done.stderr
    assert done.stdout.startswith("env ") and " OMP_NUM_THREADS=" in done.stdout
    assert " script.py --epochs 3\n" in done.stdout


def test_the_version_is_only_asked_for_alone(tmp_path):
    done = launch("--version")
    assert (done.stdout, done.stderr) == (f"sm-launch {launcher.__version__}\n", "")
    assert planned([*DRY, "--version"]).argv[-1] == "--version"


@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH"])
@pytest.mark.parametrize("how", ["python launcher/__main__.py", "sm-launch"])
def test_nothing_takes_the_place_of_our_modules_or_of_pythons(script, tmp_path, where, how):
    """A user's own modules lie in PYTHONPATH under `train`, old backports beside the package."""
    for name in ("launcher.py", "train.py", "cli.py", "plan.py", "errors.py"):
        script("raise SystemExit('shadowed')", name)
    installed = tmp_path / "installed"
    shutil.copytree(REPO / "launcher", installed / "launcher")
    shutil.copy(REPO / "sm_launch.py", installed)
    script("", "installed/psutil.py")
    for folder in ("installed", *(["."] if where == "PYTHONPATH" else [])):
        for name in ("enum.py", "json.py", "selectors.py", "socket.py"):
            script("raise SystemExit('older than this Python')", f"{folder}/{name}")
    program = {
        "python launcher/__main__.py": (str(installed / "launcher" / "__main__.py"),),
        "sm-launch": ("-c", "import sys; sys.path.pop(0); import sm_launch; sm_launch.main()"),
    }[how]
    path = [os.environ["PYTHONPATH"], str(installed)]
    if where == "PYTHONPATH":
        path.insert(0, str(tmp_path))
    done = launch(*DRY, command=[sys.executable, "-S", *program], PYTHONPATH=":".join(path))
    assert done.stdout.endswith(" -- script.py\n")


def test_the_tools_are_those_beside_the_launcher(script, tmp_path):
    (tmp_path / "launcher_tools").mkdir()
    script("raise SystemExit('shadowed')", "launcher_tools/__init__.py")
    installed = tmp_path / "installed"
    shutil.copytree(REPO / "launcher", installed / "launcher")
    program, environ = [sys.executable, installed / "launcher"], {"PYTHONPATH": str(tmp_path)}
    done = completed(*program, "local", "--help", code=2, **environ)
    assert f"launcher_tools, which is not in {installed};" in done.stderr
    shutil.copytree(REPO / "launcher_tools", installed / "launcher_tools")
    for words in (["local", "-h"], ["doctor", "--train-script", "t.py", "--launcher-help"]):
        done = completed(*program, *words, **environ)
        assert done.stdout.startswith(f"usage: sm-launch {words[0]} [")


def test_no_module_of_ours_is_named_as_one_of_pythons():
    """stub.py and rank.py run by path, with their folder first in sys.path for a moment."""
    ours = {path.stem for path in REPO.glob("launcher*/**/*.py")}
    pythons = getattr(sys, "stdlib_module_names", ())  # Python 3.10
    assert not ours & set(pythons)


@pytest.mark.parametrize(
    ("environ", "args", "says"),
    [
        ({"SM_HOSTS": "x"}, DRY, "SM_HOSTS is 'x'; expected a JSON list of different"),
        ({}, ["--train-script", "a\nb\x1b.py"], "--train-script a\\nb\\x1b.py: there is"),
    ],
    ids=["which hosts there are", "what they run"],
)
def test_a_wrong_configuration_is_one_line_and_exit_2(environ, args, says, tmp_path):
    done = launch(*args, code=2, **environ)
    assert done.stdout == "" and done.stderr.startswith("launcher: ") and says in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "output" / "failure").read_text() == done.stderr
    second = launch(*args, code=2, **environ)
    assert "was left by an earlier run; it has been replaced." in second.stderr


def planned(argv, **environ):
    """Return the plan, or the error that the program ends with."""
    try:
        job = prepare(argv, {**os.environ, **environ})
        return job.error or job.plan
    except LaunchError as error:
        return error


def folder_of(argv, **environ):
    """Return where the ranks of a plan run."""
    return prepare(argv, {**os.environ, **environ}).options.folder


WRONG = [
    # environment, arguments, what the one line says
    ({}, ["--train-script", "."], "is a folder without __main__.py; expected"),
    ({}, ["--train-module", "no_such_module.x"], "no_such_module.x: there is no such module"),
    ({}, ["--train-module", "json"], "which python -m cannot run."),
    ({}, ["--train-module", "output"], "output: it is a package without __main__, "),
    ({}, ["--train-module", "script.py"], "(for a file: --train-script)"),
    ({}, ["--train-script", "script.py --epochs 3"], "; give its arguments as words of their own"),
    ({}, ["script.py"], "script.py was taken as an argument of the script"),
    ({}, ["--Train_Script", "x.py"], "--Train_Script was taken as an argument of the script"),
    ({}, ["a\nb" + "c" * 99], r"nothing to run (a\nbccc"),
    ({**ALONE, "SM_HPS": '["secret"]'}, [], "SM_HPS is not a JSON object; expected the hyperpar"),
    ({**ALONE, "SM_HPS": "{}"}, [], "there is nothing to run: give --train-script PATH"),
    ({}, [*DRY[:2], "--launcher-log-dir=script.py/x"], "the folder script.py/x (Not a directory)"),
    ({"LAUNCHER_WATCH": "0"}, [*DRY, "--launcher-hang-timeout", "9"], "needs the progress checks"),
    ({**TWO, "LAUNCHER_HOST_ADDRESSES": '{"algo-1": 3}'}, DRY, "ADDRESSES is {'algo-1': 3}; exp"),
    ({}, [*DRY, "--launcher-peer-port", "29400"], "are both 29400"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, DRY, "remove distribution= from the estimator"),
]


@pytest.mark.parametrize(("environ", "args", "says"), WRONG)
def test_what_is_wrong_is_said_in_one_line(environ, args, says):
    error = planned(args, **environ)
    assert says in str(error) and "\n" not in str(error) and of_error(error).exit_code == 2


ENTRY_POINT = (
    "{}, and ranks run Python; make it the estimator's entry_point (entry_point={}), end it with "
    '`exec python launcher.py "$@"`, and name a Python script here.'
)
OF_PIP = "#!/bin/sh\n'''exec' /a/path/of/more/than/127/bytes/python \"$0\" \"$@\"\n' '''"
SCRIPTS = [
    # a file, what it holds, what the launcher says ("": Python runs it)
    ("folder/__main__.py", "", ""),
    ("folder/__main__.pyc", "", ""),
    ("mine", "", ""),
    ("mine", "#!", ""),
    ("mine", "#!/usr/bin/env python3", ""),
    ("mine", "#!/usr/bin/env -S uv run --script", ""),
    ("mine", OF_PIP, ""),
    ("mine", '#!/bin/sh\n# -*- python -*-\n"exec" "python" "$0" "$@"', ""),
    ("run.sh", "echo no program is named", "it is a shell script by its name"),
    ("run", '#! /bin/sh\n"$PYTHON" train.py', "its first line is #! /bin/sh"),
    ("train.py", "#!/usr/bin/env bash\npython t.py", "its first line is #!/usr/bin/env bash"),
    ("x", "#!/bin/sh\r\nexit 3\r\n", "its first line is #!/bin/sh"),
    ("train.ipynb", "{}", "it is a notebook; expected a Python file: jupyter nbconvert"),
    ("program", "\x7fELF\x02\x01\x01\0\xff", "it is a compiled program"),
]


@pytest.mark.parametrize(("path", "text", "says"), SCRIPTS)
def test_a_script_is_what_python_runs(tmp_path, path, text, says):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(text.encode("latin-1"))
    name = path.partition("/")[0]
    made = planned(["--train-script", name])
    if "#!" in says or "shell" in says:
        says = ENTRY_POINT.format(says, name)
    if says:
        assert str(made).startswith(f"--train-script {name}: {says}")
    else:
        assert made.argv[-1] == name


ON_AWS = {"TRAINING_JOB_ARN": "arn:x"}
NO_EFFECT = [
    # environment, arguments, what the line says ("" for none)
    ({"LAUNCHER_GARCE": "1"}, [], "LAUNCHER_GARCE is not a launcher option; see --launcher-help."),
    ({}, ["--LAUNCHER_GRACE", "1"], "--LAUNCHER_GRACE is passed to the script; the launcher's own"),
    ({}, ["--train_script", "b.py"], "--train_script is passed to the script; the launcher's own"),
    ({}, ["--nproc_per_node", "2"], "the launcher's own option is --launcher-nproc-per-node."),
    ({}, ["--nproc-per-node=gpu"], "the launcher's own option is --launcher-nproc-per-node."),
    ({}, ["--nproc_per_node", "2", "--launcher-nproc-per-node", "2"], ""),
    ({}, ["--log_dir", "x", "--grace", "1", "--launcher", "pytorch", "launcher-grace"], ""),
    ({"LAUNCHER_WATCH": "0"}, ["--launcher-hang-notify", "9"], "--launcher-hang-notify has no ef"),
    ({"LAUNCHER_WATCH": "0"}, [], ""),
    ({}, ["--launcher-restart-timeout", "9"], "--launcher-restart-timeout has no effect: --lau"),
    ({}, ["--launcher-restart-timeout", "9", "--launcher-max-restarts", "1"], ""),
    ({}, ["--launcher-script-dir", "/no/where"], "there is no folder /no/where."),
    (ON_AWS, ["--launcher-grace", "121"], "--launcher-grace is 121 s, but SageMaker"),
    (ON_AWS, ["--launcher-grace", "120"], ""),
    ({}, ["--launcher-grace", "600"], ""),  # not on SageMaker
]


@pytest.mark.parametrize(("environ", "args", "says"), NO_EFFECT)
def test_what_has_no_effect_is_said(environ, args, says, logged):
    assert planned(["--train-script", "script.py", *args], **ALONE, **environ).argv
    lines = logged().splitlines()
    assert [line for line in lines if says in line] == lines and len(lines) == bool(says), lines


def test_missing_torch_is_exit_127():
    done = launch(*DRY, command=BARE, code=127, PYTHONPATH="")
    assert "torch is not installed for " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_psutil_whose_part_in_c_does_not_load_is_reported_before_anything_starts(script):
    script("raise ImportError('libc.musl: cannot open')", "site/psutil.py")
    done = launch(*DRY, command=BARE, code=2)
    seen = f"psutil cannot be imported by {sys.executable} (libc.musl: cannot open)"
    assert seen in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("stdout", [">&-", "> /dev/full", "| true"])
def test_a_stdout_that_takes_nothing(stdout):
    command = shlex.join([*LAUNCHER, *DRY])
    done = subprocess.run(["sh", "-c", f"{command} {stdout}"], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_dry_run_prints_any_bytes():
    argv = [os.fsencode(word) for word in (*LAUNCHER, *DRY, "--x")] + [b"\xff", "é".encode()]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(argv, capture_output=True, env=environ, timeout=60)
    assert done.returncode == 0 and b"--x '\xff' '\xc3\xa9'\n" in done.stdout, done.stderr


def test_a_current_folder_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = launch("--train-script", "x", command=[sys.executable, MAIN], code=2)
    assert "the current folder has been removed" in done.stderr


@pytest.fixture
def bare_image(tmp_path):
    """Write the config files of an image without the toolkit."""
    hyperparameters = {
        "train-script": '"script.py"',
        "epochs": "3",
        "text": '"it\'s $HOME"',
        "launcher-dry-run": "true",
        "sagemaker_program": '"x"',
    }
    resources = {"current_host": "algo-1", "hosts": ["algo-2", "algo-1"]}
    write_config(tmp_path / "ml", hyperparameters, resources, {"train": {}})
    return {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")}


def test_a_bare_image_runs_from_the_config_files(bare_image):
    done = launch("train", **bare_image, SM_MODEL_DIR="/mine")
    assert "--rdzv-endpoint=algo-1:29400" in done.stdout
    assert " script.py --epochs 3 --text 'it'\"'\"'s $$HOME'\n" in done.stdout
    assert "SM_HP_EPOCHS=3" in done.stdout
    assert f"SM_CHANNEL_TRAIN={bare_image['SAGEMAKER_BASE_DIR']}/input/data/train" in done.stdout
    assert "SM_MODEL_DIR=" not in done.stdout  # present already, so untouched


def test_sagemakers_word_for_the_start_does_not_reach_the_script(bare_image, logged):
    """As it starts an image, tried by hand with options."""
    said = "the first argument, train, is how SageMaker starts an image, "
    for environ in (ALONE, {}, bare_image):
        argv = planned(["train", *DRY, "--epochs", "9", "train"], **environ).argv
        assert argv[-3:] == ("--epochs", "9", "train") and "train" not in argv[:-1]
        assert said in logged()
    planned(["train"], **bare_image)
    assert said not in logged()


# Hyperparameters of SDK v3, with its `command`: they are in SM_HPS alone.

V3 = {"train-script": "script.py", "launcher-dry-run": True, "lr": 1e-3, "flag": True, "no": None}
V3 = {**V3, "d": {"b": 2, "a": [1]}, "text": "a b", "sagemaker_x": 1, "number": "7"}


def test_a_start_without_arguments_takes_those_of_sdk_v3():
    for words in ([], ["train"]):
        done = launch(*words, **ALONE, SM_HPS=json.dumps(V3))
        rendered = "--lr 0.001 --flag true --no null --d '{\"b\": 2, \"a\": [1]}' --text 'a b'"
        assert f" script.py {rendered} --sagemaker_x 1 --number 7\n" in done.stdout
        said = "launcher: started without arguments: using the hyperparameters (SM_HPS).\n"
        assert done.stderr.startswith(said) and "not among" not in done.stderr


def test_under_the_toolkit_they_are_as_that_renders_them():
    """A shell script that it runs has left them out."""
    words = json.dumps(["--flag", "True", "--train-script", "script.py"])
    argv = planned([], **ALONE, SM_HPS='{"flag": true}', SM_USER_ARGS=words).argv
    assert argv[-3:] == ("script.py", "--flag", "True")


def test_hyperparameters_that_are_no_arguments_are_named(logged):
    hps = {"batch-size": 1, "lr": 2, "d": 3, "x": 4, "sagemaker_x": 5, "lost": 6, "grace": 7}
    argv = ["--batch_size", "8", "--lr=1", "-d", "1", "x=4", "--launcher-grace", "1"]
    planned(["--train-script", "script.py", *argv], **ALONE, SM_HPS=json.dumps(hps))
    said = "these hyperparameters (SM_HPS) are not among the arguments: "
    assert logged() == f"launcher: {said}lost, grace.\n"
    for known in ("", "{}", "[]", "x", json.dumps({"lr": 1})):
        planned(["--train-script", "script.py", *argv], **ALONE, SM_HPS=known)
    assert logged() == ""
    error = planned(["--epochs", "3"], **ALONE, SM_HPS='{"train-script": "x.py", "epochs": 3}')
    assert str(error).endswith(f"; see --launcher-help. {said}train-script.")


def test_in_a_bare_image_the_command_line_comes_last_and_wins(bare_image, script):
    script("", "other.py")
    argv = planned(["--train-script", "other.py", "--epochs", "9"], **bare_image).argv
    words = argv[argv.index("other.py") :]
    assert words[:3] == ("other.py", "--epochs", "3") and words[-2:] == ("--epochs", "9")


@pytest.fixture
def code(tmp_path, script):
    """Make a folder for code as an image has it, with a script and a package; return its path."""
    for name in ("tools", "pkg"):
        (tmp_path / "ml" / "code" / name).mkdir(parents=True)
    for name in ("tools/tool.py", "pkg/__init__.py", "pkg/__main__.py"):
        script("", f"ml/code/{name}")
    return str(tmp_path / "ml" / "code")


def test_what_is_found_in_sagemakers_folder_for_code_runs_there(bare_image, code, tmp_path):
    """As under `train`, if nothing of that name is in the current folder."""
    write_config(tmp_path / "ml")
    for found in (["--train-script", "tools/tool.py"], ["--train-module", "pkg"]):
        assert folder_of(found, **bare_image) == code
    error = planned(["--train-script", "none.py"], **bare_image)
    assert f"neither {tmp_path}/none.py nor {code}/none.py" in str(error)
    assert (
        f"{code}/tools/tool.py" in planned(["--train-script", "tools/tool.py"], **bare_image).argv
    )
    assert folder_of(["--train-script", f"{code}/tools/tool.py"], **bare_image) == code
    assert folder_of(["--train-script", "script.py"], **bare_image) == ""  # of tmp_path
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text("")
    assert folder_of(["--train-module", "pkg"], **bare_image) == ""
    images = shutil.copytree(code, tmp_path / "images")
    os.remove(f"{code}/tools/tool.py")
    found = ["--train-script", "tools/tool.py", "--launcher-script-dir", str(images)]
    assert folder_of(found, **bare_image) == ""


def test_pythonpath_begins_with_sagemakers_folder_for_code(bare_image, code, monkeypatch):
    theirs = os.environ["PYTHONPATH"]
    for argv in (["--train-script", "script.py"], ["--train-script", "tools/tool.py"]):
        assert planned(argv, **bare_image).environment["PYTHONPATH"] == f"{code}:{theirs}"
    monkeypatch.chdir(code)
    argv = ["--train-script", "tools/tool.py", "--launcher-smddp-compat"]
    plan = planned(argv, **bare_image)
    folders = plan.environment["PYTHONPATH"].split(":")
    assert folders[:-1] == [code, *theirs.split(":")] and folders[-1].endswith("/smddp")
    assert folder_of(argv, **bare_image) == ""
    made_by_the_toolkit = planned(argv[:2], **bare_image, **ALONE).environment
    assert "PYTHONPATH" not in made_by_the_toolkit


def test_relative_paths_are_those_of_the_launchers_folder(bare_image, code, tmp_path):
    relative = {"PYTHONPATH": f"src:{os.environ['PYTHONPATH']}", "PET_LOG_DIR": "x", "TMPDIR": "t"}
    argv = ["--train-script", "tools/tool.py", "--launcher-log-dir", "logs"]
    relative["PET_TEE"] = "3"
    plan = planned(argv, **bare_image, **relative)
    assert f"--log-dir={tmp_path}/logs" in plan.argv
    assert plan.environment["PYTHONPATH"].startswith(f"{code}:{tmp_path}/src:")
    assert plan.environment["PET_LOG_DIR"] == f"{tmp_path}/x"
    assert plan.environment["TMPDIR"] == f"{tmp_path}/t"


def test_the_printed_command_goes_where_the_job_would(bare_image, code):
    done = launch("--train-script", "tools/tool.py", **bare_image)
    assert done.stdout.startswith(f"cd {code} && env ") and f"PYTHONPATH={code}:" in done.stdout


def test_hyperparameters_that_no_variable_holds(bare_image, tmp_path):
    """Some variables repeat all of them, as JSON; Linux takes none of 128 KiB."""
    values = {f"key{number}": '\u00e9"' * 1200 for number in range(60)}
    write_config(tmp_path / "ml", {**values, "train-script": "script.py"})
    assert "cannot be passed to a process; expected less than 128" in str(
        planned(["train"], **bare_image)
    )


def test_config_files_with_unusable_hosts_are_named(bare_image, tmp_path):
    path = tmp_path / "ml" / "input" / "config" / "resourceconfig.json"
    path.write_text('{"current_host": "algo-1", "hosts": "algo-1"}')
    error = planned([], **bare_image)
    assert f"made from {path.parent}" in str(error) and of_error(error).exit_code == 2


# Odd values and config files: a plan or one line, never a traceback.


def is_planned(argv, environ):
    """Tell whether this host has a plan: it may take no part, or end with one line of error."""
    try:
        job = prepare(argv, {"PATH": "/nowhere", **environ})
        if job and job.error:
            raise job.error
    except LaunchError as error:
        assert str(error) and "\n" not in str(error)
        return False
    return job is not None and os.fsencode(command(job.plan)) != b""


GROUPS = {
    "SM_INSTANCE_GROUPS_DICT": '{"g": {"hosts": ["algo-1"]}}',
    "LAUNCHER_INSTANCE_GROUPS": "g",
}
WHOLE = {**TWO, **GROUPS, "SM_NUM_GPUS": "2", "SM_NUM_NEURONS": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
ABSURD = ["", " ", "-5", "0", "1.5", "x", "/proc/x", "::", "=", "nan", "1e300", "true", "auto"]
ABSURD += ["[]", "[1", "null", '["algo-1", 3]', '{"g": {"hosts": 3}}', "\udcff", "9" * 5000]
PET = "LOG_DIR MAX_RESTARTS MODULE NNODES NO_PYTHON NPROC_PER_NODE RDZV_BACKEND RDZV_CONF "
PET += "RDZV_ENDPOINT RDZV_ID RUN_PATH SHUTDOWN_TIMEOUT STANDALONE"
VARIABLES = {
    *WHOLE,
    *(f"LAUNCHER_{name.upper()}" for name in OPTIONS),
    *(f"PET_{name}" for name in PET.split()),
    *("LAUNCHER_HOST_ADDRESSES", "SM_NETWORK_INTERFACE_NAME", "SM_CURRENT_INSTANCE_TYPE"),
    *("TRAINING_JOB_NAME", "SAGEMAKER_JOB_NAME", "LOCAL_RANK", "LOGLEVEL", "OMP_NUM_THREADS"),
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}


@pytest.mark.parametrize("variable", sorted(VARIABLES))
def test_no_value_makes_the_launcher_itself_fail(variable):
    """It is taken, or refused in one line, or left to torchrun, which refuses it."""
    assert is_planned(DRY, WHOLE)
    for text in ABSURD:
        is_planned(DRY, {**WHOLE, variable: text})


ANYTHING = [None, True, 3, "", "a b", "=\0", [], [3], ["a", None], {}, {"a": {"hosts": 3}}, [{}]]


@pytest.mark.parametrize(
    "field", ["hosts", "current_host", "instance_groups", "current_group_name", "topology"]
)
def test_nothing_in_config_files_makes_the_launcher_itself_fail(tmp_path, field):
    for value in ANYTHING:
        resources = {"hosts": ["algo-1", "algo-2"], "current_host": "algo-1", field: value}
        hyperparameters = {"train-script": "script.py", str(value): value}
        write_config(tmp_path / "ml", hyperparameters, resources, {str(value): value})
        is_planned([], {"SAGEMAKER_BASE_DIR": str(tmp_path / "ml")})


@pytest.mark.xdist_group("stacks")  # see tests/test_hangs.py
def test_a_stop_ends_the_wait_for_stacks(start, tmp_path):
    """Of a launcher that does not answer."""
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.bind(str(tmp_path / "socket"))
        launcher.listen()
        tool = start("stacks", LAUNCHER_RUN_DIR=str(tmp_path))
        connection, _ = launcher.accept()
        with connection:
            assert connection.recv(100)
            tool.signal(signal.SIGINT)
            assert tool.wait() == 130, tool.log()  # and not its own end, 8 s later
