"""Count files in folders that scripts write to; a folder may be on another machine, and hang."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence

from launcher.host.within import within

_SECONDS = 1.0  # for a count: a job's end waits for it


def files_below(folders: Sequence[str], age: float | None = None) -> int:
    """Count the files below some folders that have changed within `age` seconds.

    A folder that does not exist has none. Return -1 if a second was not enough. Without an age,
    stop at the first file.
    """
    changes = _changes(folders)
    if age is None:
        return within(_SECONDS, lambda: len([*itertools.islice(changes, 1)]), -1)
    since = time.time() - age
    return within(_SECONDS, lambda: sum(changed >= since for changed in changes), -1)


def _changes(folders: Sequence[str]) -> Iterator[float]:
    """Yield when each file has changed, in seconds since the epoch."""
    for top, _, names in itertools.chain.from_iterable(map(os.walk, folders)):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone
                yield os.lstat(os.path.join(top, name)).st_ctime
