"""Jobs on networks of all kinds: real launchers and ranks in network namespaces; needs root."""

import json
import time

import pytest
from conftest import LAUNCHER, TORCH, more
from network import KINDS, Network, in_namespaces

HOSTS = ("algo-1", "algo-2")
ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(mine)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # the next attempt has another store
    os._exit(3)
name = "rank-" + os.environ["RANK"]
seen = [os.environ[name] for name in ("SM_CURRENT_HOST", "GROUP_RANK", "MASTER_ADDR")]
seen += [os.environ["GLOO_SOCKET_IFNAME"]]
open(name, "w").write(" ".join([*seen, str(mine.item())]))
dist.barrier()
dist.destroy_process_group()  # without it gloo's threads can abort a rank at its end
"""


RUNS = """
import os, time
print("runs", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
"""


def start_on(network, start, *arguments, **environ):
    """Start a launcher on each host of a network."""
    common = {"SM_HOSTS": json.dumps(HOSTS), "SM_NUM_GPUS": "0", **environ}
    return [
        start(
            *arguments,
            host=name,
            command=[*network.on(name), *LAUNCHER],
            SM_CURRENT_HOST=name,
            **common,
        )
        for name in HOSTS
    ]


@in_namespaces
@pytest.mark.torch
@pytest.mark.row
@pytest.mark.parametrize("kind", [KINDS[1], more(KINDS[2]), KINDS[3]])
def test_a_job_trains_and_restarts(start, script, tmp_path, matrix, kind):
    """Though SageMaker names an interface that does not exist."""
    absent = {"SM_NETWORK_INTERFACE_NAME": "ethwe"}
    with Network(HOSTS, kind) as network:
        words = ("--train-script", script(ALL_REDUCE), "--launcher-max-restarts", "1")
        hosts = start_on(network, start, *words, **absent)
        for host in hosts:
            host.ends(0)  # the fixture prints the other's log
        named = kind != "own name has no address"
        master = "algo-1" if named else network.addresses["algo-1"]
    seen = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    # With torch 2.4 each host gives it as it knows the first one.
    of_second = master if TORCH >= (2, 5) else "algo-1"
    assert seen == [f"algo-1 0 {master} eth7 1.0", f"algo-2 1 {of_second} eth7 1.0"]
    matrix.append((f"a network of another kind: {kind}", "0", "", "", "no failure file"))


@in_namespaces
@pytest.mark.torch
def test_a_network_may_pause(start, script, tmp_path):
    """For half of --launcher-host-timeout: the kernel tries to send ever more rarely."""
    patient = ("--launcher-host-timeout", "20")
    with Network(HOSTS, "IPv4") as network:
        hosts = start_on(network, start, "--train-script", script(RUNS), *patient)
        for host in hosts:
            host.wait_for("runs")
        for _ in range(2):
            network.pause(9)
            time.sleep(20)  # in which the launchers send that they are alive
        (tmp_path / "go").touch()
        for host in hosts:
            assert host.wait() == 0, "".join(host.log() for host in hosts)
