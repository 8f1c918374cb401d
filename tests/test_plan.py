"""From what is known to one torchrun command."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from launcher import __version__
from launcher.errors import LaunchError
from launcher.job import arguments, prepare
from launcher.job.cluster import read_cluster
from launcher.job.job import Cluster, Job
from launcher.job.plan import STUB, command, make_plan, parser_of
from launcher.job.resources import Resources
from launcher.result.causes import of_error

# As in torch/distributed/run.py, of 2.13.
PARSER = """
parser.add_argument("--nproc-per-node", "--nproc_per_node", action=env, type=str, default="1")
parser.add_argument("--rdzv-backend", "--rdzv_backend", action=env, type=str, default="static")
parser.add_argument("--rdzv-conf", "--rdzv_conf", action=env, type=str, default="")
parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint", action=env, type=str, default="")
parser.add_argument("--standalone", action=check_env)
parser.add_argument("--max-restarts", "--max_restarts", action=env, type=int, default=0)
parser.add_argument("--start-method", action=env, type=str, choices=["spawn", "fork"])
parser.add_argument("--role", action=env, type=str, default="default")
parser.add_argument("-m", "--module", action=check_env)
parser.add_argument("--no-python", "--no_python", action=check_env)
parser.add_argument("--run-path", "--run_path", action=check_env)
parser.add_argument("--log-dir", "--log_dir", action=env, type=str)
parser.add_argument("-r", "--redirects", action=env, type=str, default="0")
parser.add_argument("-t", "--tee", action=env, type=str, default="0")
parser.add_argument("--log-line-prefix-template", type=str)
parser.add_argument("--numa-binding", type=str, choices=[mode.value for mode in AffinityMode])
parser.add_argument("--shutdown-timeout", "--shutdown_timeout", action=env, type=int)
parser.add_argument("training_script", type=str)
parser.add_argument("training_script_args", nargs=REMAINDER)
"""
RESOURCES = Resources(
    python=sys.executable,
    torch="2.13.0+cpu",
    cores=8,
    interfaces=frozenset({"lo", "eth0"}),
    efa=False,
    torchrun=PARSER,
)
RUN = "torch.distributed.run"
PYTHON = ".".join(map(str, sys.version_info[:3]))
ONE = Cluster(("algo-1",), "algo-1", "job", 0, 0, "eth0")
TWO = ONE._replace(hosts=("algo-1", "algo-2"), current_host="algo-2")


def options(*argv, environ=None):
    return arguments.parse(["--train-script", "t.py", *argv], environ or {})


def plan(*argv, cluster=TWO, resources=RESOURCES, environ=None, added=None):
    of = Job(cluster, options(*argv, environ=environ))
    return make_plan(of, resources, environ or {}, added=added or {})


def job(*argv, cluster=TWO, environ=None):
    chosen = options(*argv, environ=environ)
    return Job(cluster, chosen, plan(*argv, cluster=cluster, environ=environ))


def flags(argv):
    """Return torchrun's options of a plan: {"--nnodes": "2", ...}."""
    return dict(
        word.split("=", 1)
        for word in argv[argv.index(RUN) + 1 : argv.index("--no-python")]
        if "=" in word
    )


CONF = "is_host=0,read_timeout=900,join_timeout=900"


def test_several_hosts():
    made = plan("--epochs", "3")
    assert made.argv[:3] == (sys.executable, "-m", RUN)
    assert flags(made.argv) == {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "algo-1:29400",
        "--rdzv-id": "job",
        "--rdzv-conf": CONF,
        "--local-addr": "algo-2",
        "--max-restarts": "0",
        "--shutdown-timeout": "100",
    }
    tail = made.argv[made.argv.index("--no-python") + 1 :]
    keeper = (sys.executable, "-I", "-S", STUB)
    assert tail == ("--", *keeper, "script", "t.py", "--epochs", "3")


FIRST = TWO._replace(current_host="algo-1", network_interface_name="")
NAMED_BY_IPV6 = TWO._replace(hosts=("fd00::1", "fd00::2"), current_host="fd00::2")
GPUS, NEURONS = TWO._replace(num_gpus=8), TWO._replace(num_neurons=4)
TOLD = [
    # the cluster; arguments; environment; torchrun's options, None: it has not this one
    (FIRST, "", {}, {"rdzv-conf": "is_host=1,read_timeout=900,join_timeout=900"}),
    (ONE, "", {}, {"rdzv-endpoint": "localhost:0", "local-addr": "localhost"}),
    (ONE, "", {}, {"rdzv-conf": "is_host=1"}),
    (NAMED_BY_IPV6, "", {}, {"rdzv-endpoint": "[fd00::1]:29400", "local-addr": "fd00::2"}),
    # how many processes
    (GPUS, "", {}, {"nproc-per-node": "8"}),
    (NEURONS, "", {}, {"nproc-per-node": "4"}),
    (GPUS._replace(num_neurons=4), "", {}, {"nproc-per-node": "8"}),
    (GPUS, "--launcher-nproc-per-node 2", {"PET_NPROC_PER_NODE": "3"}, {"nproc-per-node": "2"}),
    (
        *(GPUS, "--launcher-nproc-per-node auto", {"PET_NPROC_PER_NODE": "3"}),
        {"nproc-per-node": "8"},
    ),
    # what the user gave as PET_ wins over what is derived, but ranks are restarted without torchrun
    (GPUS, "", {"PET_NPROC_PER_NODE": "3"}, {"nproc-per-node": None}),
    (TWO, "", {"PET_RDZV_ENDPOINT": "x:1"}, {"rdzv-endpoint": None}),
    (TWO, "", {"PET_MAX_RESTARTS": "1"}, {"max-restarts": "0"}),
    # the rendezvous
    (
        *(TWO, "--launcher-host-timeout 60", {}),
        {"rdzv-conf": f"{CONF},keep_alive_interval=20,keep_alive_max_attempt=3"},
    ),
    (TWO, "", {"PET_RDZV_CONF": "read_timeout=5,x=1"}, {"rdzv-conf": f"{CONF},read_timeout=5,x=1"}),
    (TWO, "--launcher-torchrun-args --rdzv-conf=x=1", {}, {"rdzv-conf": f"{CONF},x=1"}),
    (
        *(TWO, "--launcher-start-timeout 7", {"PET_RDZV_CONF": "read_timeout=5,x=1"}),
        {"rdzv-conf": "is_host=0,read_timeout=5,x=1,read_timeout=7,join_timeout=7"},
    ),
    (
        *(TWO, "--launcher-restart-timeout 1800", {}),
        {"rdzv-conf": "is_host=0,read_timeout=1800,join_timeout=1800"},
    ),
    # the grace
    (TWO, "--launcher-grace 60", {}, {"shutdown-timeout": "60"}),
    (TWO, "--launcher-grace 8", {"PET_SHUTDOWN_TIMEOUT": "7"}, {"shutdown-timeout": "30"}),
    # the log folder, for what it is to copy itself
    (TWO, "--launcher-log-dir /logs", {}, {"log-dir": None}),
    (TWO, "--launcher-log-dir /logs", {"PET_REDIRECTS": "1"}, {"log-dir": "/logs"}),
    (TWO, "--launcher-log-dir /logs", {"PET_TEE": "0"}, {"log-dir": None}),
    (TWO, "--launcher-log-dir /logs", {"PET_LOGS_SPECS": "default"}, {"log-dir": None}),
    (TWO, "--launcher-log-dir /logs", {"PET_LOGS_SPECS": "mine"}, {"log-dir": "/logs"}),
    (
        *(TWO, "--launcher-log-dir /logs '--launcher-torchrun-args=--role x --tee=3'", {}),
        {"log-dir": "/logs", "tee": "3"},
    ),
]


@pytest.mark.parametrize(("cluster", "argv", "environ", "told"), TOLD)
def test_what_torchrun_is_told(cluster, argv, environ, told):
    seen = flags(plan(*shlex.split(argv), cluster=cluster, environ=environ).argv)
    assert {name: seen.get(f"--{name}") for name in told} == told


def test_a_torchrun_before_2_12_does_not_know_the_grace():
    for version, flag in (("2.11.9", None), ("2.12.0a0", "100")):
        made = plan(resources=RESOURCES._replace(torch=version))
        assert flags(made.argv).get("--shutdown-timeout") == flag


REMARKS = [
    (TWO, "", {"PET_MAX_RESTARTS": "1"}, "PET_MAX_RESTARTS=1 is used instead of 0."),
    (TWO, "--launcher-max-restarts 2", {"PET_MAX_RESTARTS": "1"}, ""),
    (GPUS, "", {"PET_NPROC_PER_NODE": "8", "PET_NNODES": "2", "PET_MAX_RESTARTS": "0"}, ""),
    (NEURONS, "--launcher-nproc-per-node 4", {"PET_NPROC_PER_NODE": "5"}, ""),
    (GPUS._replace(num_neurons=4), "--launcher-nproc-per-node 8", {}, ""),  # no Neuron host
    # torchrun asks torch for the devices
    (NEURONS, "", {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto is used instead of 4."),
    (ONE, "", {"PET_RDZV_BACKEND": "static"}, "PET_RDZV_BACKEND=static is used instead of c10d."),
    (TWO, "", {"PET_STANDALONE": "0", "PET_ROLE": "any word", "PET_MAX_RESTARTS": ""}, ""),
    (TWO, "", {"PET_TEE": "9"}, ""),  # torchrun refuses it itself
    (TWO, "--launcher-nproc-per-node 2 '--launcher-log-ranks=0, 2-3'", {}, ""),
    (TWO, "--launcher-log-ranks 4", {}, ""),  # other hosts may have more GPUs
]


@pytest.mark.parametrize(("cluster", "argv", "environ", "remark"), REMARKS)
def test_what_is_taken_and_said_in_the_log(cluster, argv, environ, remark):
    assert plan(*shlex.split(argv), cluster=cluster, environ=environ).remark == remark


def test_another_smddp_library_is_said_beside_other_surprises_and_all_hosts_must_have_it():
    made = job("--launcher-smddp-compat", environ={"PET_MAX_RESTARTS": "1"})
    _, _, line = made.lines()
    assert "PET_MAX_RESTARTS=1 is used instead of 0." in line
    assert "smdistributed.dataparallel: AWS's is not installed" in line
    name = "smdistributed.dataparallel (--launcher-smddp-compat)"
    assert (plan().fingerprint[name], made.plan.fingerprint[name]) == ("none", "the launcher's own")


COMPILES = {"RUN_NEURON_PARALLEL_COMPILE": "1", "PATH": "/no/such"}
REFUSED = [
    # torchrun's modes that would bypass the launcher, or make another job
    (TWO, "", {"PET_MODULE": "1"}, "PET_MODULE"),
    (TWO, "", {"PET_NO_PYTHON": "1"}, "PET_NO_PYTHON"),
    (TWO, "", {"PET_RUN_PATH": "1"}, "PET_RUN_PATH"),
    (TWO, "", {"PET_STANDALONE": "1"}, "each would train by itself"),
    (TWO, "--launcher-torchrun-args=--stand", {}, "torchrun-args (standalone) is '1'; expected n"),
    (TWO, "", {"PET_NNODES": "1:2"}, "PET_NNODES is '1:2'; expected it to be unset, or 2: "),
    (TWO, "", {"PET_RDZV_BACKEND": "static"}, "PET_RDZV_BACKEND is 'static'; expected c10d"),
    (ONE, "", {"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND is 'etcd'; expected c10d"),
    # values that the launcher reads itself
    (TWO, "", {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is '0'; expected a whole number"),
    (ONE, "", {"PET_MAX_RESTARTS": "-1"}, "PET_MAX_RESTARTS is '-1'; expected a whole number"),
    (ONE, "", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "SHUTDOWN_TIMEOUT is 'soon'; expected a"),
    # more ranks than devices
    (NEURONS, "--launcher-nproc-per-node 5", {}, "--launcher-nproc-per-node is 5, but algo-2"),
    (NEURONS, "", {"PET_NPROC_PER_NODE": "5"}, "PET_NPROC_PER_NODE is 5, but algo-2 has 4 Neuron"),
    # others
    (
        *(TWO, "--launcher-nproc-per-node 2 --launcher-log-ranks 0,2-4", {}),
        "log-ranks names rank 4; expected ranks from 0 to 3",
    ),
    (TWO, "", COMPILES, "neuron_parallel_compile is not in PATH"),
]


@pytest.mark.parametrize(("cluster", "argv", "environ", "says"), REFUSED)
def test_what_is_refused(cluster, argv, environ, says):
    with pytest.raises(LaunchError) as caught:
        plan(*shlex.split(argv), cluster=cluster, environ=environ)
    assert says in str(caught.value)
    assert of_error(caught.value).exit_code == (127 if environ is COMPILES else 2)


def test_a_healthy_start_is_two_lines_of_a_host():
    seen = f"with torch 2.13.0+cpu, Python {PYTHON} and sm-launch {__version__}."
    threads = "OMP_NUM_THREADS=4 (8 usable cores for 2 processes)"
    two = ("--launcher-nproc-per-node", "2")
    assert job(*two, cluster=TWO._replace(network_interface_name="")).lines() == (
        f"algo-2 has node_rank 1 (nnodes=2) in job job: 2 ranks on CPU run t.py {seen}",
        "algo-1, algo-2: rendezvous at algo-1:29400, launcher channel on port 29401; "
        f"environment: {threads}, NCCL_HOSTID=algo-2 (this host's name).",
    )
    assert job(*two, cluster=ONE).lines() == (
        f"algo-1 has node_rank 0 (nnodes=1) in job job: 2 ranks on CPU run t.py {seen}",
        f"environment: {threads}.",
    )
    alone = read_cluster({"SM_NUM_GPUS": "1", "SM_NUM_NEURONS": "0"})
    why = "found neither SM_HOSTS nor SageMaker's config files"
    assert job(cluster=alone, environ={"OMP_NUM_THREADS": "1"}).lines() == (
        f"localhost is alone ({why}): 1 rank on 1 GPU runs t.py {seen}",
    )


def test_what_another_python_runs_the_ranks_with_is_said_as_far_as_it_is_known():
    begin, end = f"t.py with torch 2.13.0+cpu, Python {PYTHON}", f" and sm-launch {__version__}"
    other = plan(environ={"PYTHON_EXEC": "/opt/python"}).program
    assert other == f"{begin} (ranks: PYTHON_EXEC=/opt/python){end}"
    for same in ("", sys.executable):
        assert plan(environ={"PYTHON_EXEC": same}).program == f"{begin}{end}"


@pytest.mark.parametrize(
    ("cluster", "environ", "says"),
    [
        (TWO._replace(num_gpus=8), {}, "8 ranks on 8 GPUs run t.py "),
        (TWO._replace(num_gpus=8, gpu_models=("NVIDIA A10G",)), {}, "on 8 GPUs (NVIDIA A10G) run"),
        (TWO._replace(num_gpus=2, gpu_models=("Tesla T4", "H")), {}, "2 GPUs (Tesla T4 and H) run"),
        (TWO._replace(gpu_models=("NVIDIA A10G",)), {}, "1 rank on CPU runs"),  # all are hidden
        (TWO._replace(num_gpus=8, num_neurons=2), {"PET_NPROC_PER_NODE": "4"}, "4 ranks on 8 GPUs"),
        (TWO._replace(num_neurons=2), {}, "2 ranks on 2 Neuron cores run"),
        (
            TWO._replace(num_gpus=1),
            {"PET_NPROC_PER_NODE": "gpu"},
            "ranks counted by torchrun (--nproc-per-node=gpu) on 1 GPU run",
        ),
    ],
)
def test_the_log_names_a_hosts_ranks_and_devices(cluster, environ, says):
    assert says in job(cluster=cluster, environ=environ).lines()[0]


@pytest.mark.parametrize(
    ("mig", "argv", "environ", "nproc", "says"),
    [
        (4, (), {}, "1", "this host has 1 rank (--launcher-nproc-per-node): each of"),
        (1, (), {}, "1", ""),  # it is the only one
        (4, ("--launcher-nproc-per-node", "1"), {}, "1", ""),
        (4, ("--launcher-nproc-per-node", "4"), {}, "4", "this host has 4 ranks (--launcher-"),
        (1, (), {"PET_NPROC_PER_NODE": "2"}, "2", "this host has 2 ranks (--launcher-"),
        (4, (), {"PET_NPROC_PER_NODE": "gpu"}, "gpu", ""),
    ],
)
def test_processes_of_a_host_with_mig_slices(mig, argv, environ, nproc, says):
    cluster = ONE._replace(num_gpus=1, mig=mig)
    made = plan(*argv, cluster=cluster, environ=environ)
    assert made.nproc_per_node == nproc
    assert says in made.remark and bool(says) == ("at most one MIG slice" in made.remark)
    assert " on 1 MIG slice run" in Job(cluster, options(*argv, environ=environ), made).lines()[0]


def test_neuron_parallel_compile_runs_torchrun(tmp_path):
    program = tmp_path / "neuron_parallel_compile"
    program.touch(0o755)
    environ = {"PATH": str(tmp_path), "RUN_NEURON_PARALLEL_COMPILE": "1"}
    made, plain = plan(environ=environ), plan()
    assert made.argv == ("neuron_parallel_compile", *plain.argv)
    last = command(made).splitlines()[-1]
    assert last.split()[:4] == [program.name, sys.executable, "-m", RUN]
    assert "neuron_parallel_compile runs torchrun" in made.remark
    assert (made.runner, plain.runner) == ("neuron_parallel_compile", "")
    assert made.fingerprint != plain.fingerprint  # it is on all hosts or on none
    for other in ("0", "", "true"):  # the toolkit takes 1 alone
        assert plan(environ={**environ, "RUN_NEURON_PARALLEL_COMPILE": other}).runner == ""


def test_environment_for_speed():
    cluster = TWO._replace(num_gpus=4)
    made = plan(cluster=cluster, resources=RESOURCES._replace(efa=True))
    assert made.environment == {
        "OMP_NUM_THREADS": "2",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "FI_PROVIDER": "efa",
        "NCCL_HOSTID": "algo-2",
    }
    assert made.reasons.startswith("environment: ") and made.remark == ""


def test_what_the_user_set_stays_and_an_interface_that_does_not_exist_is_not_exported():
    chosen = {"OMP_NUM_THREADS": "", "NCCL_SOCKET_IFNAME": "x", "NCCL_HOSTID": "y"}
    assert plan(environ=chosen).environment == {"GLOO_SOCKET_IFNAME": "eth0"}
    cluster = TWO._replace(network_interface_name="ethwe")
    assert plan(cluster=cluster, environ=chosen).environment == {}


def test_a_log_folder_that_is_no_path():
    with pytest.raises(LaunchError, match="--launcher-log-dir: a\\\\x00b is no path"):
        prepare._require_folder("a\0b/algo-1", "a\0b")


@pytest.mark.parametrize("endpoint", ["", "algo-9:5000"])
def test_the_port_of_a_store_elsewhere_is_not_looked_at(pretend_torch, monkeypatch, endpoint):
    pretend_torch("2.13.0")
    looked_at = []
    monkeypatch.setattr(prepare, "_require_port", looked_at.append)
    hosts = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
    environ = {**hosts, "SM_NUM_GPUS": "0", "SM_NUM_NEURONS": "0", "PET_RDZV_ENDPOINT": endpoint}
    assert not prepare.prepare(["--train-module", "site"], environ).error
    assert bool(looked_at) is not bool(endpoint)


@pytest.mark.parametrize(
    ("cluster", "address", "interface", "has_name", "added", "replaced"),
    [
        (FIRST, "10.0.0.1", "", True, {}, {}),
        (FIRST, "10.0.0.1", "eth7", True, {"GLOO_SOCKET_IFNAME": "eth7"}, {}),
        (FIRST, "fd00::1", "", False, {}, {"endpoint": "[fd00::1]:29400", "address": "fd00::1"}),
        (TWO, "10.0.0.2", "eth7", False, {}, {}),  # nobody has to know its name
    ],
)
def test_a_host_that_the_others_reach_at_an_address(
    monkeypatch, cluster, address, interface, has_name, added, replaced
):
    of = job(cluster=cluster)
    before = of.plan
    monkeypatch.setattr(prepare, "interface_of", lambda _: interface)
    made = prepare.reached_at(of, address, {}, has_name=has_name)
    assert made.environment == {**before.environment, **added}
    names = {"endpoint": "--rdzv-endpoint", "address": "--local-addr"}
    words = {names[what]: value for what, value in replaced.items()}
    assert flags(made.argv) == {**flags(before.argv), **words}
    users = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert prepare.reached_at(of, address, users, has_name=True) == before


@pytest.mark.parametrize(
    ("cluster", "torch", "expected"),
    [
        (ONE, "2.4.1", "localhost"),
        (TWO, "2.4.1", "algo-1"),
        (TWO._replace(addresses={"algo-1": "127.0.0.2"}), "2.4.1", "127.0.0.2"),
        (TWO, "2.5.0", ""),
    ],
)
def test_torch_2_4_does_not_choose_the_address_of_rank_0(cluster, torch, expected):
    """It takes what a host calls itself, which the others need not know."""
    assert plan(cluster=cluster, resources=RESOURCES._replace(torch=torch)).master_addr == expected


def test_a_warm_start():
    warm = ("--launcher-start", "warm")
    assert plan(*warm).warm and not plan().warm
    other = plan(*warm, environ={"PYTHON_EXEC": "/opt/python"})
    assert not other.warm
    assert "warm falls back to cold: /opt/python runs torchrun or the ranks" in other.remark


def test_a_summary_of_many_hosts_is_short():
    hosts = tuple(sorted(f"algo-{number}" for number in range(1, 1001)))
    lines = job(cluster=TWO._replace(hosts=hosts)).lines()
    assert "algo-103, algo-104 and 992 more: rendezvous at" in lines[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # What torchrun would run in place of the launcher's own file.
        ("train.py", "'train.py' is neither"),
        ("--role=x '' --tee 3", "'' is neither"),
        ("--", "'--' is neither"),
        ("--standalone 3", "'3' is neither"),
        ("--role", "argument --role: expected one argument"),
        ("--lo x", "ambiguous option: --lo could match --log-dir, "),
        # What the launcher sets itself.
        ("--no-python", "--no-python is the launcher's to set: use --train-module"),
        ("-mr3", "--module is the launcher's to set"),
        ("--mod", "--module is the launcher's to set"),
        ("--nproc_per_node=2", "--nproc-per-node is the launcher's to set: use --launcher-nproc-"),
        ("--rdzv-endpoint=x:1", "--rdzv-endpoint is the launcher's to set: use --launcher-rdzv-p"),
        ("--shutdown-timeout=5", "--shutdown-timeout is the launcher's to set: use --launcher-gr"),
    ],
)
def test_torchrun_arguments_that_are_refused(text, says):
    with pytest.raises(LaunchError) as caught:
        plan("--launcher-torchrun-args", text)
    seen = f"--launcher-torchrun-args is {text!r}; expected options of torchrun and their values ("
    assert str(caught.value).startswith(seen) and says in str(caught.value)
    assert of_error(caught.value).exit_code == 2


@pytest.mark.torch
def test_the_parser_of_the_installed_torchrun_is_read_from_its_source():
    from torch.distributed import run

    with open(run.__file__) as file:
        read = parser_of(file.read())
    theirs = run.get_args_parser()._option_string_actions
    assert {name: action.nargs == 0 for name, action in read._option_string_actions.items()} == {
        name: action.nargs == 0 for name, action in theirs.items() if action.dest != "help"
    }


@pytest.mark.parametrize(
    "text", ["", "--role 'my role'", "--rdzv_c a=1", "-r3 -t 3", "--log-line x", "--numa-b node"]
)
def test_torchrun_arguments_that_are_its_own(text):
    """They come last, and so win, but for --rdzv-conf, which has theirs, too."""
    argv = plan(f"--launcher-torchrun-args={text}").argv
    end = argv.index("--no-python") - 1
    assert argv[end].startswith("--rdzv-conf=is_host=")
    words = tuple(shlex.split(text))
    assert argv[end - len(words) : end] == words


def test_dollars_are_escaped_for_torchruns_substitution():
    assert plan("$$", "${local_rank}", "$x").argv[-3:] == ("$$$$", "$${local_rank}", "$$x")


def test_the_printed_command_can_be_pasted(script):
    show = script("import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['SM_HP_A']]))")
    made = plan("a b", "'", "$HOME", "\n", added={"SM_HP_A": "it's $HOME"})
    text = command(made).replace(f"-m {RUN}", str(show))
    done = subprocess.run(["sh", "-c", text], capture_output=True, check=True)
    argv, variable = json.loads(done.stdout)
    assert argv == ["--nnodes=2", *argv[1:-6], "--", "t.py", "a b", "'", "$$HOME", "\n"]
    assert variable == "it's $HOME" and "--no-python" not in argv


def test_a_module_in_the_log_and_in_the_printed_command():
    of_a_module = options()._replace(train_script="", train_module="pkg.train")
    made = make_plan(Job(ONE, of_a_module), RESOURCES, {}, added={})
    assert made.program.startswith("the module pkg.train with torch ")
    assert command(made).split(" --module ")[1].split() == ["--", "pkg.train"]


KINDS = ["NUL", "lone surrogate", "too long", "not in the locale"]


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "x" * (1 << 17), "caf\xe9"], ids=KINDS)
def test_text_that_cannot_be_passed_to_a_process(monkeypatch, text):
    assert plan("x" * ((1 << 17) - 1), "\udcff", "caf\xe9")
    if text == "caf\xe9":
        monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    with pytest.raises(LaunchError, match="cannot be passed to a process"):
        plan(text)
    with pytest.raises(LaunchError, match="cannot be passed to a process"):
        plan(added={"SM_HP_X": text})
    with pytest.raises(LaunchError, match="'SM_HP_A=B' cannot be passed to a process"):
        plan(added={"SM_HP_A=B": "1"})
