"""What the two state machines of a host share: the clock, the log, and what they tell each other.

run/machine.py decides what becomes of this host's torchrun and ranks; peers/first.py and
peers/other.py agree with the other hosts. run/host.py lets what one of them tells reach the other.
Times are in seconds on the clock time.monotonic(), infinite if nothing is due.
"""

from typing import NamedTuple, Union

from launcher.result.causes import Failure, Result


class Time(NamedTuple):
    """Something is due."""


class Log(NamedTuple):
    """An action: write one line to the log."""

    line: str


# What this host tells the others.


class Stop(NamedTuple):
    """This host was told to stop, so all hosts stop."""

    number: int


class Succeeded(NamedTuple):
    """All ranks of this host have succeeded."""


class Leave(NamedTuple):
    """This host will not start torchrun; it ends once the others know the result."""


class Tell(NamedTuple):
    """An action of run/, and an event for peers/."""

    what: Union[Failure, Stop, Succeeded, Leave]


# What the hosts have agreed on: actions of peers/, and events for run/.


class AllJoined(NamedTuple):
    """All hosts are here and agree: start torchrun.

    The other hosts reach this one at `own_address`. `name_leads_here` is false if it cannot look
    its own name up (only the first host needs to, and knows).
    """

    own_address: str
    name_leads_here: bool = True


class Decided(NamedTuple):
    """How the job ends; `store_is_lost`: the first host is lost, and torchrun's store with it."""

    result: Result
    store_is_lost: bool = False


class Left(NamedTuple):
    """Every host that can be told knows the result: this one may end."""
