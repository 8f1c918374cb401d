"""Jobs from start to end: who takes part, under which number, whatever the hosts are like."""

import os

import pytest
from conftest import TRAIN_DDP, TRAIN_HYMENOPTERA, more

from cluster.hosts import ALONE, AWS, CONTAINERS, ONE_FILE, TRAIN

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


def assert_met(job, names, count):
    """All ranks of these hosts have met as many as there should be, themselves included."""
    for name in names:
        assert f"ranks that met: {count}\n" in job[name].log(stderr=False), job[name].log()


@pytest.mark.more
def test_two_hosts_of_two_ranks_train_with_the_launcher_in_the_source_dir(job, aws_image):
    job.image = aws_image
    job.add("algo-1", "algo-2")
    job.will_run(TRAIN_DDP, AWS, epochs=2, launcher_nproc_per_node=2)
    job.start()
    assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.logs()
    log = job["algo-1"].log()
    assert "Imported framework sagemaker_pytorch_container.training" in log
    assert "-- launcher/__main__.py" in log  # the copy in the source_dir
    said = "algo-2 has node_rank 1 (nnodes=2) in job test-job: 2 ranks on CPU"
    assert said in job["algo-2"].log()
    assert (job["algo-1"].opt_ml / "model" / "model.pt").exists()
    assert not (job["algo-2"].opt_ml / "model" / "model.pt").exists()
    assert {host.failure for host in job.values()} == {None}


SAVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
print("runs", flush=True)
while True:
    signal.pause()
"""


def test_one_file_beside_the_script_in_awss_image(job, aws_image):
    job.image = aws_image
    job.add("algo-1", "algo-2")
    job.will_run(ALL_REDUCE, ONE_FILE, launcher_nproc_per_node=2)
    job.start()
    assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.logs()
    assert_met(job, job, 4)
    for host in job.values():
        assert sorted(os.listdir(host.opt_ml / "source")) == ["launcher.py", "script.py"]
        assert (host.failure, host.temporary_files()) == (None, [])


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


def test_two_hosts_tell_ants_from_bees(job_with_torchvision, ants_and_bees):
    job = job_with_torchvision
    small = {"weights": "none", "image_size": 64, "batch_size": 4, "epochs": 2}
    job.will_run(TRAIN_HYMENOPTERA, TRAIN, launcher_nproc_per_node=2, **small)
    for host in job.values():
        host.channels = {part: ants_and_bees / part for part in ("train", "val")}
    job.start()
    assert job.wait(500) == {"algo-1": 0, "algo-2": 0}, job.logs()
    first, second = (job[name].opt_ml for name in job)
    assert "epoch=1 train_loss=" in job["algo-1"].log(stderr=False)
    assert sorted(os.listdir(first / "model")) == ["labels.json", "model.pt", "model.pt2"]
    assert {"curves.png", "metrics.jsonl", "predictions.png"} == set(
        os.listdir(first / "output" / "data")
    )
    assert len(os.listdir(first / "checkpoints")) == 2
    assert not os.listdir(second / "model") and not (second / "checkpoints").exists()
    assert {host.failure for host in job.values()} == {None}


@pytest.mark.parametrize("name_resolves", [more(True), False])
def test_an_interface_that_does_not_exist(job, name_resolves):
    job.add("algo-1", "algo-2")
    job.will_run(ALL_REDUCE, ALONE, launcher_verbose=True)
    for host in job.values():
        host.resource_config["network_interface_name"] = "ethwe"
        if not name_resolves:
            host.lose_its_name()
    job.start()
    assert job.wait() == {"algo-1": 0, "algo-2": 0}, job.logs()
    assert_met(job, job, 2)
    assert "algo-1 can be reached from the other hosts at " in job["algo-1"].log()
    assert ": GLOO_SOCKET_IFNAME=eth0." in job["algo-1"].log()
    assert "IFNAME=ethwe" not in job["algo-1"].log()
