"""Describes the exception that ends a rank, in the form that raised.py reads.

Loaded by rank.py, in the script's process. To read the attributes of a script's exception may run
the script's code: nothing that this raises may change how the script ends.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import signal
import sys
import time
import traceback
import types
from typing import Any

# Limits of the message, in characters. People see 1,024 of them, but an exception's text may hold
# another process's whole traceback, whose end matters most (raised.py reads it). The total stays
# below the limit of lines.py, 1 MiB, at 6 bytes a character (a control character in JSON).
_BEGIN, _END = 1000, 5000
_FRAMES, _LINE, _NAME, _NOTE = 3000, 200, 300, 400
_LINKS = 6  # at most, of a chain's exceptions: from its start, from its end, and hidden ones
_WALK = 10_000  # exceptions to walk through for its end
# Modules of the base classes of such processes; torch's are the first's.
_MULTIPROCESSING = ("multiprocessing.process", "multiprocess.process")
_SIGNALS = {one.value: f"{one.name} (signal {one.value})" for one in signal.Signals}
_TO_DIE = 0.2  # s between the end of a process's connections and its own end
_RUN = os.path.dirname(__file__)
_CLUES = importlib.machinery.SourceFileLoader("clues", os.path.join(_RUN, "clues.py"))
_OURS = (_RUN, os.path.join(os.path.dirname(_RUN), "warm"))
_ORIGINS = ("__cause__", "__context__", "__suppress_context__")


def own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without its first frames, those of rank.py and of what runs it."""
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) in _OURS:
        trace = trace.tb_next
    return trace


def end(error: BaseException) -> dict[str, Any]:
    """Return what the launcher should know of the exception that ends this process.

    The result has fields of raised.Exit, and `counted` (clues.behind), if the exit code is not 0.
    """
    found: dict[str, Any] = {"exit_code": 1, "chain": [], "notes": []}
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            if isinstance(code, int):
                # As Python does it: a C long, of which wait(2) returns eight bits.
                found["exit_code"] = int.__and__(code, 0xFF) if -(2**63) <= code < 2**63 else 255
        elif type(error) is KeyboardInterrupt:
            found["exit_code"] = -signal.SIGINT
        links = came_from(error)
        errors = [link for link, _ in links]
        found["chain"] = [described(link, how) for link, how in links]
        if found["exit_code"]:
            is_broken = any(map(_is_broken_connection, errors))
            found["notes"] = killed() if is_broken else []
            text = "\n".join(f"{link['exception']}: {link['message']}" for link in found["chain"])
            clues: Any = types.ModuleType("clues")
            _CLUES.exec_module(clues)
            more = clues.behind(text, errors)
            more["counted"] += ["memory"] * is_broken
            notes = [note[:_NOTE] for note in (*found["notes"], *more["notes"])]
            found |= {**more, "notes": notes}
    except Exception:
        pass  # a property that raises, no memory left: then the exit code must suffice
    return found


def killed() -> list[str]:
    """Return that a process of multiprocessing was killed, in words, if one was.

    To be called if a connection to one broke. A process that SIGTERM has ended does not count:
    somebody ended it.
    """
    by = time.monotonic() + _TO_DIE
    with contextlib.suppress(Exception):  # an unknown version of Python
        while time.monotonic() < by:
            modules = map(sys.modules.get, _MULTIPROCESSING)
            children = [child for module in modules for child in getattr(module, "_children", ())]
            for child in children:
                number = -(child.exitcode or 0)
                if number > 0 and number != signal.SIGTERM:
                    how = _SIGNALS.get(number, f"signal {number}")
                    name = f"{str(child.name)[:_NAME]} (pid {child.pid})"
                    return [f"its child process {name} was killed by {how}"]
            if not children:
                break
            time.sleep(0.01)
    return []


def _is_broken_connection(error: BaseException) -> bool:
    """Tell whether an exception is about a broken connection to a process of multiprocessing."""
    if not isinstance(error, (EOFError, ConnectionError)):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = os.path.basename(os.path.dirname(files[-1])) if files else ""
    return package in ("multiprocessing", "multiprocess")


def came_from(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return an exception and those that it came from, each with how (see raised.Link).

    First those that Python would print, outermost first; then those that it hides. A group's first
    member stands for the group: its origins are listed, and the group's own are hidden.
    """
    shown: list[tuple[BaseException, str]] = []
    hidden: list[tuple[BaseException, str]] = []
    todo = [(error, "")]
    seen: set[int] = set()
    while todo and len(seen) < _WALK:
        link, how = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        (hidden if how == "hidden" else shown).append((link, how))
        origins, first = _origins(link), members(link)[0]
        if first is not link:
            of_first = _origins(first)
            if any(way != "hidden" for _, way in of_first):
                origins = [(one, "hidden") for one, _ in origins]
            origins += of_first
        todo += [(one, "hidden" if how == "hidden" else way) for one, way in origins]
    return shown[:_LINKS] + shown[_LINKS:][-_LINKS:] + hidden[:_LINKS]


def _origins(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return the exceptions that an exception itself came from, the nearest last."""
    # Read them from the base class as Python does: a subclass may hide them.
    cause, context, silent = (BaseException.__dict__[name].__get__(error) for name in _ORIGINS)
    found = [(context, "hidden" if silent or cause is not None else "context"), (cause, "cause")]
    return [(one, how) for one, how in found if one is not None]


def described(error: BaseException, how: str) -> dict[str, str]:
    """Return one exception of a chain, as the fields of raised.Link."""
    inner = members(error)
    message = text_of(error)
    if inner[0] is not error:
        inside = "; ".join(f"{name_of(one)}: {text_of(one)[:300]}" for one in inner)
        message = f"{message[:_BEGIN]}: {inside}"
    if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
        message = ""  # its output may say more (clues.py)
    return {
        "exception": "" if isinstance(error, SystemExit) else name_of(error),
        "message": message,
        "frames": frames_of(inner[0]) or frames_of(error),
        "how": how,
    }


def members(error: BaseException) -> list[BaseException]:
    """Return a group's first exceptions, also from nested groups; or error itself."""
    group = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11
    found: list[BaseException] = []
    todo = [error]
    while todo and len(found) < 3:
        one = todo.pop(0)
        if isinstance(one, group):
            todo[:0] = one.exceptions[:3]  # type: ignore[attr-defined]
        else:
            found.append(one)
    return found


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class as a traceback has it."""
    kind = type(error)
    module = kind.__module__
    if not isinstance(module, str) or module in ("builtins", "__main__", "__mp_main__"):
        return kind.__qualname__[-_NAME:]
    return f"{module}.{kind.__qualname__}"[-_NAME:]


def text_of(error: BaseException) -> str:
    """Return an exception's text and notes, cut in the middle if they are long."""
    try:
        notes = getattr(error, "__notes__", ())  # Python 3.11
        parts = [error, *(notes[:9] if isinstance(notes, (list, tuple)) else ())]
        return cut("\n".join(cut(str(part)) for part in parts))
    except BaseException:  # whatever the script's own __str__ raises
        return "(its text cannot be shown)"


def cut(text: str) -> str:
    """Return a text, without its middle if it is long."""
    return text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} ... {text[-_END:]}"


def frames_of(error: BaseException) -> str:
    """Return an exception's innermost frames, as a traceback prints them but for its `^^^`."""
    try:
        lines = "".join(traceback.format_tb(own_frames(error.__traceback__), -50)).splitlines()
    except Exception:  # a loader of the script cannot show its source
        return ""
    return "\n".join(line[:_LINE] for line in lines if line.strip(" ~^"))[-_FRAMES:]
