"""Explain a rank's failure by the chain of exceptions that rank.py makes. Pure.

Programs seldom end with the original exception. They raise another one from it, call
sys.exit in an `except` (hydra, click, argparse), or pass it on from another process as text
(torch's data loader and spawn, multiprocessing, joblib).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.text.words import shortened

# Only collectives report a connection to another rank in these words, wherever they are raised: C++
# methods, such as work.wait(), have no frame of their own. From torch 2.13; gloo's as in
# "[/b/gloo/transport/tcp/pair.cc:553] Connection closed by peer"; NCCL's are DistBackendErrors.
_OF_COLLECTIVES = re.compile(
    r"torch\.distributed\.Dist(Backend|Network|Store)Error|tensorpipe/"
    r"|gloo/(transport|rendezvous)/|Gloo connectFullMesh failed"
)
# But with this, gloo complains about the call itself (an unknown interface).
_OF_THE_CALL = "enforce fail at"
# Generic connection errors; they point at another rank only if raised in these places.
_BROKEN = re.compile(
    "^(BrokenPipe|EOF|Connection(Aborted|Refused|Reset))Error: "
    "|Broken pipe|Connection closed by peer|Connection reset by peer|Socket Timeout"
)
# A rank has waited as long as torch lets it: the others follow when its connections break. But of
# monitored_barrier() only rank 0 knows for whom all have waited.
_GAVE_UP = re.compile(r"[Tt]imed out (?:waiting|after) \d|wait timeout after|operation timeout")
_REACHED = "successfully reached monitoredBarrier"
_BETWEEN_RANKS = re.compile(
    r"/torch/(autograd|distributed(?!/checkpoint/)|multiprocessing|nn/parallel)/|/multiprocessing/"
)
_FILE = re.compile(r'^ *File "([^"\n]*)', re.MULTILINE)
# Exceptions that only carry an exit code; rank.py leaves the name of a SystemExit empty.
_EXITS = ("", "click.exceptions.Exit")
_HEADER = "Traceback (most recent call last):\n"
_BETWEEN = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_HEADERS = re.compile(f"(?:^({'|'.join(_BETWEEN)})\n+)?^{re.escape(_HEADER)}", re.MULTILINE)
# torch.distributed.checkpoint lists the failed ranks' tracebacks; the last is cut least.
_OF_CHECKPOINT = re.compile(
    rf"CheckpointException ranks:(?s:.*)^{re.escape(_HEADER[:-1])} \(RANK (\d+)\)\n", re.MULTILINE
)
_PARTS = re.compile(r"((?: .*\n?|\n)*)(?s:(.*))")  # the frames, then the exception's own lines
# In characters: an exception alone; with its origin; the origin.
_ALONE, _SHOWN, _ORIGIN = 500, 250, 150


class Link(NamedTuple):
    """One exception of a chain; `frames` are innermost last.

    `how` is its relation to the one before it, in Python's words: its "cause", its "context" (which
    was being handled), or "hidden" (which Python would not print, such as the context of a `raise
    ... from None`, or the origin of a group whose first member has its own origin, which stands for
    the group's); "" is the outermost.
    """

    exception: str = ""
    message: str = ""
    frames: str = ""
    how: str = ""

    def title(self, limit: int = 10**9) -> str:
        """Return the exception with its message, as one line."""
        name = self.exception or "SystemExit"
        message = shortened(_one_line(self.message), limit)
        return f"{name}: {message}" if message else name


class Exit(NamedTuple):
    """How a rank, or a thread of it, has ended, and what else its host knows of that.

    `exit_code` is negative for a signal. What raised comes with its exceptions (run/rank.py, read).
    A rank that was killed, or called os._exit, has none. `notes` are further facts in words: a
    killed child, a shortage (clues.py).
    """

    exit_code: int
    chain: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    recorded: str = ""  # what the kernel's counters show
    broken: str = ""  # hardware
    words: str = ""  # its last output: why it was aborted, or the last line if it exited
    place: str = ""  # where it crashed: `load, data.py:88`
    frames: str = ""  # the calls there, as a traceback shows them
    at: str = ""  # the time of day of a crash
    after_script: bool = False  # an exit handler or a thread has ended it


def read(chain: Sequence[Link]) -> tuple[Link, ...]:
    """Return the exceptions of a chain, with tracebacks in their messages expanded."""
    links: list[Link] = []
    for link in chain:
        before, inner = _printed(link.message)
        if not inner or link.how == "hidden":
            links.append(link)
        elif link.exception.endswith("RemoteTraceback"):
            # multiprocessing's: the exception before it is the same, without frames.
            if links and inner[0].exception.endswith(links[-1].exception.rpartition(".")[2]):
                links[-1] = links[-1]._replace(frames=inner[0].frames)
                del inner[0]
            links += inner
        elif _where(before):
            # torch's: the exception is a copy, or ProcessRaisedException.
            message = inner[0].message.partition("\n\nAt:\n")[0]  # pybind11 appends its place
            message = f"{message} ({_where(before)})".lstrip()
            links += [inner[0]._replace(message=message, how=link.how), *inner[1:]]
        else:
            links += [link._replace(message=before), *inner]
    return tuple(links)


def headline(links: Sequence[Link]) -> str:
    """Return how a rank with these exceptions ended, in a line without its name; "" if unknown.

    "failed with RuntimeError: no model (from ValueError: loss is nan)", "exited: no data".
    """
    text, links = _exit(links)
    if text:
        return _with_origin(f"exited: {text}", links[0] if links else None)
    return _with_origin(f"failed with {links[0].title()}", _origin(links)) if links else ""


def aside(links: Sequence[Link]) -> str:
    """Return another thread's exception, in few characters: "raised ValueError: bad file"."""
    return shortened(_with_origin(f"raised {links[0].title(_ORIGIN)}", _origin(links)), _SHOWN)


def _with_origin(shown: str, origin: Link | None) -> str:
    if origin is None:
        return shortened(shown, _ALONE)
    message = _one_line(origin.message)
    word = "while handling" if origin.how == "context" else "from"
    # Do not repeat a message: RuntimeError(f"no model: {error}").
    named = origin.exception if message and message in shown else origin.title(_ORIGIN)
    return f"{shortened(shown, _SHOWN)} ({word} {named})"


def frames(links: Sequence[Link]) -> str:
    """Return the frames of the exception that the headline names."""
    return next((link.frames for link in _exit(links)[1]), "")


def has_timed_out(link: Link) -> bool:
    """Tell whether a rank has given up waiting for others."""
    return bool(_GAVE_UP.search(link.message)) and _REACHED not in link.message


def is_secondary(link: Link) -> bool:
    """Tell whether an exception may be the consequence of another rank's end.

    Such are errors that only collectives raise, and connections that broke where ranks talk to each
    other: in torch or multiprocessing. In a download or a database driver it is the rank's own
    failure.
    """
    said = f"{link.exception}: {link.message}"
    if _OF_COLLECTIVES.search(said):
        return _OF_THE_CALL not in said
    return bool(_BROKEN.search(said) and _BETWEEN_RANKS.search(_raised_in(link.frames)))


def _raised_in(frames: str) -> str:
    """Return the file of the innermost frame outside socket.py, "" if there is none."""
    files = _FILE.findall(frames)
    return next((file for file in reversed(files) if not file.endswith("/socket.py")), "")


def _exit(links: Sequence[Link]) -> tuple[str, list[Link]]:
    """Return the message of an exit ("" if none), and the exceptions that led to it."""
    links = [link for link in links if link.how != "hidden"]
    text = ""
    while links and links[0].exception in _EXITS:
        exit_ = links.pop(0)
        text = text or ("" if exit_.exception else _one_line(exit_.message))
    return text, links


def _origin(links: Sequence[Link]) -> Link | None:
    """Return the origin of the first of these: the last of the same kind; None if it is alone."""
    origin = None
    for link in links[1:]:
        if origin and link.how != origin.how:
            break
        if link.exception not in _EXITS:
            origin = link
    return origin


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _where(before: str) -> str:
    """Return where an exception that torch has wrapped was raised, "" if torch has not."""
    if before.startswith("Caught ") and before.endswith("Original"):
        return before.partition("\n")[0].partition(" ")[2].partition(" ")[2].rstrip(".")
    if before.startswith("-- Process ") and before.endswith("terminated with the following error:"):
        return f"in spawned process {before.split()[2]}"
    if before.startswith("CheckpointException: "):  # torch.distributed.checkpoint
        return f"on rank {before.split()[-1]}, in a checkpoint"
    if "On WorkerInfo(" in before:  # torch.distributed.rpc
        return f"on {before.partition('name=')[2].partition(')')[0]}"
    return ""


def _printed(message: str) -> tuple[str, list[Link]]:
    """Return the text before a traceback in a message, and that traceback's exceptions."""
    message = _OF_CHECKPOINT.sub(rf"CheckpointException: \1\n{_HEADER}", message)
    before, header, printed = message.partition(_HEADER)
    if not header or not (before[-1:] in ("", "\n") or before.endswith("Original ")):
        return message, []
    links: list[Link] = []
    # multiprocessing and concurrent.futures quote it like a long string of Python.
    pieces = _HEADERS.split(printed.rstrip().removesuffix('"""').removesuffix("'''"))
    # Each exception, and the line between it and the next one.
    for text, how in zip(pieces[::2], [*pieces[1::2], None]):
        frames, said = _PARTS.findall(text)[0]
        name, _, words = said.strip().partition(": ")
        if name:
            name, how = name.removeprefix("__mp_main__."), _BETWEEN.get(how or "", "cause")
            links.insert(0, Link(name, words, frames.rstrip("\n"), how))
    return before.strip(), links
