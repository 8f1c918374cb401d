"""`sm-launch doctor` in real containers: names, the network, limits, PID 1."""

import pytest
from conftest import findings

from cluster.hosts import CONTAINERS

pytestmark = [*CONTAINERS, pytest.mark.timeout(600)]


def test_two_hosts_see_each_other(job):
    job.add("algo-1", "algo-2")
    for host in job.values():
        host.command = ["sh", "-c", "echo runs; exec sleep 600"]
    job.start()
    for host in job.values():
        host.wait_for("runs\n")
    first, second = (findings(host.run("sm-launch", "doctor", "--json")) for host in job.values())
    for found, other in ((first, "algo-2"), (second, "algo-1")):
        ((level, text),) = found["names"]
        assert level == "ok" and text.startswith(f"all resolve: {other} is 1")
        assert found["stop"][0][0] == "ok" and "or its `init`" in found["stop"][0][1]
    assert "free on this host" in first["ports"][0][1]
    assert "algo-1 can be reached; nothing is listening yet" in second["ports"][0][1]
    job["algo-1"].cut_off()
    cut = findings(job["algo-2"].run("sm-launch", "doctor", "--json"))
    ((level, text),) = cut["names"]
    assert level == "warning" and "algo-1" in text


@pytest.mark.more
def test_a_container_with_nothing_to_spare(job):
    """A user without a name, a read-only system, Docker's small /dev/shm."""
    job.add("algo-1")
    host = job["algo-1"]
    host.options.update(user="65534", read_only=True)
    host.command = ["doctor", "--json", "--launcher-log-dir", "/logs"]
    host.options["entrypoint"] = ["sm-launch"]
    host.environment["SAGEMAKER_BASE_DIR"] = "/opt/ml"
    host.opt_ml.joinpath("output").chmod(0o777)
    job.start()
    assert host.wait() == 2, host.log()
    found = findings(host.log(stderr=False))
    assert any("/dev/shm" in text and "of 64 MiB left" in text for level, text in found["disk"])
    assert any(level == "warning" and "/opt/ml/model" in text for level, text in found["disk"])
    assert host.failure.startswith(
        "launcher: doctor: a job would fail\ndisk: / (--launcher-log-dir): "
    )
