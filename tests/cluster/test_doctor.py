"""`sm-launch doctor` in real containers: names, the network, limits, PID 1."""

from conftest import findings

from cluster.hosts import CONTAINERS

pytestmark = CONTAINERS


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
