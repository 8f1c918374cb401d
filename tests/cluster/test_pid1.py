"""What the image's PID 1 does for a job besides stopping it, and with input that is of no use."""

import pytest
from conftest import more, poll

from cluster.hosts import ALONE, AWS, CHANNEL, CONTAINERS, TRAIN

pytestmark = CONTAINERS


@pytest.fixture
def host(job):
    job.add("algo-1")
    return job["algo-1"]


@pytest.mark.parametrize(
    ("which_image", "how", "code"),
    [("aws_image", AWS, 1), more("own_aws_image", AWS, 3), ("aws_image", CHANNEL, 3)],
    indirect=["which_image"],
)
def test_the_end_of_a_container_of_awss(job, host, which_image, how, code):
    """docs/guide.md: 1 for every failure as it is, the job's own below the launcher's `init`."""
    job.image = which_image
    job.will_run("import sys; sys.exit(3)", how)
    job.start()
    assert host.wait() == code, host.log()
    first = "algo-1, rank 0 (local rank 0) ended with exit code 3"
    assert host.failure.splitlines()[0] == first


LEAVE_PROCESSES = """
import os, subprocess, sys, time
for _ in range(3):  # children of children that end before anybody waits for them
    subprocess.run(["sh", "-c", "sleep 0.1 &"])
subprocess.run(["sh", "-c", "setsid sleep 1001 & trap '' TERM; setsid sleep 1002 &"])
print("left some", flush=True)
while not os.path.exists("/opt/ml/input/go-on"):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("how", [more(TRAIN), ALONE, more("from a shell script")])
def test_grandchildren_leave_no_zombie_and_no_process(job, host, how):
    job.will_run(LEAVE_PROCESSES, ALONE if how == ALONE else TRAIN)
    if how == "from a shell script":  # which leaves some to PID 1, above the launcher
        host.hyperparameters["sagemaker_program"] = "train.sh"
        host.write(
            "source/train.sh", "for i in 1 2 3; do sh -c 'sleep 0.1 &'; done\nsm-launch $@\n"
        )
    job.start()
    host.wait_for("left some")

    def only_the_long_ones_are_left() -> bool:
        return len([p for p in host.processes() if "sleep" in p["args"]]) == 2

    poll(only_the_long_ones_are_left)
    poll(lambda: not any(one["stat"].startswith("Z") for one in host.processes()))
    host.write("input/go-on", "")
    assert host.wait() == 0, host.log()
    # Ended by the launcher itself, not by the end of the container: it had to wait for one.
    assert host.log().count(" left running.") == 2


def test_an_estimators_entry_point_is_the_script(job, host):
    job.will_run("import sys; print('arguments', sys.argv[1:])", TRAIN, epochs=3)
    del host.hyperparameters["train-script"]
    host.hyperparameters["sagemaker_program"] = "script.py"
    job.start()
    assert host.wait() == 0, host.log()
    assert "arguments ['--epochs', '3']" in host.log()
    assert "algo-1 has node_rank 0 (nnodes=1) in job test-job" in host.log()
