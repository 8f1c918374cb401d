"""`sm-launch local`: jobs of several hosts on this machine, as people start them."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import LAUNCHER, completed, has_ended, poll
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.host import folders as job_dir
from launcher.job import resources, toolkit
from launcher.result.causes import of_error
from launcher_tools import local as tool
from launcher_tools import local_options, local_setup
from launcher_tools.local_hosts import Host, Loop
from launcher_tools.local_output import Log
from launcher_tools.local_setup import Share, as_hyperparameters, environment

LOCAL = [*LAUNCHER, "local"]
HOSTS = ("algo-1", "algo-2", "algo-3")
torch = pytest.mark.torch


def local(*args, code=0, **environ):
    return completed(*LOCAL, *args, code=code, **environ)


# What is decided


START = "--late algo-1@0, --late algo-2@0, --late algo-3@0"
STOPS = {"stop": ["@30", "algo-1@.5"], "late": ["algo-1@0.25"]}
STOPPED = "--late algo-2@0, --late algo-3@0, --late algo-1@0.25, --stop algo-1@0.5, --stop @30"
TOGETHER = "--late algo-1@0, --late algo-3@0, --late algo-2@1, --stop @1, --kill algo-3@1"


@pytest.mark.parametrize(
    ("typed", "events"),
    [
        ({}, START),
        ({"kill": ["algo-2@20"]}, f"{START}, --kill algo-2@20"),
        (STOPS, STOPPED),
        # At one time: the start first, the kill last.
        ({"kill": ["algo-3@1"], "stop": ["@1"], "late": ["algo-2@1"]}, TOGETHER),
    ],
)
def test_the_schedule(typed, events):
    made = local_options.schedule(HOSTS, {"late": [], "stop": [], "kill": [], **typed})
    assert ", ".join(event.typed for event in made) == events


@pytest.mark.parametrize(
    ("args", "passed", "refused"),
    [
        ([], {}, ""),
        (["--lr", "0.1", "--epochs=3", "-b", "8"], {"lr": "0.1", "epochs": "3", "b": "8"}, ""),
        (["--t", "a b", "--no", "", "--q", "x=y"], {"t": "a b", "no": "", "q": "x=y"}, ""),
        (["--flag"], {}, "--flag"),
        (["--lr", "1", "key=value"], {}, "key=value"),  # hydra's
        (["--lr", "1", "--lr", "2"], {}, "--lr"),
        (["--sagemaker_program", "x"], {}, "--sagemaker_program"),
        (["-3", "x"], {}, "-3"),
    ],
)
def test_which_arguments_are_hyperparameters(args, passed, refused):
    assert as_hyperparameters(args) == (passed, refused)


@given(st.dictionaries(st.from_regex(r"[a-z]{2,9}", fullmatch=True), st.text("ab=\" -'{1}")))
def test_text_reaches_the_script_as_it_is_or_a_change_is_said(values):
    args = [f"--{name}={value}" for name, value in values.items()]
    passed, refused = as_hyperparameters(args)
    assert (passed, refused) == (values, "")
    decoded = {name: toolkit.decoded(value) for name, value in passed.items()}
    rendered = toolkit.to_cmd_args(decoded)
    same = dict(zip(rendered[::2], rendered[1::2])) == {f"--{n}": v for n, v in values.items()}
    assert same == (not local_setup.changes(args, passed))


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], []),
        ([b"a", b"b\n", b"c"], [b"ab"], [b"c"]),
        ([b"a\r\n", b"\r\n"], [b"a", b""], []),
        ([b"a\r", b"\nb\n"], [b"a", b"b"], []),
        ([b"\r 1%", b"\r 50%", b"\r100%\n"], [b"100%"], []),
        ([b" 1%\r", b" 50%\r"], [], [b" 50%"]),
        ([b"\xff\xfe\n", b"\xe4"], [b"\xff\xfe"], [b"\xe4"]),
        ([b"x" * 65536, b"y\n"], [b"x" * 65536 + b"y"], []),
        ([b"x" * 65537, b"y\n"], [b"x" * 65536, b"xy"], []),
        ([b"\r" + b"%06d" % n for n in range(20000)], [], [b"019999"]),
    ],
)
def test_lines_and_bars(pieces, lines, rest):
    stream = Log(1, 1, os.devnull, b"")
    assert [line for piece in pieces for line in stream.feed(piece)] == lines
    assert stream.end() == rest
    assert stream.bar == b""


def test_more_hosts_than_cores_share_them():
    assert local_setup.divided("ab", 3) == [["a"], ["b"], ["a"]]


# As nvidia-smi -L lists them: four GPUs; one in MIG mode, its second slice as drivers before R470
# have it, and one that is not.
FOUR = "".join(f"GPU {n}: A10G (UUID: GPU-{n}{c})\n" for n, c in enumerate("abcd"))
MIXED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-0)
  MIG 3g.20gb     Device  0: (UUID: MIG-a)
  MIG 3g.20gb Device 1: (UUID: MIG-GPU-0/2/0)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
"""


@pytest.mark.parametrize(
    ("listed", "hosts", "visible", "gpus"),
    [
        # Of four: hosts of SageMaker's are equal.
        (FOUR, 3, None, [("GPU-0a",), ("GPU-1b",), ("GPU-2c",)]),
        (FOUR, 2, "3,1,2,0", [("GPU-3d", "GPU-1b"), ("GPU-2c", "GPU-0a")]),
        (FOUR, 1, "GPU-2c,7,0", [("GPU-2c",)]),  # CUDA ignores what follows an invalid one
        (FOUR, 2, "", [None, None]),
        # Of three: a host has as many as another.
        (MIXED, 2, None, [("MIG-a",), ("MIG-GPU-0/2/0",)]),
        (MIXED, 3, None, [("MIG-a",), ("MIG-GPU-0/2/0",), ("GPU-1",)]),
        (MIXED, 1, "GPU-0", [("MIG-a", "MIG-GPU-0/2/0")]),
    ],
)
def test_gpus_are_divided(program, listed, hosts, visible, gpus):
    environ = program("nvidia-smi", f"cat <<X\n{listed}X")
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert [share.gpus for share in local_setup.shares(hosts, environ)] == gpus


def test_options_behind_the_script_are_named():
    meant = ["--hosts", "3", "--kill=algo-2@20", "--late", "@5"]
    others = ["--hosts", "a,b", "--kill", "9", "--run-dir", "x", "--stop", "--doctor", "--hosts"]
    named = [*local_options.meant_for_local([*meant, *others])]
    assert named == ["--hosts 3", "--kill=algo-2@20", "--late @5"]


def test_another_jobs_variables_do_not_leak():
    names = ("SM_HOSTS", "SM_HP_LR", "SAGEMAKER_JOB_NAME", "CURRENT_HOST", "TRAINING_JOB_ARN")
    others = {**dict.fromkeys((*names, "LAUNCHER_INIT"), "x"), "HOME": "/root", "PYTHONPATH": "a:b"}
    share = Share("127.0.0.1", frozenset({0, 1}), 1, ("GPU-a",))
    made = environment({**others, "LAUNCHER_PEER_PORT": "7"}, "algo-1", "job", share, ["1", "2"])
    assert made == {
        "HOME": "/root",
        "SAGEMAKER_BASE_DIR": os.path.abspath("algo-1"),
        "TRAINING_JOB_NAME": "job",
        "TRAINING_JOB_ARN": "arn:aws:sagemaker:local:000000000000:training-job/job",
        "SM_NUM_GPUS": "1",
        "SM_NUM_CPUS": "2",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "PYTHONPATH": f"{os.getcwd()}:a:b",
        "PYTHONUNBUFFERED": "1",
        "LAUNCHER_RDZV_PORT": "1",
        "LAUNCHER_PEER_PORT": "7",
    }


def test_a_run_folder_that_is_in_use_is_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    made = [
        local_setup.make_run_dir(name, "algo-1") for name in ("new/er", "empty", "new/er/", "file")
    ]
    assert made == ["new/er", "empty", "new/er-2", "file-2"]
    assert local_setup.make_run_dir("new/er", "algo-1") == "new/er-3"
    assert (tmp_path / "file").read_text() == "mine"


def test_after_a_kill_no_links_are_followed(tmp_path):
    """Anybody can make an entry of that name in /tmp."""
    precious = tmp_path / "mine" / "below" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    left = tmp_path / "shared" / "sm-launch-77-1"
    left.parent.mkdir()
    left.symlink_to(tmp_path / "mine")
    job_dir.remove_left(77, {"TMPDIR": str(left.parent)})
    assert left.is_symlink() and precious.exists()
    left.unlink()
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "link").symlink_to(tmp_path / "mine")
    (left / "link").symlink_to(precious)
    job_dir.remove_left(77, {"TMPDIR": str(left.parent)})
    assert precious.exists() and not left.exists()


# Bad input


WRONG = [
    ([], "found no script after --; expected"),
    (["--hosts", "2", "train.py", "--x"], "-- is missing before train.py; expected"),
    (["--hosts", "0", "--", "script.py"], "--hosts is '0'; expected a whole number from 1 to"),
    (["--verbose", "--", "script.py"], "--verbose is not an option; see"),
    (["--launcher-grace", "9", "--", "script.py"], "--launcher-grace goes after --; see"),
    (["--nproc-per-node", "0", "--", "script.py"], "--nproc-per-node is '0'; expected auto"),
    (["--", "none.py"], "none.py: there is no such file"),
    (["--", "-m", "no_such"], "no_such: there is no such module"),
    (["--", "script.py", "--launcher-zzz", "3"], "--launcher-zzz is not a launcher option"),
    (["--channel", "train", "--", "script.py"], "--channel is 'train'; expected NAME=DIR"),
    (["--channel", "a=none", "--", "script.py"], "--channel a: none does not exist; expected a"),
    (["--channel", "a=.", "--channel", "a=.", "--", "x"], "--channel a is given twice"),
    (["--kill", "algo-3@2", "--", "script.py"], "--kill algo-3@2 names 'algo-3'; the hosts are"),
    (["--kill", "@2", "--", "script.py"], "--kill @2 names no host"),
    (["--stop", "30", "--", "script.py"], "--stop is '30'; expected HOST@SECONDS such as algo-1@3"),
    (["--late", "algo-1@1", "--late", "algo-1@2", "--", "x"], "--late is given twice for algo-1"),
    (["--late", "algo-1@3", "--kill", "algo-1@2", "--", "x"], "--kill algo-1@2 is due before --"),
]


def test_the_exit_code_is_a_failed_launchers_before_a_killed_ones():
    def code(*returncodes):
        hosts = [Host(number, frozenset(), "", {}) for number, _ in enumerate(returncodes, 1)]
        for host, returncode in zip(hosts, returncodes):
            host.process = SimpleNamespace(returncode=returncode)
        return tool.result_of(hosts).exit_code

    assert code(0, 0) == 0
    assert code(-9, 69, 0) == 69
    assert code(0, -9) == 137
    assert code(0, None) == 137  # it got SIGKILL, and the kernel cannot end it yet
    assert code() == 143


def test_a_host_whose_folder_has_gone_cannot_start(tmp_path):
    with pytest.raises(LaunchError) as error:
        Host(2, frozenset(), str(tmp_path / "gone"), {}).start([])
    words = "cannot start the launcher of algo-2: No such file or directory."
    assert (str(error.value), error.value.exit_code) == (words, 126)


def test_after_a_stop_of_all_no_late_host_starts():
    late = local_options.Event(30.0, local_options.LATE, "algo-1")
    loop = Loop([], [late], [], signals=None, output=None)
    assert loop._goes_on()
    loop._stop([], everybody=True)
    assert not loop._goes_on()


def test_a_machine_with_one_loopback_address(monkeypatch):
    addresses = {"127.0.0.1": ""}
    monkeypatch.setattr(local_setup, "_problem", lambda host, _: addresses.get(host, "not here"))
    says = r"127.0.0.2 is not .* \(not here\); .* as root: `ip address add 127.0.0.2/8 dev lo`"
    with pytest.raises(LaunchError, match=says):
        local_setup.addresses(3)


def test_two_ports_that_another_job_does_not_choose_at_the_same_time(monkeypatch):
    assert len({port for _ in range(9) for port in local_setup.free_ports()}) > 2
    monkeypatch.setattr(local_setup, "_PORTS", range(20000, 20001))
    with pytest.raises(LaunchError, match="no two ports from 20000 on are free; end programs"):
        local_setup.free_ports()


@pytest.mark.parametrize(("argv", "says"), WRONG, ids=[row[1] for row in WRONG])
def test_bad_input_is_one_line(script, argv, says):
    script("")
    with pytest.raises(LaunchError) as error:
        local_options.parse(argv, {})
    assert says in str(error.value)
    assert of_error(error.value).exit_code == 2


def test_a_mistake_is_one_line_in_the_log_and_leaves_nothing(tmp_path, script, pretend_torch):
    pretend_torch("2.13.0")
    before = sorted(tmp_path.iterdir())
    done = local("--", "none.py", code=2)
    assert (done.stdout, done.stderr) == ("", "launcher: none.py: there is no such file.\n")
    assert sorted(tmp_path.iterdir()) == before
    done = local("--run-dir", "/proc/run", "--", script(""), code=2)
    assert "cannot create the folder /proc/run (" in done.stderr and "--run-dir" in done.stderr
    assert not list((tmp_path / "output").iterdir())  # it is no host, and has no failure file


# What each host gets


def test_each_host_gets_what_sagemaker_gives(tmp_path, script, pretend_torch):
    pretend_torch("2.13.0")
    (tmp_path / "pictures").mkdir()
    done = local(
        *("--hosts", 2, "--nproc-per-node", 3, "--channel", "train=pictures"),
        *("--", script(""), "--launcher-dry-run", "--lr", "1e-3", "--flag=true", "--name", "x"),
        *("--k", "1", "--none", "null", "-f", "2"),
    )
    folder = re.findall(r"runs/local-[\w-]+", done.stdout)[0]
    passed = "--flag true becomes --flag True, --k 1 becomes -k 1, --lr 1e-3 becomes --lr 0.001, "
    passed += "--none null becomes --none ''; sorted by name.\n"
    assert f"as SDK v2 would pass them: {passed}" in done.stderr
    for host in ("algo-1", "algo-2"):
        shown = [line for line in done.stdout.splitlines() if line.startswith(f"{host} | ")]
        said = " ".join(shown).replace("'", "")
        base = tmp_path / folder / host
        assert f"SM_CURRENT_HOST={host} " in said and f"SM_MODEL_DIR={base}/model " in said
        assert (
            'SM_CHANNELS=["train"]' in said
            and " --flag True -k 1 --lr 0.001 --name x --none" in said
        )
        assert "SM_CURRENT_INSTANCE_GROUP=homogeneousCluster " in said
        assert "--nproc-per-node=3 " in said
        assert {path.name for path in base.iterdir()} == {
            *("input", "model", "output", "checkpoints", "code", "stdout.log", "stderr.log")
        }
        assert (base / "output" / "data").is_dir()
        assert (base / "input" / "data" / "train").resolve() == tmp_path / "pictures"
        resources = toolkit.read_config({"SAGEMAKER_BASE_DIR": str(base)}).resource_config
        assert (resources["current_host"], resources["hosts"]) == (host, ["algo-1", "algo-2"])


SHOW = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "SM_CURRENT_HOST", "SM_NUM_GPUS", "OMP_NUM_THREADS"]
seen = {name: os.environ.get(name) for name in names}
seen["cpus"], seen["argv"] = sorted(os.sched_getaffinity(0)), sys.argv[1:]
open(os.path.join(os.environ["SM_MODEL_DIR"], "seen.json"), "w").write(json.dumps(seen))
for step in range(3):
    sys.stderr.write(f"\\r {step}/3")
sys.stderr.write("\\n")
os.write(1, b"\\xff not UTF-8\\n" + b"x" * 5000 + b"\\n")
os.system("echo by its name > /dev/stdout")  # which is a pipe, as on SageMaker: nothing is lost
os.write(1, b"after\\n")
"""
PRINTED = [b"\xff not UTF-8", b"x" * 5000, b"by its name", b"after", b""]


@torch
def test_a_job_of_two_hosts(script, tmp_path):
    """From a folder with spaces, with arguments that SageMaker cannot pass."""
    (tmp_path / "a b").mkdir()
    os.chdir(tmp_path / "a b")
    done = subprocess.run(
        [*LOCAL, "--run-dir", "named", "--", str(script(SHOW)), "--flag"],
        capture_output=True,
        timeout=100,
    )
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode()
    assert done.returncode == 0, out + err
    seen = [json.loads(Path(f"named/algo-{n}/model/seen.json").read_text()) for n in (1, 2)]
    assert [host["RANK"] for host in seen] == ["0", "1"]
    assert [host["SM_CURRENT_HOST"] for host in seen] == ["algo-1", "algo-2"]
    for host in seen:
        assert (host["WORLD_SIZE"], host["argv"]) == ("2", ["--flag"])
    cores = resources.physical_cores()
    parts = [sorted(set().union(*part)) for part in local_setup.divided(cores, 2)]
    assert [host["cpus"] for host in seen] == parts
    assert [host["OMP_NUM_THREADS"] for host in seen] == [str(max(1, len(cores) // 2))] * 2
    assert "the arguments are passed to the script unchanged, but SageMaker could not pass" in err
    for host in ("algo-1", "algo-2"):
        assert Path("named", host, "stdout.log").read_bytes().split(b"\n") == PRINTED
        shown = [line for line in done.stdout.split(b"\n") if line.startswith(host.encode())]
        assert shown == [f"{host} | ".encode() + line for line in PRINTED[:-1]]
        assert f"{host} |  2/3\n" in err  # a progress bar is one line in a file
    assert "  algo-2/model: seen.json\n" in out
    assert "The job succeeded after " in out


SAVES = """
import os, signal, sys, time
def stop(*_):
    for number in range(1000):
        print("saving", number, flush=True)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "saved"), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    print("ready", "." * 5000, flush=True)
    print(f"\\r{time.time()}", end="", file=sys.stderr, flush=True)  # a progress bar
    time.sleep(0.01)
"""


@torch
def test_ctrl_c_in_a_terminal_stops_the_job(script):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(LOCAL[0], [*LOCAL, "--hosts", "1", "--", str(script(SAVES))])
    process = psutil.Process(pid)
    seen = b""

    def wait_for(text):
        nonlocal seen
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], seen
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # it has ended
                raise AssertionError(seen) from None

    try:
        # In colour, the bar on a line that is cleared before, and that does not wrap.
        wait_for(b"\r\x1b[K\x1b[?7l\x1b[0;36malgo-1 | \x1b[0m1")
        os.write(terminal, b"\x03")
        wait_for(b"saving")
        wait_for(b"\r\nThe job was stopped with exit code 143 after ")
        assert process.wait(60) == 143
        assert b"/opt/ml" not in seen  # SageMaker uploads nothing from here
    finally:
        if process.is_running():
            process.kill()
            process.wait(60)
        os.close(terminal)


SAVED = Path("runs/saves/algo-1/model/saved")


@pytest.fixture
def begin(script):
    """Start a job of one host: begin("print(1)", stdout=...) -> its process."""
    started = []

    def begin(text, stdout):
        words = [*LOCAL, "--hosts", "1", "--run-dir", "runs/saves", "--", script(text)]
        started.append(subprocess.Popen(words, stdout=stdout, stderr=subprocess.DEVNULL))
        return started[-1]

    yield begin
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def unread(begin):
    """Start a job whose stdout is a full pipe: its process, and all processes below."""

    def start(text):
        process = begin(text, subprocess.PIPE)
        out = process.stdout.fileno()
        full = fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 4096).to_bytes(4, sys.byteorder)
        poll(lambda: fcntl.ioctl(out, termios.FIONREAD, bytes(4)) == full)
        job = psutil.Process(process.pid).children(recursive=True)
        assert len(job) >= 3  # launcher, torchrun, rank
        return process, job

    return start


def are_gone(processes):
    return all(has_ended(process.pid) for process in processes)


def end_by(process, number):
    """Send a signal again and again; return the exit code."""

    def has_ended():
        process.send_signal(number)
        return process.poll() is not None

    poll(has_ended)
    return process.returncode


@torch
def test_what_nobody_reads_at_first_is_all_there_later(unread):
    process, job = unread(SAVES)
    process.send_signal(signal.SIGTERM)
    poll(SAVED.exists)
    out = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 143 and are_gone(job)
    assert [f"saving {n}" for n in range(1000)] == re.findall(r"saving \d+", out)
    saved, drawn = out.splitlines()[-2:]
    assert saved == "  algo-1/model: saved" and drawn.startswith("  timeline.html: ")


@torch
def test_a_second_stop_kills_a_job_whose_output_nobody_reads(unread):
    process, job = unread(SAVES.replace("sys.exit(0)", "time.sleep(600)"))
    process.send_signal(signal.SIGINT)
    poll(SAVED.exists)
    process.send_signal(signal.SIGINT)
    poll(lambda: are_gone(job))
    assert end_by(process, signal.SIGINT) == 137


@torch
def test_a_rank_saves_though_local_is_killed(unread):
    """Its prints go on: what reads them is no longer needed. Then all of the job ends."""
    process, job = unread(SAVES)
    process.kill()
    process.communicate()
    poll(lambda: SAVED.exists() and are_gone(job))
    assert os.listdir(os.environ["TMPDIR"]) == []


PRINTS = "import os, time\nwhile True:\n    os.write(1, b'\\n' * 9000)\n    time.sleep(1e-3)\n"


@torch
def test_a_stop_is_seen_amid_output_without_end(begin):
    """Lines come faster than they can be printed, and are read."""
    process = begin(PRINTS, subprocess.DEVNULL)
    log = Path("runs/saves/algo-1/stdout.log")
    poll(lambda: log.exists() and log.stat().st_size > 1 << 20)
    process.send_signal(signal.SIGTERM)
    poll(lambda: not psutil.Process(process.pid).children(recursive=True))
    assert end_by(process, signal.SIGTERM) == 143  # which ends the printing, too
