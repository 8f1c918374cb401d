"""`sm-launch init`, a container's PID 1, as far as it needs no container (see tests/cluster)."""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest
from conftest import LAUNCHER, ended_by, poll, ports, words_of, write_config

from launcher.result.causes import Result, of_container, stopped
from launcher_tools import doctor_checks

STOPPED = 143
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
# A launcher as the init sees it: it registers, gets a stop, and says how it ends.
STAND_IN = f"""
import os, select, signal, sys, time
sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r})
from launcher.container.presence import register
from launcher.result.causes import Result
from launcher.host.signals import Signals
if "RUNS_AS" in os.environ:
    os.setuid(int(os.environ["RUNS_AS"]))
signals, report = Signals(), register(os.environ)
print("a launcher is here", flush=True)
if len(sys.argv) < 2:
    select.select([signals], [], [])
    os.write(1, b"heard %d\\n" % signals.take()[0])  # in one piece, beside others' lines
    time.sleep(0.5)  # time to save
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "none" in sys.argv:  # a dry run
    sys.exit(report(None))
code = int(sys.argv[1]) if len(sys.argv) > 1 else 143
report(Result(code, "", 15 * ("stopped" in sys.argv or len(sys.argv) < 2)))
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
    (base / "output").mkdir(parents=True)
    write_config(base, resources={"current_host": "a", "hosts": ["a"]})
    return base


@pytest.fixture
def train(script, tmp_path):
    """Write a shell script that is called as the toolkit's program is."""

    def write(text):
        path = script(f"#!/bin/sh\n{text}", "train")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


NEVER = "and never started a launcher; see this host's log"
INSTEAD = "sh ended with 0, but its last launcher with 3: this container ends with 3 (with 0 if "
INSTEAD += "LAUNCHER_KEEP_EXIT_CODE is 1)."


@pytest.mark.parametrize(
    ("command", "code", "reason", "line"),
    [
        ("exit 7", 7, "ended with exit code 7 {}", ""),
        ("kill -KILL $$", 137, "was killed by SIGKILL (signal 9) {}", ""),
        ("exec no-such-program", 127, "ended with exit code 127 {}", ""),
        # of several launchers the last one counts
        ("LAUNCHER 0; LAUNCHER 3; true", 3, "", INSTEAD),
        ("LAUNCHER 3 | cat", 3, "", INSTEAD),
        ("LAUNCHER 3; LAUNCHER none; true", 3, "", INSTEAD),
        ("LAUNCHER 3 || LAUNCHER 0", 0, "", ""),
        ("export KEEP; LAUNCHER 3 || true", 0, "", ""),
        # a reason is given where no launcher has given one
        ("LAUNCHER 3; exit 5", 5, "", ""),
        ("LAUNCHER 137; exit 137", 137, "", ""),  # of its rank, which was killed
        ("LAUNCHER none; exit 5", 5, "ended with exit code 5 {}", ""),
        ("LAUNCHER 0; exit 5", 5, "ended with exit code 5 after its launcher had succeeded", ""),
        ("LAUNCHER killed | cat", 137, "ended with exit code 0 and its launcher was killed", ""),
    ],
)
def test_how_a_command_and_its_launchers_end(init, stand_in, command, code, reason, line):
    keeps = {"LAUNCHER_KEEP_EXIT_CODE": "1"} if "KEEP" in command else {}
    command = command.replace("LAUNCHER", stand_in)
    host = init(command, **keeps)
    assert host.wait() == code, host.log()
    if reason:
        assert f" {reason.format(NEVER)}" in host.failure and host.err.endswith(host.failure)
    else:
        assert line in host.err and bool(line) == bool(host.err) and not host.failure, host.log()


@pytest.mark.parametrize(
    ("command", "hyperparameters"),
    [
        (("sh", "-c", "exit 7"), {}),
        (("no-such-command",), {"train-module": "package.train", "epochs": 3}),
    ],
)
def test_the_first_host_learns_that_no_launcher_will_come(
    start, init, script, base_dir, pretend_torch, command, hyperparameters
):
    pretend_torch("2.13.0")
    hosts = ["127.0.0.1", "127.0.0.2"]
    common = {"TRAINING_JOB_NAME": "j", **ports()}
    first = start(
        *("--train-script", script("")),
        **{"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[0], "SM_NUM_GPUS": "0"},
        **common,
    )
    poll(lambda: "rendezvous at" in first.err)
    write_config(base_dir, hyperparameters, {"current_host": hosts[1], "hosts": hosts})
    second = init(*command, SAGEMAKER_BASE_DIR=str(base_dir), **common)
    code = 7 if len(command) > 1 else 127
    assert [second.wait(60), first.wait(60)] == [code, code], first.log() + second.log()
    why = second.failure.partition("launcher: ")[2]
    assert why and first.failure == f"launcher: {hosts[1]}: {why}"


def test_a_first_host_without_a_launcher_is_not_waited_for_long(init, base_dir):
    hosts = ["127.0.0.1", "127.0.0.2"]
    write_config(base_dir, resources={"current_host": hosts[1], "hosts": hosts})
    host = init("exit 7", SAGEMAKER_BASE_DIR=str(base_dir), **ports())
    assert host.wait(60) == 7, host.log()
    assert "never started a launcher" in host.failure and host.err.count("\n") == 1


def test_arguments_and_environment_reach_the_command_unchanged(init):
    code = "import os, sys; print(sys.argv[1:], os.environ['MINE'])"
    host = init(sys.executable, "-c", code, "--help", "a b", "", MINE="x")
    assert host.wait() == 0
    assert host.out == "['--help', 'a b', ''] x\n"


OR_ELSE = "install sagemaker-training, or use the entry point `sm-launch` without `init`."


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("no-such-command", 127, "no-such-command was not found."),
        ("/etc/passwd", 126, "cannot execute /etc/passwd: Permission denied."),
        ("./odd", 127, "cannot execute ./odd: its `#!` interpreter does not exist."),
        ("train", 127, f"train was not found; {OR_ELSE}"),
    ],
)
def test_a_command_that_cannot_be_started(init, script, base_dir, command, code, message):
    script("#!/no/such/interpreter", "odd").chmod(0o755)
    host = init(command, PATH="/usr/bin:/bin", SAGEMAKER_BASE_DIR=str(base_dir))
    assert host.wait() == code
    assert host.failure == host.err == f"launcher: {message}\n"


def test_without_a_command_it_is_the_launcher(init):
    for arguments in ((), ("--epochs", "3")):
        host = init(*arguments)
        assert host.wait() == 2
        assert "there is nothing to run: give --train-script PATH" in host.err


def test_an_entry_point_of_the_base_image_stays_between_init_and_launcher(
    init, script, base_dir, pretend_torch
):
    """docs/guide.md: the script that an image starts with, which runs its arguments in the end."""
    pretend_torch("2.13.0")
    entry = script('echo "the base begins"; exec "$@"', "entry.sh")
    run = {"train-script": str(script("", "train.py")), "launcher-dry-run": True}
    write_config(base_dir, run)
    host = init("sh", entry, *LAUNCHER, "train", SAGEMAKER_BASE_DIR=str(base_dir))
    assert host.wait() == 0, host.log()
    assert host.out.startswith("the base begins\n") and "train.py" in host.out


def test_an_invalid_config_is_reported_before_train_runs(init, train, base_dir):
    write_config(base_dir, [])
    host = init(train("echo it ran"), SAGEMAKER_BASE_DIR=str(base_dir))
    assert host.wait() == 2 and host.out == ""
    assert "hyperparameters.json is []; expected a JSON object." in host.err


@pytest.mark.parametrize(
    ("returncode", "said", "stop", "hides", "ending"),
    [
        (143, None, 2, False, Result(130)),  # `train` gets SIGTERM for Ctrl-C, as no launcher ran
        (7, None, 15, False, Result(7)),
        (1, Result(3), 0, False, Result(3)),  # the toolkit makes 1 of any failure
        (1, Result(0), 0, False, Result(1)),  # the toolkit itself failed, after the job
        # stops: of this host, and of another one
        (0, stopped(2), 2, False, stopped(2)),  # a toolkit that handled Ctrl-C itself
        (0, stopped(2), 0, False, Result(0, "", 2)),
        # the toolkit hides a failure
        (0, None, 0, True, Result(1)),  # before the launcher: it could not copy the folder, say
        (0, Result(0), 0, True, Result(1)),
        (0, stopped(15), 0, True, stopped(15)),
        (0, None, 2, True, Result(0)),  # Ctrl-C
    ],
)
def test_how_the_container_ends(returncode, said, stop, hides, ending):
    assert of_container(returncode, said, stop, hides_failure=hides) == ending


def test_signals_that_nohup_ignores_are_not_stops(start):
    shell = "trap '' HUP INT QUIT; exec \"$@\""
    command = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(60)"]
    host = start(command=["sh", "-c", shell, "sh", *LAUNCHER, "init", *command])
    host.wait_for("runs")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        host.signal(number)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "SIGTERM (signal 15): no launcher is running; stopping" in host.err
    assert host.err.count("\n") == 1


AGAIN = "SIGTERM (signal 15): launchers start again and again; stopping sh.\n"


@pytest.mark.parametrize(
    ("command", "launchers", "says"),
    [
        ("LAUNCHER & LAUNCHER & LAUNCHER & wait; echo it goes on; exit 1", 3, "it goes on\n"),
        ("until LAUNCHER; do :; done", 1, AGAIN),
        # as below su and gosu
        pytest.param("RUNS_AS=65534 LAUNCHER; exit 1", 1, "heard 15\n", marks=needs_root),
    ],
    ids=["all launchers and not the command", "a loop of them", "of another user"],
)
def test_a_stop_goes_to_launchers_whose_exit_code_is_returned(
    init, stand_in, command, launchers, says
):
    host = init(command.replace("LAUNCHER", stand_in))
    host.wait_for("a launcher is here", count=launchers)
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert host.out.count("heard 15") >= launchers and says in host.out + host.err


def test_it_stays_until_a_launcher_that_outlives_the_command_has_ended(init, stand_in):
    host = init(f"{stand_in} & while [ ! -e go-on ]; do sleep 0.1; done; exit 1")
    host.wait_for("a launcher is here")
    open("go-on", "w").close()
    poll(lambda: not any(words_of(process)[:1] == ["sh"] for process in host.processes()))
    host.signal(signal.SIGTERM)
    assert host.wait() == STOPPED, host.log()
    assert "heard 15" in host.out


def test_a_launcher_that_starts_after_the_stop_gets_it_at_once(init, stand_in):
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


def test_a_stop_at_the_very_end_of_a_launcher_changes_nothing(init, script):
    """Python takes some 10 ms to end, with its own handlers, after the launcher has ended."""
    late = script(
        "import os, signal, atexit, sys\nsys.path.insert(0, os.environ['REPO'])\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "from launcher import cli\nsys.exit(cli.main())"
    )
    repo = os.path.dirname(os.path.dirname(__file__))
    host = init(sys.executable, late, "--launcher-no-such=1", REPO=repo)
    assert host.wait() == 2, host.log()


@pytest.mark.parametrize("was_stopped", [False, True])
def test_a_stop_while_train_only_finishes_is_not_passed_on(
    init, train, stand_in, base_dir, was_stopped
):
    until = "while [ ! -e go ]; do sleep 0.1; done"
    code = "" if was_stopped else "0"
    command = train(f"{stand_in} {code}; echo finishing; {until}; echo finished; exit $?")
    host = init(command, SAGEMAKER_BASE_DIR=str(base_dir))
    if was_stopped:  # during the job
        host.wait_for("a launcher is here")
        host.signal(signal.SIGTERM)
    host.wait_for("finishing")
    host.signal(signal.SIGTERM)
    poll(lambda: "the job has ended; train may finish." in host.err)
    Path("go").touch()
    assert host.wait() == (STOPPED if was_stopped else 0), host.log()
    assert "finished" in host.out


def test_a_second_stop_ends_a_train_that_does_not_finish(init, train, stand_in, base_dir):
    deaf = "trap '' INT; "  # as the toolkit is: it gets SIGTERM
    command = train(f"{deaf}{stand_in} 0; echo more to do; exec sleep 600")
    # As in an image that has more in front of `train`.
    host = init("sh", "-c", 'exec "$0"', command, SAGEMAKER_BASE_DIR=str(base_dir))
    host.wait_for("more to do")
    host.signal(signal.SIGINT)
    poll(lambda: "train may finish" in host.err)
    host.signal(signal.SIGINT)
    assert host.wait() == ended_by(signal.SIGINT), host.log()


TOOLKITS = 'ExecuteUserScriptError:\nExitCode {}\nErrorMessage ""\nCommand "..."'


@pytest.mark.parametrize(
    ("said", "before", "after", "left"),
    [
        # no signal came here; a shell script that ends with `sm-launch ... || exit 1`
        ("143 stopped", None, TOOLKITS.format(1), None),
        # of an earlier job; the toolkit writes over none, but the script may have removed it
        ("143 stopped", "of an earlier job", TOOLKITS.format(143), None),
        # a rank that ended with 143 by itself, and a launcher that could not write the file
        ("143", None, TOOLKITS.format(143), TOOLKITS.format(143)),
    ],
)
def test_a_stop_leaves_no_failure_file_of_the_toolkits(
    init, train, stand_in, base_dir, tmp_path, said, before, after, left
):
    failure = base_dir / "output" / "failure"
    if before:
        failure.write_text(before)
    (tmp_path / "text").write_text(after or "")
    command = f"{stand_in} {said}; [ -s text ] && cp text {failure}; exit 1"
    host = init(train(command), SAGEMAKER_BASE_DIR=str(base_dir))
    assert host.wait() == int(said.split()[0]), host.log()
    assert (failure.read_text() if failure.exists() else None) == left


def test_strangers_at_its_socket_hide_no_launcher(init, stand_in, monkeypatch):
    """Garbage, and more idle connections than it has descriptors for."""
    host = init(f"echo $LAUNCHER_INIT; until [ -e go-on ]; do sleep 0.1; done; {stand_in}; exit 1")
    name = poll(lambda: host.out.strip())
    psutil.Process(host.process.pid).rlimit(psutil.RLIMIT_NOFILE, (64, 64))
    with contextlib.ExitStack() as strangers:
        for word in (b"7 stopped\n", os.urandom(1000), None) * 100:
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(BrokenPipeError):  # it has closed it
                stranger.connect("\0" + name.partition(":")[0])
                if word:
                    stranger.send(word)
        monkeypatch.setattr(doctor_checks, "_up_to_the_top", lambda: [9, 1])
        ((level, _),) = doctor_checks.stop(None, {"LAUNCHER_INIT": name})
        assert level == "ok"  # doctor sees that it runs
        open("go-on", "w").close()
        host.wait_for("a launcher is here")
        assert psutil.Process(host.process.pid).num_fds() < 32  # strangers have a quarter of them
        host.signal(signal.SIGTERM)
        assert host.wait(60) == STOPPED, host.log()  # while they are still connected
    assert "heard 15" in host.out


@pytest.mark.parametrize("says", [b"abc", b"1", b"1 2 3", b"\xff", b"-5 0", b"9" * 23 + b" 0"])
def test_a_launcher_whose_report_is_none_was_killed(init, says):
    host = init("echo $LAUNCHER_INIT; while [ ! -e go-on ]; do sleep 0.1; done; exit 1")
    name, _, token = poll(lambda: host.out.strip()).partition(":")
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect("\0" + name)
        launcher.send(token.encode() + b"\n" + says + b"\n")
        assert launcher.recv(1) == b""  # it has closed it
    open("go-on", "w").close()
    assert host.wait() == 137, host.log()
    assert "Traceback" not in host.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("doctor --launcher-no-such", 2),
        ("stacks --no-such", 2),
        ("--train-script=none.py --launcher-dry-run", 2),
        ("--train-script=script.py --launcher-dry-run", 0),
    ],
)
def test_what_runs_no_job_says_nothing_for_the_container(
    init, script, pretend_torch, arguments, code
):
    pretend_torch("2.13.0")
    script("")
    host = init(f"{sys.executable} -m launcher {arguments}; echo ended with $?; exit 1")
    assert host.wait() == 1, host.log()
    assert f"ended with {code}" in host.out and NEVER in host.err, host.log()


def test_a_variable_that_outlived_its_init_does_no_harm(start, script, pretend_torch):
    script("")
    pretend_torch("2.13.0")
    dry_run = ("--train-script", "script.py", "--launcher-dry-run")
    host = start(*dry_run, LAUNCHER_INIT="nobody-listens-here", LAUNCHER_TYPO="1")
    assert host.wait() == 0
    assert "LAUNCHER_TYPO is not a launcher option" in host.err and "LAUNCHER_INIT" not in host.err
