"""Finds the script or module to run, before anything starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder

from launcher.errors import LaunchError
from launcher.job.options import Options


def located(chosen: Options, folders: Sequence[str]) -> Options:
    """Return the options with the script's path as it was found; check that a module can be run.

    A script is looked for in the current folder, then in those given. It may be whatever
    `python PATH` takes: a file of source or bytecode, an archive, a folder with __main__.py.
    Raises LaunchError if there is no such script or module.
    """
    if chosen.train_module:
        problem = _problem(chosen.train_module)
        if problem:
            raise LaunchError(f"--train-module {chosen.train_module}: {problem}.")
        return chosen
    script = chosen.train_script
    places = [os.path.abspath(os.path.join(folder, script)) for folder in (".", *folders) if folder]
    places = list(dict.fromkeys(places))
    for place in places:
        if os.path.isfile(place) or (os.path.isdir(place) and _has_main([place])):
            # As it was typed, if it is found that way: it becomes the script's sys.argv[0].
            found = script if place == places[0] else place
            return chosen._replace(train_script=found)
    folder = next((place for place in places if os.path.isdir(place)), None)
    if folder:
        raise LaunchError(
            f"--train-script {script}: {folder} is a folder without __main__.py; "
            "expected a Python file, or a folder with __main__.py."
        )
    raise LaunchError(
        f"--train-script {script}: there is neither {' nor '.join(places)}."
        if len(places) > 1
        else f"--train-script {script}: there is no such file."
    )


def _problem(name: str) -> str:
    """Return why `python -m name` would fail, "" if it would not. Imports no package."""
    # The ranks have the current folder in front of sys.path; the launcher must not.
    path: Sequence[str] | None = [os.getcwd(), *sys.path]
    full = ""
    for part in name.split("."):
        inside = [os.path.join(folder, part) for folder in path or ()]
        full = f"{full}.{part}" if full else part
        try:
            spec = PathFinder.find_spec(full, path) if part and path is not None else None
        except KeyError:  # a namespace package in another one, which has not been imported
            path = inside
            continue
        if spec is None and full == part and part not in ("", *sys.modules):
            from importlib.util import find_spec  # an editable install has a finder of its own

            spec = find_spec(part)
        if spec is None:
            return (
                f"there is no such module in {os.getcwd()}, in PYTHONPATH or installed; "
                "expected a name as for python -m (for a file: --train-script)"
            )
        path = spec.submodule_search_locations
        if path is not None and spec.origin is None:
            path = inside  # of a namespace package, which gets a path only when it is imported
    if path is None or _has_main(path, name):
        return ""
    programs = [f"{name}.{module}" for _, module in zip(range(5), _programs(path))]
    hint = f"; try {' or '.join(programs)}" if programs else ""
    return f"it is a package without __main__, which python -m cannot run{hint}"


def _has_main(path: Sequence[str], package: str = "") -> bool:
    return PathFinder.find_spec(f"{package}.__main__".lstrip("."), path) is not None


def _programs(path: Sequence[str]) -> Iterator[str]:
    """Yield the modules of a package that look as if they can be run."""
    for folder in path:
        for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            place = os.path.join(folder, entry)
            with contextlib.suppress(OSError):  # not readable
                if os.path.isfile(os.path.join(place, "__main__.py")):
                    yield entry
                elif entry.endswith(".py") and os.path.isfile(place):
                    with open(place, errors="replace") as file:
                        if "if __name__ == " in file.read(1 << 20):
                            yield entry[: -len(".py")]
