"""Count files in folders that scripts write to; a folder may be on another machine, and hang."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence

from launcher.text.background import within

_SECONDS = 1.0  # for a count: a job's end waits for it
_MOST_ENTRIES = 2000


def files_below(folders: Sequence[str], age: float = math.inf) -> int:
    """Count the files below some folders that have changed within `age` seconds.

    A folder that does not exist has none. Return -1 if a second or 2,000 entries were not enough.
    """
    since = time.time() - age

    def count() -> int:
        changes = list(itertools.islice(_changes(folders), _MOST_ENTRIES + 1))
        return -1 if len(changes) > _MOST_ENTRIES else sum(change > since for change in changes)

    return within(_SECONDS, count, -1)


def _changes(folders: Sequence[str]) -> Iterator[float]:
    """Yield when each file has changed, in seconds since the epoch; for each folder, never."""
    for top, below, names in itertools.chain.from_iterable(map(os.walk, folders)):
        yield from (-math.inf for _ in below)
        for name in names:
            with contextlib.suppress(OSError):  # it is gone
                yield os.lstat(os.path.join(top, name)).st_ctime
