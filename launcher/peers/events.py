"""What first.py and other.py are told of the network, and what they can have done there.

transport.py turns what happens into the events and carries the actions out. A connection is a
number that no other one has had. Times and waits are in seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.result.causes import Failure

# All in seconds.
LINE_EVERY = 30  # between two lines on who is missing
TO_LEAVE = 3  # for a host that does not start torchrun, to tell the others


class Job(NamedTuple):
    """What does not change: the job, and which of its hosts this one is.

    `fingerprint` maps what must agree between hosts to its values here; it is empty if this
    host cannot start. `others` are the hosts but the first one, which listens on `port`.
    """

    current_host: str
    hosts: tuple[str, ...]
    others: frozenset[str]
    name: str
    port: int
    start_timeout: int
    fingerprint: Mapping[str, Any]
    addresses: Mapping[str, str] = {}  # of hosts whose names are not to be looked up

    def address(self, host: str) -> str:
        """Return what a host is looked up by: its name, as a rule."""
        return self.addresses.get(host, host)

    @property
    def first(self) -> str:
        """The host that decides for all."""
        return self.hosts[0]


# Events


class Listening(NamedTuple):
    """This host listens for the others; they may find it by an address of its own name, or not."""

    name_leads_here: bool


class CannotListen(NamedTuple):
    """This host cannot listen, and why; `taken`: something else listens on its port."""

    why: str
    taken: bool


class TooFewFiles(NamedTuple):
    """This process can have `files` descriptors, but needs more for all hosts' connections."""

    files: int
    needs: int


class Connected(NamedTuple):
    """There is a connection between `address`, the other end, and `own_address`."""

    conn: int
    address: str
    own_address: str


class Unreachable(NamedTuple):
    """The first host could not be connected to."""

    trouble: str


class Full(NamedTuple):
    """There is no room for one more connection; they wait in the kernel until `Accept`."""


class Received(NamedTuple):
    """A JSON object has come."""

    conn: int
    message: Mapping[str, Any]


class Closed(NamedTuple):
    """A connection has ended, and this side did not close it."""

    conn: int
    why: str


class LookedUp(NamedTuple):
    """The answer to LookUp: whether the name of a host resolves."""

    host: str
    resolves: bool


# Events that first.py makes of Received, Closed and Tell


class HelloFrom(NamedTuple):
    """A pending connection says whose it is, and what must agree there."""

    conn: int
    job: str
    host: str
    fingerprint: Mapping[str, Any]


class NoHello(NamedTuple):
    """A pending connection says something else."""

    conn: int


class HostFailed(NamedTuple):
    """A host says that it failed."""

    host: str
    failure: Failure


class HostStopped(NamedTuple):
    """A host was told to stop."""

    host: str
    number: int


class HostSucceeded(NamedTuple):
    """All ranks of a host have succeeded."""

    host: str


class HostLost(NamedTuple):
    """The connection of a host that had joined has ended."""

    host: str
    why: str


# Actions


class Listen(NamedTuple):
    """Listen: `Listening` or `CannotListen` tells how that went."""


class StopListening(NamedTuple):
    """Take no more connections, nor those that wait in the kernel."""


class Accept(NamedTuple):
    """After `Full`: take connections again."""


class Connect(NamedTuple):
    """Connect to the first host after a wait: `Connected` or `Unreachable` tells how that went."""

    wait: float


class LookUp(NamedTuple):
    """Look names up anew; each may take long."""

    hosts: Sequence[str]


class Send(NamedTuple):
    """Send a message."""

    conn: int
    message: Mapping[str, Any]


class SendAll(NamedTuple):
    """Send the same message on several connections."""

    conns: Sequence[int]
    message: Mapping[str, Any]


class Close(NamedTuple):
    """Close a connection; what was sent before still arrives."""

    conn: int
    why: str


class Fail(NamedTuple):
    """End this host's launcher with a LaunchError: it cannot take part in the job."""

    text: str
    exit_code: int
