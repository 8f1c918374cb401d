"""Lines of events.jsonl, for tests of what is drawn of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher_tools.timeline_lanes import KINDS, MARKS

HOSTILE = '</script><script>document.title="gone"</script><img src=x onerror=alert(1)> & \x1b[31m'
STALL = (
    "ranks have made no progress for 60 s: algo-5, rank 37 (local rank 5) is absent from "
    "all_reduce #2210"
)


def line(seconds: float, event: str, host: str = "algo-1", attempt: int = 1, **more: Any) -> str:
    """Return a line."""
    utc = f"2026-11-22T16:{int(seconds) // 60:02d}:{int(seconds) % 60:02d}.000Z"
    known = {"utc": utc, "seconds": seconds, "host": host, "attempt": attempt, "rank": None}
    return json.dumps({**known, "event": event, **more}) + "\n"


# Of algo-1: its rank 0 runs.
RUNNING = line(0, "began", job="x") + line(1, "attempt") + line(2, "runs", rank=0)


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write the files of hosts below a folder."""
    for host, text in files.items():
        (folder / host).mkdir(parents=True, exist_ok=True)
        (folder / host / "events.jsonl").write_text(text)
    return folder


def large() -> dict[str, str]:
    """Return a job of 16 hosts of 8 ranks: a stall, a failure, a restart, a stop that saves."""
    files = {}
    for number in range(1, 17):
        host = f"algo-{number}"
        mine = range(8 * (number - 1), 8 * number)
        late = number / 4  # each launcher begins at another time

        def at(
            seconds: float, event: str, host: str = host, late: float = late, **more: Any
        ) -> str:
            return line(round(seconds - late, 3), event, host, **more)

        rows = [at(late, "began", attempt=0, job="large"), at(9, "joined"), at(9, "attempt")]
        rows += [at(12, "started", rank=rank) for rank in mine]
        rows += [at(15 + rank / 100, "runs", rank=rank) for rank in mine]
        if number == 1:
            others = [rank for rank in range(128) if rank != 37]
            stall = {"rank": 37, "ranks": others, "since": 130 - late, "cause": STALL}
            rows.append(line(190 - late, "stalled", "algo-5", **stall))
            rows.append(at(230, "continued", ranks=others, since=220 - late))
        if number == 12:
            failed = {"rank": 93, "exit_code": 1}
            rows.append(at(400, "failed", **failed, cause=f"rank 93 {HOSTILE}"))
            rows.append(at(400, "ended", **failed))
        rows.append(at(401, "restart", cause="attempt 1 of 2 failed"))
        rows += [at(402, "ended", rank=rank, exit_code=-15) for rank in mine if rank != 93]
        rows.append(at(410, "attempt", attempt=2))
        rows += [at(415, "started", rank=rank, attempt=2) for rank in mine]
        rows += [at(420, "runs", rank=rank, attempt=2) for rank in mine]
        rows.append(at(800, "stop", attempt=2, cause="SIGTERM (signal 15)"))
        for rank in mine:
            rows.append(at(810 + rank / 10, "saved", rank=rank, attempt=2))
            rows.append(at(810 + rank / 10, "ended", rank=rank, attempt=2, exit_code=0))
        cause = "stopped by SIGTERM (signal 15)"
        rows.append(at(830, "ended", attempt=2, cause=cause, exit_code=143))
        files[host] = "".join(rows)
    return files


def adds_up(found: Any) -> bool:
    """Tell whether the bars of each lane follow one another, from the job's begin to its end."""
    for lane in found.lanes:
        at = 0.0
        for bar in lane.bars:
            assert bar.start == pytest.approx(at, abs=1e-6) and bar.kind in KINDS
            at += bar.seconds
        assert at == pytest.approx(found.seconds, abs=1e-6), lane
    times = [event.line.seconds for event in found.events]
    assert times == sorted(times)
    marked = {number for marks in found.marks.values() for _, number in marks}
    assert {found.events[number].kind for number in marked} <= set(MARKS)
    return True
