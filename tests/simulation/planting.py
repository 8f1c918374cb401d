"""Jobs as data, in mistakes.txt, jobs.txt and real.txt; mistakes, planted into the launcher."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from simulation.plan import Plan, read

HERE = Path(__file__).parent
REPO = HERE.parents[1]


class Case(NamedTuple):
    """A job of a file: its plan, and how all hosts end, if it says so.

    With a mistake, `old` becomes `new` in the `file` of the launcher, which breaks the promise.
    """

    what: str
    file: str
    old: str
    new: str
    promise: str
    end: str
    plan: Plan


def cases(file: Path) -> list[Case]:
    """Return all jobs of a file."""
    blocks = file.read_text(encoding="utf-8").split("\n\n")
    return [_case(block.splitlines()) for block in blocks if block[0] != "#"]


def _case(lines: list[str]) -> Case:
    of = {sign: "\n".join(line[2:] for line in lines if line[:2] == f"{sign} ") for sign in "-+!=>"}
    plan = read(of[">"]) if of[">"] else Plan()
    return Case(lines[0], lines[1], of["-"], of["+"], of["!"], of["="], plan)


@contextlib.contextmanager
def planted(mistake: Case) -> Iterator[None]:
    """Have functions do what they would do with the mistake in their source."""
    path = REPO / mistake.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mistake.old) == 1, f"{mistake.file} has this not once: {mistake.old}"
    before = _codes(compile(source, str(path), "exec"))
    after = _codes(compile(source.replace(mistake.old, mistake.new), str(path), "exec"))
    name = mistake.file.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    changed = [found for found, code in after.items() if before.get(found) != code]
    assert changed, mistake
    with contextlib.ExitStack() as stack:
        for names in changed:
            function = _function(module, names)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = after[names]
        yield


def _codes(code: types.CodeType) -> dict[tuple[str, ...], types.CodeType]:
    """Return the codes of a module's functions and methods, by their names."""
    found = {}
    for part in code.co_consts:
        if isinstance(part, types.CodeType) and part.co_name[0] != "<":
            if part.co_flags & 0x2:  # CO_NEWLOCALS: a function, and no class
                found[(part.co_name,)] = part
            else:
                inner = _codes(part).items()
                found.update({(part.co_name, *names): one for names, one in inner})
    return found


def _function(module: types.ModuleType, names: tuple[str, ...]) -> Any:
    found: Any = module
    for name in names:
        found = vars(found)[name]
    return getattr(found, "fget", found)
