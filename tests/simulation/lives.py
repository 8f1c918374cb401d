"""What one launcher sees of its ranks and its torchrun: to hold simulated jobs to real ones.

Of each rank, and of torchrun, it is what happens to it, in order. What happens to two of them at
the same time has no order between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.peers.messages import Stop
from launcher.run import events

# What of an event is the same in both.
FIELDS: dict[type, tuple[str, ...]] = {
    events.KeeperJoined: ("local_rank", "nproc"),
    events.RankRuns: (),
    events.RankExits: (),
    events.ScriptEnded: (),
    events.RankEnded: ("response",),
    events.KeeperCleared: ("number", "survivors"),
    events.KeeperLost: ("is_gone",),
    Stop: ("number",),
    events.TorchrunEnded: (),
}


def lives(heard: Iterable[tuple[Any, str]]) -> dict[Any, list[Any]]:
    """Return the lives of ranks, by their numbers, of torchrun, and of the launcher's phases."""
    found: dict[Any, list[Any]] = {"phases": []}
    for event, phase in heard:
        if found["phases"][-1:] != [phase]:
            found["phases"].append(phase)
        if type(event) not in FIELDS:
            continue
        whose = getattr(event, "rank", type(event).__name__)
        what = {name: getattr(event, name) for name in FIELDS[type(event)]}
        life = found.setdefault(whose, [])
        if isinstance(event, (events.RankExits, events.RankEnded)):
            what["exit_code"] = event.end.exit_code
        if isinstance(event, events.RankExits):
            what["chain"] = [link.exception for link in event.end.chain]
        elif isinstance(event, events.RankEnded) and "RankExits" in [one for one, _ in life]:
            # The job's end may reach a rank's keeper before what the rank says, or after it.
            del what["response"]
        elif isinstance(event, events.TorchrunEnded):
            # It may be killed before it has seen that its child has ended.
            what["succeeds"] = event.returncode == 0
        life.append((type(event).__name__, what))
    return found
