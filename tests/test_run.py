"""One host, real torchrun, real processes: what reaches the ranks and how a job ends."""

import contextlib
import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
from conftest import LAUNCHER, REPO, TRAIN_DDP, ended_by, free_port, poll
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.job.arguments import parse
from launcher.job.cluster import Cluster
from launcher.job.plan import RANK, make_plan
from launcher.job.resources import Resources

pytestmark = pytest.mark.torch

TWO_RANKS = ("--launcher-nproc-per-node", "2")

ARGUMENTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=10),
        st.text(st.sampled_from(" '\"$\\{}-=\n\tab"), max_size=10),
        st.sampled_from(
            ["--log", "--node", "--run", "--rdzv", "--l", "-m", "-t", "--t", "--train"]
        ),
        st.sampled_from(["--", "$$", "${local_rank}", "${rank}", "$local_rank", "--help", "é"]),
    ),
    max_size=8,
)


@settings(
    deadline=None,
    max_examples=1000,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(arguments=ARGUMENTS)
def test_any_arguments_go_through_torchruns_own_parser_unchanged(tmp_path, arguments):
    from torch.distributed.elastic.utils import macros
    from torch.distributed.run import config_from_args, parse_args

    if any(word.startswith("--launcher-") for word in arguments):
        return
    chosen = parse(["--train-script", "t.py", *arguments], {})
    resources = Resources(sys.executable, (2, 4), 1, frozenset(), efa=False)
    plan = make_plan(chosen, Cluster(("h",), "h", "j", 0, 0, ""), resources, {}, added={})
    with mock.patch("tempfile.tempdir", str(tmp_path)):  # it makes a folder for logs
        _, _, words = config_from_args(parse_args([*plan.argv[2:]]))
    # What the agent does with each rank's arguments before it starts it (_start_workers).
    assert macros.substitute(words, "0")[1:] == [RANK, "script", "t.py", *arguments]


def test_arguments_reach_the_script_byte_for_byte(start, script):
    arguments = ["a b", "'\"", "$HOME", "$$", "${rank}", "${local_rank}", "\n", "", "é\udcff", "-x"]
    arguments += ["--", "--log", "1", "--node", "--run", "--l", "--t", "--train", "x", "--help"]
    arguments += ["--nproc-per-node", "7", "-m", "local"]
    path = script("import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])")
    host = start("--train-script", path, *arguments)
    assert host.wait() == 0, host.log()
    assert host.out == f"{[os.fsencode(word) for word in arguments]}\n"


LEAVE_A_FILE = "import os; open('rank-' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [({"SM_NUM_GPUS": "0"}, 1), ({"PET_NPROC_PER_NODE": "3"}, 3), ({"SM_NUM_NEURONS": "2"}, 2)],
    ids=["a CPU host", "PET_ variable", "Neuron cores"],
)
def test_the_number_of_ranks(start, script, tmp_path, environ, ranks):
    host = start("--train-script", script(LEAVE_A_FILE), **environ)
    assert host.wait() == 0, host.log()
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {
        f"rank-{rank}": str(ranks) for rank in range(ranks)
    }
    assert host.leftovers() == []


def test_a_module(start, script, tmp_path):
    (tmp_path / "package").mkdir()
    script("import sys; print(__spec__.name, sys.argv[1:], sys.path[0])", "package/tool.py")
    host = start("--train-module", "package.tool", "x")
    assert host.wait() == 0, host.log()
    assert host.out == f"package.tool ['x'] {tmp_path}\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_costs_nothing(start, script, closed):
    argv = [*LAUNCHER, "--train-script", script("")]
    host = start("-c", f'exec "$@" {closed}', "sh", *argv, command=["sh"])
    assert host.wait() == 0, host.log()
    assert host.failure is None


def test_the_ranks_environment(start, script):
    names = "'SM_HP_X', 'MASTER_ADDR', 'OMP_NUM_THREADS', 'LAUNCHER_RUN_DIR', 'RANK'"
    path = script(f"import os; print([os.environ.get(name) for name in ({names})])")
    host = start("--train-script", path, SM_HP_X="1", OMP_NUM_THREADS="7")
    assert host.wait() == 0, host.log()
    assert host.out == "['1', 'localhost', '7', None, '0']\n"


def test_stdout_and_stdin_are_the_launchers_own(script):
    path = script("import sys; print(sys.stdout.isatty(), sys.stdin.readline().strip())")
    ours, theirs = pty.openpty()
    argv = [*LAUNCHER, "--train-script", str(path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE)
    _, err = process.communicate(b"typed\n", timeout=60)
    assert process.returncode == 0, err.decode()
    assert os.read(ours, 100) == b"True typed\r\n"
    os.close(ours)
    os.close(theirs)


LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(i * i)

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), num_workers=2, multiprocessing_context=method)
        print(method, [int(x) for x in loader])
"""


def test_data_loader_workers(start, script):
    host = start("--train-script", script(LOADERS))
    assert host.wait() == 0, host.log()
    assert host.out == "".join(f"{m} [0, 1, 4, 9]\n" for m in ("fork", "spawn", "forkserver"))
    assert host.leftovers() == []


def test_two_jobs_on_one_machine_do_not_collide(start):
    job = ("--train-script", TRAIN_DDP, "--epochs", "1", *TWO_RANKS)
    hosts = [start(*job, SM_MODEL_DIR=f"model-{number}") for number in range(2)]
    for host in hosts:
        assert host.wait() == 0, host.log()


def test_the_launcher_never_imports_torch(start, script):
    path = script("import torch, time; print('ready', flush=True); time.sleep(60)")
    host = start("--train-script", path)
    host.wait_for("ready")
    assert "torch" not in Path(f"/proc/{host.process.pid}/maps").read_text()
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM)


def test_a_dry_run_can_be_pasted_and_run(start, script, tmp_path):
    path = script("import sys; print(sys.argv[1:]); open('rank', 'w')")
    host = start("--train-script", path, "--launcher-dry-run", "a b", "$$")
    assert host.wait() == 0, host.log()
    assert not (tmp_path / "rank").exists()
    done = subprocess.run(["sh", "-c", host.out], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['a b', '$$']\n"), done.stderr


def test_the_log_folder(start, script, tmp_path):
    host = start("--train-script", script("print('hello')"), "--launcher-log-dir", "logs")
    assert host.wait() == 0, host.log()
    logs = list((tmp_path / "logs").rglob("stdout.log"))
    assert [path.read_text() for path in logs] == ["hello\n"]
    assert "hello" in host.out


def test_hyperparameters_as_long_as_sagemaker_allows(start, script, tmp_path):
    """Linux takes no variable of 128 KiB, and some repeat all of them, as JSON."""
    values = {f"key{number}": '\u00e9"' * 1200 for number in range(60)}
    config = tmp_path / "ml" / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(values))
    (config / "resourceconfig.json").write_text('{"current_host": "a", "hosts": ["a"]}')
    (config / "inputdataconfig.json").write_text("{}")
    path = script(
        "import json, os, sys\n"
        "variables = {n: v for n, v in os.environ.items() if n.startswith('SM_HP_')}\n"
        "json.dump([variables, sys.argv[1:]], open('seen', 'w'))\n"
    )
    host = start("--train-script", path, SAGEMAKER_BASE_DIR=str(tmp_path / "ml"))
    assert host.wait() == 0, host.log()[:2000]
    variables, arguments = json.loads((tmp_path / "seen").read_text())
    assert variables == {f"SM_HP_{key.upper()}": value for key, value in values.items()}
    assert sorted(arguments[1::2]) == list(values.values())
    assert "128 KiB: SM_HPS, SM_TRAINING_ENV, SM_USER_ARGS; SM_HP_NAME has each" in host.err


# How a job fails

FAIL = """
import os, signal, sys, time

def inner():
    {end}

rank = int(os.environ["RANK"])
if rank == 1:
    inner()
print("ready", flush=True)
time.sleep(60)
"""
ENDS = [
    (
        "raise ValueError('loss is nan\\nat step 17')",
        1,
        "failed with ValueError: loss is nan at step 17",
    ),
    ("sys.exit(3)", 3, "ended with exit code 3"),
    ("sys.exit('no data')", 1, "exited: no data"),
    ("os._exit(4)", 4, "ended with exit code 4"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV (signal 11)"),
    ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL (signal 9)"),
    ("os.kill(os.getpid(), signal.SIGTERM)", 143, "was killed by SIGTERM (signal 15)"),
    ("import nowhere_to_be_found", 1, "failed with ModuleNotFoundError: No module named"),
]


@pytest.mark.parametrize(("end", "code", "says"), ENDS, ids=[row[0] for row in ENDS])
def test_the_first_rank_to_fail_gives_the_exit_code_and_the_text(start, script, end, code, says):
    path = script(FAIL.format(end=end))
    host = start("--train-script", path, *TWO_RANKS)
    assert host.wait() == code, host.log()
    head, details, *frames = host.failure.splitlines()
    assert head.startswith(f"localhost, rank 1 (local rank 1) {says}")
    assert details.startswith(f"exit code {code}, ")
    assert "first of" not in details  # rank 0 was ended by the stop
    assert "torch/distributed" not in host.failure and "launcher" not in host.failure
    if "raise" in end or "import" in end:
        assert frames[0] == "Traceback (most recent call last):"
        assert f'File "{path}", line' in frames[1] and "inner()" in host.failure
    assert f"launcher: {head}\n" in host.err
    assert host.leftovers() == []


def test_a_traceback_on_stderr_is_the_scripts_own(start, script):
    path = script("def f():\n    raise KeyError('x')\nf()\n")
    host = start("--train-script", path)
    assert host.wait() == 1
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert plain.stderr in host.err


def test_a_rank_that_dies_in_a_collective_is_named_not_its_echo(start, script):
    path = script(
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    host = start("--train-script", path, *TWO_RANKS)
    assert host.wait() == 137, host.log()
    assert host.failure.startswith("localhost, rank 1 (local rank 1) was killed by SIGKILL")


def test_a_failure_file_that_is_there_is_left_alone(start, script, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "failure").write_text("the first")
    host = start("--train-script", script("1 / 0"), SM_OUTPUT_DIR=str(folder))
    assert host.wait() == 1
    assert (folder / "failure").read_text() == "the first"
    assert f"{folder}/failure exists already" in host.err


def test_a_missing_output_folder_costs_a_warning(start, script, tmp_path):
    host = start("--train-script", script("raise SystemExit(5)"), SM_OUTPUT_DIR="/nowhere")
    assert host.wait() == 5
    assert "warning: cannot write /nowhere/failure" in host.err


SLOW_SIBLING = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    def save(*_):
        time.sleep(float(sys.argv[1]))
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    open("armed", "w").close()
    time.sleep(100)
while not os.path.exists("armed"):
    time.sleep(0.01)
raise ValueError("first")
"""


@pytest.mark.parametrize(("seconds", "saved"), [("2", True), ("100", False)])
def test_a_sibling_has_the_failure_grace_to_save(start, script, seconds, saved):
    options = (*TWO_RANKS, "--launcher-failure-grace", "5")
    host = start("--train-script", script(SLOW_SIBLING), seconds, *options)
    assert host.wait(28) == 1, host.log()  # torchrun alone waits for 30 s
    assert ("saved" in host.out) is saved
    assert host.failure.startswith("localhost, rank 1 (local rank 1) failed with ValueError: first")
    assert host.leftovers() == []


def test_a_failed_rank_that_is_slow_to_end_leaves_the_others_their_time(start, script):
    # torchrun tells the siblings only when the failed process is gone.
    path = script(
        "import atexit, os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(2); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('armed', 'w').close(); time.sleep(100)\n"
        "while not os.path.exists('armed'): time.sleep(0.01)\n"
        "atexit.register(lambda: (time.sleep(float(sys.argv[1])), print('uploaded', flush=True)))\n"
        "raise ValueError('first')\n"
    )
    for seconds, uploaded in (("2", 1), ("100", 0)):
        (path.parent / "armed").unlink(missing_ok=True)
        options = (*TWO_RANKS, "--launcher-failure-grace", "4")
        host = start("--train-script", path, seconds, *options)
        assert host.wait(40) == 1, host.log()
        assert host.out.count("uploaded") == uploaded
        assert ("--launcher-failure-grace sets its time to end" in host.err) is not bool(uploaded)
        assert "saved" in host.out, host.log()
        assert host.failure.startswith("localhost, rank 1 (local rank 1) failed with ValueError")
        assert host.leftovers() == []


def test_a_rank_that_became_another_program(start, script):
    path = script(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'raise SystemExit(7)'])\n"
        "time.sleep(100)\n"
    )
    host = start("--train-script", path, *TWO_RANKS)
    assert host.wait() == 7, host.log()
    assert host.failure.startswith("localhost, rank 1 (local rank 1) ended with exit code 7")


def test_a_restarted_rank_is_no_failure(start, script):
    path = script(
        "import os, sys\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 9)\n"
    )
    host = start("--train-script", path, "--launcher-max-restarts", "1")
    assert host.wait() == 0, host.log()
    assert host.out == "attempt 0\nattempt 1\n"
    assert "rank 0 (local rank 0) ended with exit code 9; restarting all ranks." in host.err
    assert host.failure is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
        ("--role x other.py", "unrecognized arguments: other.py"),
        ("--help", "its arguments ask for its help, not for a job"),
    ],
)
def test_arguments_that_torchrun_does_not_take(start, script, arguments, says):
    path = script("print('ran')")
    script("print('ran')", "other.py")
    host = start("--train-script", path, f"--launcher-torchrun-args={arguments}")
    assert host.wait() == 2, host.log()
    assert host.failure.startswith(f"localhost: torchrun failed: {says}")
    assert "usage" not in host.err and host.out == ""


def test_without_peers_a_port_that_is_taken(start, script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.1"}
        options = ("--launcher-rdzv-port", port, "--launcher-peers", "false")
        host = start("--train-script", script(""), *options, **cluster)
        assert host.wait() == 69, host.log()
    assert host.failure.startswith(
        f"127.0.0.1: the rendezvous port of 127.0.0.1:{port} is taken on this host; "
        "choose another with --launcher-rdzv-port"
    )


def test_without_peers_a_host_that_never_comes(start, script):
    cluster = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.1"}
    options = ("--launcher-start-timeout", "3", "--launcher-rdzv-port", free_port())
    options += ("--launcher-peers", "false")
    host = start("--train-script", script(""), *options, **cluster)
    assert host.wait() == 69, host.log()
    assert host.failure.startswith("127.0.0.1: the hosts did not all meet at 127.0.0.1:")
    assert "expected 127.0.0.1, 127.0.0.2" in host.failure


def test_a_torchrun_that_is_killed_takes_its_ranks_along(start, script):
    path = script("import time; print('ready', flush=True); time.sleep(100)")
    host = start("--train-script", path, *TWO_RANKS)
    host.wait_for("ready", 2)
    (agent,) = psutil.Process(host.process.pid).children()
    agent.kill()
    assert host.wait() == 69, host.log()
    assert host.failure.startswith("localhost: torchrun was killed by SIGKILL (signal 9)")
    assert host.leftovers() == []


# How a job is stopped

COUNT = """
import os, signal, sys, time
heard = []
def stop(number, frame):
    heard.append(number)
    os.write(1, b"heard %d\\n" % number)  # at once: ranks share the file
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
os.write(1, b"ready\\n")
while not heard:
    time.sleep(0.01)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.01)
os.write(1, b"saved after %d\\n" % len(heard))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", ["0", "7"])
def test_a_stop_reaches_every_rank_once_and_leaves_it_time(start, script, number, code):
    host = start("--train-script", script(COUNT), "2", code, *TWO_RANKS)
    host.wait_for("ready", 2)
    # To the launcher's process group, as a terminal and `tini -g` do it.
    os.killpg(host.process.pid, number)
    host.wait_for(f"heard {int(number)}", 2, timeout=10)
    host.signal(number)  # impatience does not shorten a save
    assert host.wait() == ended_by(number), host.log()
    assert host.out.count("heard") == 2
    assert host.out.count("saved after 1") == 2
    assert host.failure is None
    assert host.leftovers() == []
    if code == "7":
        assert "while stopping: localhost, rank 0 (local rank 0) ended with exit code 7" in host.err


def test_a_third_interrupt_within_2_s_kills_at_once(start, script):
    host = start("--train-script", script(COUNT), "100", "0", *TWO_RANKS)
    host.wait_for("ready", 2)
    for _ in range(3):
        host.signal(signal.SIGINT)
        time.sleep(0.2)
    assert host.wait(20) == ended_by(signal.SIGINT), host.log()
    assert "SIGINT for the third time within 2 s: killing the job at once." in host.err
    assert "saved" not in host.out
    assert host.leftovers() == []


def test_a_child_that_saves_has_the_grace_of_a_stop(start, script):
    """A script that only starts another dies of SIGTERM at once; the other one saves."""
    child = script(COUNT, "child.py")
    wrapper = f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}, '8', '0'])"
    host = start("--train-script", script(wrapper, "wrapper.py"))
    host.wait_for("ready")
    host.signal(signal.SIGTERM)
    assert host.wait() == ended_by(signal.SIGTERM), host.log()
    assert "saved" in host.out, host.log()
    assert host.leftovers() == []


def test_ranks_that_ignore_a_stop_are_killed_when_the_grace_is_over(start, script):
    host = start("--train-script", script(COUNT), "100", "0", *TWO_RANKS, "--launcher-grace", "1")
    host.wait_for("ready", 2)
    host.signal(signal.SIGTERM)
    assert host.wait(25) == ended_by(signal.SIGTERM), host.log()
    assert "saved" not in host.out
    assert host.failure is None
    assert host.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_torchrun_starts(start, script, number):
    path = script("import time; print('ready', flush=True); time.sleep(100)")
    host = start("--train-script", path, *TWO_RANKS)
    poll(lambda: psutil.Process(host.process.pid).children(), every=0.01)
    host.signal(number)
    assert host.wait() == ended_by(number), host.log()
    assert host.failure is None
    assert host.leftovers() == []


def test_a_stop_at_any_moment_of_the_start_leaves_nothing(start, script):
    # From before the handlers are there to after the ranks run.
    for delay in (0.0, 0.05, 0.1, 0.3, 0.8, 1.0, 1.2, 1.4, 1.6):
        host = start("--train-script", script("import time; time.sleep(100)"), *TWO_RANKS)
        with pytest.raises(subprocess.TimeoutExpired):
            host.process.wait(delay)
        host.signal(signal.SIGTERM)
        assert host.wait() == ended_by(signal.SIGTERM), host.log()
        assert host.failure is None
        assert host.leftovers() == [], host.log()


def test_without_peers_a_stop_while_the_first_host_is_missing(start, script):
    # torchrun waits for it in C++, where Python's own handlers do not run.
    cluster = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.2"}
    for number in (signal.SIGINT, signal.SIGTERM):
        options = ("--launcher-rdzv-port", free_port(), "--launcher-peers", "false")
        host = start("--train-script", script(""), *options, **cluster)
        poll(lambda: "libtorch" in maps_of_agent(host), every=0.1)  # noqa: B023
        with pytest.raises(subprocess.TimeoutExpired):
            host.process.wait(2)
        host.signal(number)
        assert host.wait(20) == ended_by(number), host.log()
        assert "Traceback" not in host.err
        assert host.leftovers() == []


def maps_of_agent(host):
    for child in psutil.Process(host.process.pid).children():
        return Path(f"/proc/{child.pid}/maps").read_text()
    return ""


def test_signals_that_were_ignored_or_blocked_by_the_parent(start, script):
    path = script(COUNT)
    for spoil in ("signal(SIGCHLD, SIG_IGN)", "pthread_sigmask(SIG_BLOCK, [SIGCHLD, SIGTERM])"):
        code = f"import os, sys; from signal import *; {spoil}; os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", code, *LAUNCHER]
        host = start("--train-script", path, "0", "0", command=command)
        host.wait_for("ready")
        host.signal(signal.SIGTERM)
        assert host.wait(30) == ended_by(signal.SIGTERM), host.log()
        assert "saved after 1" in host.out
        host = start("--train-script", script("print('done')", "other.py"), command=command)
        assert host.wait(30) == 0, host.log()


def test_a_launcher_that_is_killed_takes_its_job_along(start, script):
    host = start("--train-script", script(COUNT), "0", "0", *TWO_RANKS)
    host.wait_for("ready", 2)
    host.signal(signal.SIGKILL)
    assert host.wait() == ended_by(signal.SIGKILL)
    poll(lambda: not host.processes(), timeout=30)
    assert host.out.count("saved after 1") == 2  # torchrun passed SIGTERM on


def test_children_that_are_not_the_jobs_are_left_alone(start, script):
    path = script("import os, time; print('ran', flush=True)")
    shell = f"sleep 100 & exec {shlex.join([*LAUNCHER, '--train-script', str(path)])}"
    host = start(command=["sh", "-c", shell])
    assert host.wait(30) == 0, host.log()
    assert [process.name() for process in host.processes()] == ["sleep"]


GRANDCHILDREN = """
import os, subprocess, sys
argv = [sys.executable, "-c", "import time; time.sleep(1000)"]
subprocess.Popen(argv)
subprocess.Popen(argv, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, argv)  # a daemon: its parent is gone
    os._exit(0)
os.wait()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", ["0", "3"])
def test_no_grandchild_outlives_the_job(start, script, code):
    host = start("--train-script", script(GRANDCHILDREN), code)
    assert host.wait() == int(code), host.log()
    assert host.leftovers() == []
    assert host.err.count("which the job left behind") == 3


def test_a_long_message_is_cut_to_what_sagemaker_shows(start, script):
    path = script(f"raise ValueError({json.dumps('é' * 3000)})")
    host = start("--train-script", path)
    assert host.wait() == 1
    assert host.failure.startswith("localhost, rank 0 (local rank 0) failed with ValueError: éé")
    assert len(host.failure) <= 1024 and f'File "{path}", line 1' in host.failure


def test_the_command_in_a_shell(start, script):
    path = script("import sys; print(sys.argv[1:])")
    command = ["sh", "-c", shlex.join([*LAUNCHER, "--train-script", str(path), "*", "~"])]
    host = start(command=command)
    assert host.wait() == 0, host.log()
    assert host.out == "['*', '~']\n"


def test_no_descriptor_is_left_when_torchrun_dies(start, script):
    host = start("--train-script", script("print('runs', flush=True); import time; time.sleep(99)"))
    host.wait_for("runs")
    launcher = psutil.Process(host.process.pid)
    (torchrun,) = launcher.children()
    last = max(int(fd) for fd in os.listdir(f"/proc/{launcher.pid}/fd"))
    launcher.rlimit(psutil.RLIMIT_NOFILE, (last + 1, last + 1))
    (folder,) = (path for path in os.listdir(host.tmp) if path.startswith("sm-launch-"))
    with contextlib.ExitStack() as ranks:  # many, which wait for a descriptor
        for _ in range(50):
            rank = ranks.enter_context(socket.socket(socket.AF_UNIX))
            rank.connect(os.path.join(host.tmp, folder, "socket"))
        torchrun.kill()
        assert host.wait() == 69, host.log()
    assert host.failure.startswith("localhost: torchrun was killed by SIGKILL (signal 9)\n")
    assert host.leftovers() == []


EXECUTE = """
import sys
from launcher.job.cluster import Cluster
from launcher.job.plan import LaunchPlan
from launcher.peers.messages import Job
from launcher.run import supervisor
from launcher.signals import Signals
from launcher.system import System

plan = LaunchPlan((sys.argv[1],), {}, Cluster(("h",), "h", "j", 0, 0, ""), "1", "h:1", 1, ())
with Signals() as signals, System(signals) as system:
    result = supervisor.run(Job("h", ("h",)), plan, {}, system).result
sys.exit(f"{result.text.strip()} {result.exit_code}")
"""


@pytest.mark.parametrize(
    ("command", "says"),
    [("/nowhere", "/nowhere was not found. 127"), ("/etc/passwd", "Permission denied. 126")],
)
def test_a_command_that_cannot_be_executed(command, says):
    done = subprocess.run([sys.executable, "-c", EXECUTE, command], capture_output=True, text=True)
    assert done.stderr.endswith(says + "\n")


def test_a_line_of_the_log_is_one_write():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "from launcher.log import log; log('said at once')"
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    assert ours.recv(1000) == b"launcher: said at once\n"
    ours.close()
    theirs.close()


@pytest.mark.more
def test_the_benchmark_still_runs():
    argv = [sys.executable, str(REPO / "benchmarks" / "overhead.py"), "--pairs", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n|") == 12  # ten figures below the head
