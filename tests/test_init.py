"""`sm-launch init`, a container's PID 1, as far as it needs no container (see tests/cluster)."""

import os
import signal
import socket
import stat
import sys

import pytest
from conftest import LAUNCHER, poll

STOPPED = 143
# A launcher as far as the init can see: it is there, hears a stop, and says how it ends.
STAND_IN = f"""
import os, select, signal, sys, time
sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r})
from launcher.init import Presence
from launcher.signals import Signals
with Signals() as signals, Presence(os.environ) as presence:
    print("a launcher is here", flush=True)
    if len(sys.argv) < 2:
        select.select([signals], [], [])
        os.write(1, b"heard %d\\n" % signals.take()[0])  # in one piece, beside others' lines
        time.sleep(0.5)  # time to save
    code = int(sys.argv[1]) if len(sys.argv) > 1 else 143
    presence.ends(code)
sys.exit(code)
"""


@pytest.fixture
def init(start):
    """Start `sm-launch init` with a command, or with a shell's script."""

    def init(*command, **environ):
        if len(command) == 1 and " " in command[0]:
            command = ("sh", "-c", command[0])
        return start(*command, command=[*LAUNCHER, "init"], **environ)

    return init


@pytest.fixture
def stand_in(script):
    return f"{sys.executable} {script(STAND_IN, 'stand_in.py')}"


@pytest.fixture
def base_dir(tmp_path):
    """A folder as /opt/ml, with the config files of a job of one host."""
    base = tmp_path / "ml"
    for folder in ("input/config", "output"):
        (base / folder).mkdir(parents=True)
    texts = {"resourceconfig": '{"current_host": "a", "hosts": ["a"]}'}
    for name in ("resourceconfig", "hyperparameters", "inputdataconfig"):
        (base / "input" / "config" / f"{name}.json").write_text(texts.get(name, "{}"))
    return base


@pytest.fixture
def train(script, tmp_path):
    """Write a shell script that is called as the toolkit's program is."""

    def write(text):
        path = script(f"#!/bin/sh\n{text}", "train")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 1", 1), ("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)],
)
def test_the_exit_code_is_the_commands(init, command, code):
    host = init(command)
    assert host.wait() == code, host.log()
    assert host.err == ""


def test_arguments_and_environment_reach_the_command_unchanged(init):
    code = "import os, sys; print(sys.argv[1:], os.environ['MINE'])"
    host = init(sys.executable, "-c", code, "--help", "a b", "", MINE="x")
    assert host.wait() == 0
    assert host.out == "['--help', 'a b', ''] x\n"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("no-such-command", 127, "no-such-command is not there."),
        ("/etc/passwd", 126, "cannot execute /etc/passwd: Permission denied."),
    ],
)
def test_a_command_that_cannot_be_started(init, command, code, message):
    host = init(command)
    assert host.wait() == code
    assert host.err == f"launcher: {message}\n"
    assert host.failure == host.err


def test_an_image_without_the_toolkit_says_how_to_do_without(init, base_dir, tmp_path):
    environ = {"PATH": str(tmp_path), "SAGEMAKER_BASE_DIR": str(base_dir)}
    host = init("train", **environ)
    assert host.wait() == 127
    assert "train is not there; install sagemaker-training, or use the entry" in host.err


def test_without_a_command_it_is_the_launcher(init):
    for arguments in ((), ("--epochs", "3")):
        host = init(*arguments)
        assert host.wait() == 2
        assert "there is nothing to run: give --train-script PATH" in host.err
    host = init("--launcher-help")
    assert host.wait() == 0
    assert host.out.startswith("usage: sm-launch")


def test_a_config_of_no_use_is_told_before_train_runs(init, train, base_dir):
    (base_dir / "input" / "config" / "hyperparameters.json").write_text("[]")
    host = init(train("echo it ran"), SAGEMAKER_BASE_DIR=str(base_dir))
    assert host.wait() == 2
    assert host.out == ""
    assert "hyperparameters.json holds []; expected a JSON object." in host.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_goes_to_the_command_where_no_launcher_runs(init, number):
    host = init(sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(60)")
    host.wait_for("runs")
    host.signal(number)
    assert host.wait() == 128 + number
    assert "no launcher runs; ending" in host.err


def test_a_stop_goes_to_the_launcher_alone_and_its_exit_code_comes_back(init, stand_in):
    host = init(f"{stand_in}; echo the command goes on; exit 1")
    host.wait_for("a launcher is here")
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert host.out == "a launcher is here\nheard 15\nthe command goes on\n"


def test_several_launchers_all_hear_a_stop(init, stand_in):
    host = init(f"{stand_in} & {stand_in} & {stand_in} & wait; exit 1")
    host.wait_for("a launcher is here", count=3)
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert host.out.count("heard 15") == 3


def test_it_stays_until_a_launcher_that_outlives_the_command_has_ended(init, stand_in):
    host = init(f"{stand_in} & while [ ! -e go-on ]; do sleep 0.1; done; exit 1")
    host.wait_for("a launcher is here")
    open("go-on", "w").close()
    poll(lambda: not any(process.name() == "sh" for process in host.processes()))
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert "heard 15" in host.out


def test_a_launcher_that_comes_after_the_stop_hears_it_at_once(init, stand_in):
    host = init(
        f"trap 'echo trapped' TERM; echo runs; while true; do sleep 0.1; "
        f"[ -e go-on ] && break; done; {stand_in}; exit 1"
    )
    host.wait_for("runs")
    host.signal(signal.SIGTERM)
    host.wait_for("trapped")
    open("go-on", "w").close()
    assert host.wait() == STOPPED, host.log()
    assert host.out.endswith("a launcher is here\nheard 15\n")


@pytest.mark.parametrize(
    ("said", "command", "code"),
    [(3, 1, 3), (3, 7, 7), (3, 0, 0), (0, 1, 1)],
    ids=["as the toolkit does", "a code of its own", "success", "the toolkit alone fails"],
)
def test_what_the_launcher_said_stands_for_a_commands_1(init, stand_in, said, command, code):
    host = init(f"{stand_in} {said}; exit {command}")
    assert host.wait() == code


def test_what_an_earlier_launcher_said_is_not_a_later_ones(init, stand_in):
    killed = f"{stand_in} & wait $!; exit 1"
    host = init(f"{stand_in} 3; {killed}")
    host.wait_for("a launcher is here", count=2)
    for process in host.processes():
        if process.cmdline()[1].endswith("stand_in.py"):
            process.kill()
    assert host.wait() == 1, host.log()


def test_a_toolkit_that_hears_ctrl_c_itself_and_ends_with_0(init, stand_in):
    host = init(f"{stand_in}; exit 0")
    host.wait_for("a launcher is here")
    host.signal(signal.SIGINT)
    assert host.wait() == STOPPED, host.log()  # which is what the stand-in says


def test_a_stop_at_the_very_end_of_a_launcher_changes_nothing(init, script):
    """Python takes some 10 ms to end, with its own handlers, after the launcher has ended."""
    late = script(
        "import os, signal, atexit, sys\nsys.path.insert(0, os.environ['REPO'])\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "from launcher import cli\nsys.exit(cli.main(['--launcher-no-such', '1']))"
    )
    host = init(sys.executable, late, REPO=os.path.dirname(os.path.dirname(__file__)))
    assert host.wait() == 2, host.log()


def test_a_stop_while_train_only_finishes_is_not_passed_on(init, train, stand_in, base_dir):
    command = train(f"{stand_in} 0; echo finishing; sleep 1; echo finished; exit 0")
    host = init(command, SAGEMAKER_BASE_DIR=str(base_dir))
    host.wait_for("finishing")
    host.signal(signal.SIGTERM)
    assert host.wait() == 0, host.log()
    assert "finished" in host.out
    assert "the job has ended; train has 10 s to finish." in host.err


def test_a_stop_is_passed_on_to_a_train_that_does_not_finish(init, train, stand_in, base_dir):
    command = train(f"{stand_in} 0; echo more to do; exec sleep 60")
    # As in an image that has more in front of `train`.
    host = init("sh", "-c", 'exec "$0"', command, SAGEMAKER_BASE_DIR=str(base_dir))
    host.wait_for("more to do")
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        (None, "ExecuteUserScriptError:\nExitCode 143\n", None),
        ("the user's own words, ExitCode 143", None, "the user's own words, ExitCode 143"),
        (None, "written by the script as it saved", "written by the script as it saved"),
    ],
    ids=["the toolkit's", "there before", "of another origin"],
)
def test_a_stop_leaves_no_failure_file_of_the_toolkits(
    init, train, stand_in, base_dir, tmp_path, before, after, left
):
    failure = base_dir / "output" / "failure"
    if before:
        failure.write_text(before)
    (tmp_path / "text").write_text(after or "")
    command = f"{stand_in}; [ -s text ] && cp text {failure}; exit 1"
    host = init(train(command), SAGEMAKER_BASE_DIR=str(base_dir))
    host.wait_for("a launcher is here")
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert (failure.read_text() if failure.exists() else None) == left


def test_garbage_on_its_socket_changes_nothing(init):
    host = init("echo $LAUNCHER_INIT; while [ ! -e go-on ]; do sleep 0.1; done; exit 1")
    name = poll(lambda: host.out.strip())
    connections = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for connection in connections:
        connection.connect("\0" + name)
        connection.sendall(os.urandom(1000))
    for connection in connections:
        connection.close()
    open("go-on", "w").close()
    assert host.wait() == 1, host.log()


def test_a_variable_that_outlived_its_init_costs_nothing(start, script, pretend_torch):
    script("")
    pretend_torch("2.13.0")
    dry_run = ("--train-script", "script.py", "--launcher-dry-run")
    host = start(*dry_run, LAUNCHER_INIT="nobody-listens-here", LAUNCHER_TYPO="1")
    assert host.wait() == 0
    assert "LAUNCHER_TYPO is no option" in host.err and "LAUNCHER_INIT" not in host.err
