"""Words for people, names of options, loopback addresses; and the actions Log and Note. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

PREFIX = "--launcher-"
NAMED = 8  # hosts, at most, that one message names; it counts the others
_NAMES_LIMIT = 600  # characters, at most, of these names; the failure file has 1,024


class Log(NamedTuple):
    """An action of a state machine: write one line to the log."""

    line: str


class Note(NamedTuple):
    """An action of a state machine: write one line to events.jsonl. The loop writes some, too.

    host/journal.py writes it, `sm-launch timeline` reads it; docs/logs.md explains all events and
    fields. Of the `cause` the first line counts; `since` is on the clock System.now(); `host` is
    this one if it is "". Other values that are empty or None are unknown, or do not apply.
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


def printable(text: str, keep: str = "") -> str:
    """Return a text with control characters, newlines too, escaped as Python writes them.

    Text from ranks and other hosts ends up on terminals and in the failure file, where an escape
    sequence or a newline could forge a line. `keep` holds characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def named_rank(host: str, rank: int, local_rank: int) -> str:
    """Return how messages name a rank."""
    return f"{host}, rank {rank} (local rank {local_rank})"


def short(value: object, limit: int = 200) -> str:
    """Return a value as Python writes it, cut to limit characters, to be quoted in a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shortened(text: str, limit: int) -> str:
    """Cut the middle out of a long text: its beginning and its end matter most."""
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"


def listed(hosts: Sequence[str]) -> str:
    """Return the first hosts, as many as a message can name, and the number of the others."""
    count = min(NAMED, len(hosts))
    while count > 1 and sum(map(len, hosts[:count])) > _NAMES_LIMIT:
        count -= 1
    return join_and_count(hosts[:count], len(hosts) - count)


def join_and_count(words: Sequence[str], more: int) -> str:
    """Return words joined by commas, with the number of further ones."""
    return ", ".join(words) + (f" and {more} more" if more else "")


def signal_name(number: int) -> str:
    """Return a signal's name and number, as in `SIGSEGV (signal 11)`."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def lasted(seconds: float) -> str:
    """Return how long something took: 0.4 s, 95 s, 12 min, 3 h 7 min."""
    if seconds < 600:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def plural(count: object, word: str, ending: str = "s") -> str:
    """Return a number with its noun: 1 rank, 2 ranks."""
    return f"{count} {word}" if str(count) == "1" else f"{count} {word}{ending}"


def all_ranks(count: int) -> str:
    """Return how messages name all of several ranks."""
    return "both ranks" if count == 2 else f"all {count} ranks"


def flag(name: str) -> str:
    """Return the spelling of a field's option: `rdzv_port` gives `--launcher-rdzv-port`."""
    return PREFIX + name.replace("_", "-")


def other_port(field: str) -> str:
    """Return how to mend a port that cannot be used, by the field of its option."""
    return f"choose another with {flag(field)}, the same one on every host"


def is_loopback(address: str) -> bool:
    """Tell whether an address can be reached from this machine only."""
    return address == "::1" or address.startswith("127.")
