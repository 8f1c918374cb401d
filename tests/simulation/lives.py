"""What one launcher sees of its ranks and its torchrun: to hold simulated jobs to real ones.

Of each rank, and of torchrun, it is what happens to it, in order. What happens to two of them at
the same time has no order between them.
"""

from __future__ import annotations

import re

STEP = re.compile(r"\d s: run (\w+)(?: to (\w+))? on (\w+)(\(.*)")  # as --launcher-verbose logs it
# What of an event is the same in both.
SAME = {
    "KeeperJoined": r"local_rank=\d+, nproc=\d+",
    "RankRuns": "rank",
    "RankExits": r"exit_code=-?\d+, chain=(\(Link\(exception='\w*'|\(\))",
    "ScriptEnded": "rank",
    "RankEnded": r"exit_code=-?\d+",
    "KeeperCleared": r"number=\d+, survivors=\d+",
    "KeeperLost": "rank",
    "StubSignalled": r"number=\d+",
    "Stop": r"\d+",
    # It may be killed before it has seen that its child has ended.
    "TorchrunEnded": r"returncode=(0,)?",
}


def lives(log: str) -> dict[str, list[str]]:
    """Return the lives of ranks, by their numbers, of torchrun, and of the launcher's phases."""
    found: dict[str, list[str]] = {"phases": []}
    for before, after, event, text in STEP.findall(log):
        if found["phases"][-1:] != [after or before]:
            found["phases"].append(after or before)
        if event in SAME:
            rank, same = re.search(r"\brank=\d+", text), re.search(SAME[event], text)
            assert same, text
            life = found.setdefault(rank[0] if rank else event, [])
            # The job's end may reach a rank's keeper before what the rank says, or after it.
            if event == "RankEnded" and not any(line.startswith("RankExits") for line in life):
                event += text[text.rindex("response=") :].partition(")")[0]
            life.append(f"{event} {same[0]}")
    return found
