"""Reads --launcher-torchrun-args as torchrun itself does.

torchrun runs the first word that is neither one of its options nor the value of one. Its options
depend on its version, and importing it takes a second: so its parser is rebuilt from its source's
text, with argparse, which knows the rest.
"""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from launcher.errors import UnexpectedError
from launcher.text.words import flag, short

_TARGET = "--train-module NAME or --train-script PATH"
# torchrun's options that the launcher sets, and what to use in their place.
_SET_BY_LAUNCHER = {
    "module": _TARGET,
    "no_python": _TARGET,
    "run_path": _TARGET,
    "nproc_per_node": flag("nproc_per_node"),
    "max_restarts": flag("max_restarts"),
    "log_dir": flag("log_dir"),
    "shutdown_timeout": flag("grace"),
    "nnodes": f"{flag('instance_groups')} for fewer hosts than all",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def settings_of(words: Sequence[str], source: str) -> Mapping[str, str]:
    """Return the values of torchrun's options in some words, by the options' fields.

    A switch has the value 1. `source` is that of torch/distributed/run.py. Raises LaunchError for
    words that torchrun would refuse, or would run, and for options that the launcher sets.
    """
    try:
        given, others = parser_of(source).parse_known_args(words)
        if others or "--" in words:
            word = next((word for word in words if word in others), "--")
            raise ValueError(f"{short(word)} is neither an option of this torchrun nor a value")
        for name in vars(given):
            if name in _SET_BY_LAUNCHER:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is the launcher's to set: use {_SET_BY_LAUNCHER[name]}")
    except ValueError as error:
        expected = f"options of torchrun and their values ({error})"
        raise UnexpectedError(flag("torchrun_args"), shlex.join(words), expected) from None
    return {name: str(value) for name, value in vars(given).items()}


def parser_of(source: str) -> _Parser:
    """Return a parser with torchrun's options, without argparse's own."""
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
            if names and names[0].startswith("-"):
                # torchrun's own action for switches; it checks values itself.
                is_switch = any(getattr(k.value, "id", "") == "check_env" for k in node.keywords)
                switch: Any = {"action": "store_const", "const": "1"}
                parser.add_argument(*names, **(switch if is_switch else {}))
    return parser
