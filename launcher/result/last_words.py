"""Why a process ended, by its last output. Pure.

Of an abort only messages right before abort() count: C++'s for an uncaught exception, Python's for
a fatal error, glibc's, and assert()'s.
"""

from __future__ import annotations

import re

_MESSAGES = re.compile(
    # C++: what() may have many lines, the first one says what happened.
    r"^terminate called after throwing an instance of '(?P<type>[^'\n]+)'\n"
    r"(?:\s*what\(\):\s*(?P<what>.*))?"
    # Not faulthandler's own line for any abort().
    r"|^(?P<python>Fatal Python error: (?!Aborted$|Segmentation fault$|Bus error$).+)"
    r"|^(?:.*: )?(?P<other>terminate called without an active exception"
    r"|(?:malloc|free|realloc|calloc|munmap_chunk|malloc_consolidate|malloc_printerr)\(\): [a-z].+"
    r"|double free or corruption.*|corrupted (?:size vs\. prev_size|double-linked list).*"
    r"|\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*: .*"
    r"|[^\n]+:\d+: .+: Assertion .+ failed\.)$",
    re.MULTILINE,
)
# If the output continues like this, the message was another process's, such as a data loader's
# worker.
_GOES_ON = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)


def last_words(text: str) -> str:
    """Return why a process with this last output was aborted, in one line; "" if not sure."""
    *_, found = (None, *_MESSAGES.finditer(text))
    if found is None or _GOES_ON.search(text, found.end()):
        return ""
    if found["type"]:
        what = " ".join((found["what"] or "").split())
        return f"{found['type']}: {what}" if what else found["type"]
    return " ".join((found["python"] or found["other"]).split())


def last_line(text: str) -> str:
    """Return the last line of output that is not blank, as a terminal shows it; "" if none."""
    shown = (line.rstrip().rpartition("\r")[2] for line in reversed(text.split("\n")))
    return next((line.strip() for line in shown if line.strip()), "")
