"""SIGTERM to PID 1, as SageMaker stops a job: before, at and after every stage of it."""

import pytest
from conftest import more

from cluster.hosts import ALONE, AWS, CHANNEL, CONTAINERS, SLACK, TRAIN

pytestmark = CONTAINERS

STOPPED = 143
BELOW_TINI = "train below an sm-launch init that is not PID 1"
# A rank that takes its time to write a checkpoint when it is stopped.
SAVE = """
import json, os, signal, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(time.time()))
print("ready to be stopped", flush=True)
while not heard:
    time.sleep(0.02)
path = f"/opt/ml/model/checkpoint-{dist.get_rank()}"
with open(path + ".tmp", "w") as file:
    until = time.time() + float(sys.argv[sys.argv.index("--save-seconds") + 1])
    while time.time() < until:
        file.write("parameters\\n")
        time.sleep(0.1)
    file.write("end\\n")
os.replace(path + ".tmp", path)
# In one write: the image sets PYTHONUNBUFFERED, and then print() makes several.
sys.stdout.write("saved " + json.dumps({"heard": heard, "saved": time.time()}) + "\\n")
os._exit(0)  # Python takes torch apart for up to 2 s here, which is the script's own time
"""


@pytest.mark.parametrize(
    ("how", "which_image", "seconds"),
    [
        (TRAIN, "image", 40),
        more(ALONE, "image", 5),
        more(AWS, "own_aws_image", 5),
        more(CHANNEL, "aws_image", 5),
        more(BELOW_TINI, "image", 5),
    ],
    indirect=["which_image"],
)
def test_every_rank_hears_a_stop_once_and_saves(job, how, which_image, seconds):
    job.image = which_image
    job.add("algo-1", "algo-2")
    job.will_run(SAVE, how, launcher_nproc_per_node=2, save_seconds=seconds)
    for host in job.values():
        if how == CHANNEL:  # as where the image has the toolkit, and no start script of AWS's
            host.command = ["train"]
        host.options["init"] = how == BELOW_TINI
    job.start()
    for host in job.values():
        host.wait_for("ready to be stopped", count=2)
    job.stop()
    for host in job.values():
        log = host.log()
        saves = host.printed("saved")
        assert len(saves) == 2, log
        for save in saves:
            assert len(save["heard"]) == 1, log
            assert save["heard"][0] - host.stop_sent < 1 + SLACK, log
        assert host.ended_at - max(save["saved"] for save in saves) < 2 + SLACK, log
        assert host.wait() == STOPPED, log
        assert host.failure is None
        whole = [path.read_text() for path in (host.opt_ml / "model").iterdir()]
        assert len(whole) == 2
        assert all(text.endswith("parameters\nend\n") for text in whole)


def test_awss_own_pid_1_passes_no_stop_on(job, aws_image):
    """docs/guide.md says so; the day this fails, it has to say something better."""
    job.image = aws_image
    job.add("algo-1")
    job.will_run(SAVE, AWS, save_seconds=0)
    job.start()
    job["algo-1"].wait_for("ready to be stopped")
    job.stop(limit=3)
    assert job.wait() == {"algo-1": 137}
    assert "saved" not in job.logs()
