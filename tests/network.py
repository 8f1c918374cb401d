"""Hosts of a network of their own, for tests: namespaces that a bridge joins, names of any kind.

    with Network(("algo-1", "algo-2"), "IPv6 alone") as network:
        subprocess.run([*network.on("algo-1"), "ping", "algo-2"])

Needs root and iproute2. Each host has a host name, /etc/hosts and /etc/resolv.conf of its own
(ip-netns(8)), and shares all other files with this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

KINDS = ("IPv4", "IPv6 alone", "own name is 127.0.1.1", "own name has no address")


def in_namespaces(test):
    """Mark a test that makes namespaces."""
    reason = "root alone can make namespaces"
    return pytest.mark.containers(pytest.mark.skipif(os.geteuid() != 0, reason=reason)(test))


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=120)


class Network:
    """Namespaces named after this process, whose names are those of KINDS."""

    def __init__(self, hosts: tuple[str, ...], kind: str, nameserver: str = "127.0.0.1") -> None:
        assert kind in KINDS
        self.addresses = {
            host: f"fd00::{number}" if kind == "IPv6 alone" else f"10.99.0.{number}"
            for number, host in enumerate(hosts, 1)
        }
        self._kind = kind
        self._nameserver = nameserver  # at which nobody answers
        self._bridge = f"test-{os.getpid()}-bridge"
        self._spaces = {host: f"test-{os.getpid()}-{host}" for host in hosts}

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        run("ip", "netns", "add", self._bridge)
        run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for number, (host, space) in enumerate(self._spaces.items(), 1):
            etc = Path("/etc/netns", space)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(self._hosts_file(host))
            (etc / "resolv.conf").write_text(f"nameserver {self._nameserver}\n")
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            there = ("type", "veth", "peer", "name", f"port{number}", "netns", self._bridge)
            run("ip", "-n", space, "link", "add", "eth7", *there)
            port = ("link", "set", f"port{number}", "master", "bridge", "up")
            run("ip", "-n", self._bridge, *port)
            address = self.addresses[host]
            width = ["/64", "nodad"] if ":" in address else ["/24"]
            run("ip", "-n", space, "address", "add", address + width[0], *width[1:], "dev", "eth7")
            run("ip", "-n", space, "link", "set", "eth7", "up")

    def _hosts_file(self, host: str) -> str:
        names = {**self.addresses}
        if self._kind == "own name is 127.0.1.1":
            names[host] = "127.0.1.1"
        elif self._kind == "own name has no address":
            del names[host]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        return "".join(line + "\n" for line in lines)

    def on(self, host: str) -> list[str]:
        """Return what to put before a command, so that it runs on a host."""
        own_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
        return ["ip", "netns", "exec", self._spaces[host], *own_name]

    def pause(self, seconds: float) -> None:
        """Let no packet through for so long; connections stay."""
        ports = [f"port{number}" for number in range(1, 1 + len(self._spaces))]
        for state in ("down", "up"):
            for port in ports:
                run("ip", "-n", self._bridge, "link", "set", port, state)
            time.sleep(seconds if state == "down" else 0)

    def __exit__(self, *_: object) -> None:
        for space in (*self._spaces.values(), self._bridge):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=120)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
