"""Jobs from start to end: who takes part, under which number, whatever the hosts are like."""

import pytest
from conftest import SAVES

from cluster.hosts import ALONE, CONTAINERS, ONE_FILE

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


def test_one_file_in_an_image_that_has_a_launcher(job):
    """The file runs, and not the image's launcher, nor one below the other; a stop reaches it."""
    job.add("algo-1", "algo-2")
    job.will_run(SAVES, ONE_FILE)
    job.start()
    for host in job.values():
        host.wait_for("runs\n")
        words = [process["args"] for process in host.processes()]
        (launcher,) = (text for text in words if "--train-script" in text and "rank" not in text)
        assert "/opt/ml/code/launcher.py --train-script script.py" in launcher, words
    job.stop()
    assert job.wait() == {"algo-1": 143, "algo-2": 143}, job.logs()
    for host in job.values():
        assert host.log(stderr=False).count("saved\n") == 1
        assert (host.failure, host.temporary_files()) == (None, [])


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
