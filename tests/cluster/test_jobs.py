"""Jobs from start to end: who takes part, under which number, whatever the hosts are like."""

import pytest

from cluster.hosts import ALONE, CONTAINERS

pytestmark = [*CONTAINERS, pytest.mark.timeout(900)]  # one image may have to be made first

# A real collective: the sum says how many ranks took part.
ALL_REDUCE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"ranks that met: {int(total)}\\n")
dist.barrier()
dist.destroy_process_group()
"""


def test_an_interface_that_does_not_exist_and_a_name_that_does_not_resolve(job):
    job.add("algo-1", "algo-2")
    job.will_run(ALL_REDUCE, ALONE, launcher_verbose=True)
    for host in job.values():
        host.resource_config["network_interface_name"] = "ethwe"
        host.lose_its_name()
    job.start()
    assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.logs()
    for host in job.values():
        assert "ranks that met: 2\n" in host.log(stderr=False), job.logs()
    assert "algo-1 can be reached from the other hosts at " in job["algo-1"].log()
    assert ": GLOO_SOCKET_IFNAME=eth0." in job["algo-1"].log()
    assert "IFNAME=ethwe" not in job["algo-1"].log()
