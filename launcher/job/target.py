"""Finds the script or module to run, and the folder to run it in, before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from launcher.errors import LaunchError
from launcher.job.options import Options
from launcher.text.words import printable, shortened

_SHELLS = (".sh", ".bash", ".zsh", ".ksh")


def located(options: Options, folders: Sequence[str], home: str = "") -> Options:
    """Return the options with the script's path as it was found; check that a module can be run.

    A script is looked for in the current folder, then in those given. It may be whatever
    `python PATH` takes: a file of source or bytecode, an archive, a folder with __main__.py. `home`
    is the folder where ranks run if what they run is below it, and not found from the current one.
    Raises LaunchError if there is no such script or module, or the script is no Python.
    """
    here = os.getcwd()
    if module := options.train_module:
        homes = [home] if home else []
        others = ", ".join([*homes, "in PYTHONPATH or installed"])
        if problem := _problem(module, [here, *homes, *sys.path], others):
            raise LaunchError(f"--train-module {module}: {problem}.")
        is_at_home = bool(homes and _problem(module, [here]) and not _problem(module, homes))
    else:
        script = options.train_script
        place = _find_script(script, folders)
        is_here = place == os.path.abspath(script)
        if not is_here:  # otherwise the script's sys.argv[0] stays as typed
            options = options._replace(train_script=place)
        is_below = bool(home) and os.path.commonpath([home, place]) == home
        is_at_home = is_below and (os.path.isabs(script) or not is_here)
    if is_at_home and os.path.realpath(home) != os.path.realpath(here):
        options = options._replace(folder=home)
    return options


def _find_script(script: str, folders: Sequence[str]) -> str:
    """Return the first existing path of a script of this name. Raises LaunchError."""
    places = [os.path.abspath(os.path.join(folder, script)) for folder in (".", *folders) if folder]
    places = list(dict.fromkeys(places))
    place = next((path for path in places if _is_program(path)), "")
    folder = next(filter(os.path.isdir, places), "")
    if place:
        problem = _other_language(place)
    elif folder:
        problem = f"{folder} is a folder without __main__.py; expected a Python file, or a folder "
        problem += "with __main__.py"
    elif len(places) > 1:
        problem = f"there is neither {' nor '.join(places)}"
    else:
        problem = "there is no such file"
    if not place and " -" in script:
        problem += "; give its arguments as words of their own, or as hyperparameters"
    if problem:
        raise LaunchError(f"--train-script {script}: {problem}.")
    return place


def _is_program(path: str) -> bool:
    return os.path.isfile(path) or (os.path.isdir(path) and _has_main([path]))


def _other_language(path: str) -> str:
    """Return why python cannot run a file, "" if there is no sign of that."""
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError:  # a folder; or Python will report it
        return ""
    name = printable(os.path.basename(path))
    if source.startswith(b"\x7fELF"):
        return "it is a compiled program, and ranks run Python; expected a Python file that runs it"
    if name.lower().endswith(".ipynb"):
        return f"it is a notebook; expected a Python file: jupyter nbconvert --to script {name}"
    first = source.partition(b"\n")[0].decode("utf-8", "replace").strip()
    if first[2:] and first.startswith("#!") and "py" not in first:
        why = f"its first line is {shortened(printable(first), 40)}"
    elif name.lower().endswith(_SHELLS):
        why = "it is a shell script by its name"
    else:
        return ""
    import zipfile  # only needed for an error

    # pip writes a `#!` line for sh, and Python behind it, if Python's path is long.
    if zipfile.is_zipfile(path) or _is_python(source):
        return ""
    return (
        f"{why}, and ranks run Python; make it the estimator's entry_point (entry_point={name}), "
        'end it with `exec python launcher.py "$@"`, and name a Python script here'
    )


def _is_python(source: bytes) -> bool:
    try:
        compile(source, "", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _problem(name: str, folders: Sequence[str], or_else: str = "") -> str:
    """Return why `python -m name` would fail, "" if it would not. Imports no package.

    Search the folders, which are in front of the ranks' sys.path and must not be in the launcher's;
    `or_else` names the other places.
    """
    path: Sequence[str] | None = folders
    for depth, part in enumerate(name.split(".")):
        # By its last part: a dotted name would need the packages above it to be imported.
        spec = PathFinder.find_spec(part, path) if part and path else None
        if spec is None and or_else and depth == 0 and part not in ("", *sys.modules):
            from importlib.util import find_spec  # an editable install has a finder of its own

            spec = find_spec(part)
        if spec is None:
            return (
                f"there is no such module in {os.getcwd()}, {or_else}; "
                "expected a name as for python -m (for a file: --train-script)"
            )
        path = spec.submodule_search_locations
    if path is None or _has_main(path):
        return ""
    return "it is a package without __main__, which python -m cannot run"


def _has_main(path: Sequence[str]) -> bool:
    return PathFinder.find_spec("__main__", path) is not None
