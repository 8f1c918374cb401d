"""What a host records about its job: a line of events.jsonl for each decisive event. Pure.

The state machines decide about a note where they decide about the event; the journal
(host/journal.py) writes it, and `sm-launch timeline` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The events, with their meanings on the page (docs/tables.py).
EVENTS: Mapping[str, str] = {
    "began": "the launcher has started; `job` is the job's name",
    "joined": "all hosts have joined",
    "attempt": "an attempt begins, on all hosts at the same time (except for network delay)",
    "started": "torchrun has started a rank, whose script is about to be started",
    "runs": "a rank's script is about to run",
    "failed": "a rank (or the host, if `rank` is null) has failed with `cause` and "
    "`exit_code`; for a hang that ends the job, this is the rank that the others "
    "were waiting for",
    "stalled": "the log reports that `ranks` have made no progress since `since`; `rank`, if "
    "known, is the one that they are waiting for",
    "stacks": "where all ranks were at a stall, as the log has it: `text`",
    "continued": "`ranks` that had stalled are making progress again, since `since`",
    "restart": "this attempt's ranks are being ended for a restart, because of `cause`",
    "stop": "the job is being stopped by `cause`, a signal: ranks have their grace to save",
    "ending": "this host's ranks are being ended, because the job has failed with `cause`",
    "saved": "a rank that handles the stop signal has ended by itself within its grace",
    "ended": "a rank's process has ended, with `exit_code`; or, if `rank` is null, this host's "
    "share of the job, with the job's `cause` and exit code",
    "lost": "the first host has lost `host`, which cannot report any more, because of `cause`",
}
# The fields of a line, with their meanings on the page.
FIELDS: Mapping[str, str] = {
    "utc": "the time of day by this host's clock, such as `2026-11-22T16:56:12.345Z`",
    "seconds": (
        "seconds since this launcher started, by a monotonic clock (each host has its own)"
    ),
    "host": "the host concerned: this one, except for `lost` and for ranks of other hosts",
    "attempt": "counted from 1; 0 until all hosts have joined",
    "event": "one of the events below",
    "rank": "the rank; null if the event concerns the host, or several ranks",
    "cause": "the reason, in one line; absent if there is none",
    "exit_code": "of a process (negative for a signal) or of the job; absent if unknown",
    "ranks": "several ranks; absent if there are none",
    "since": "when it began, as `seconds`; absent if that is now",
    "job": "the job's name; only in `began`",
    "text": "several lines: of `failed` the traceback, of `stacks` the stacks; absent if none",
}


class Note(NamedTuple):
    """An action of a state machine: write one line to events.jsonl.

    Of the `cause` the first line counts; `since` is on the clock System.now(); `host` is this one
    if it is "". Other values that are empty or None are unknown, or do not apply.
    """

    event: str
    rank: int | None = None
    cause: str = ""
    exit_code: int | None = None
    ranks: Sequence[int] = ()
    since: float | None = None
    job: str = ""
    text: str = ""
    host: str = ""
