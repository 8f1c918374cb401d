"""Reads a tool's own options. A mistake is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from launcher.errors import LaunchError


class Parser(argparse.ArgumentParser):
    """A parser of the options of `sm-launch NAME`; it raises LaunchError."""

    def __init__(self, name: str) -> None:
        super().__init__(f"sm-launch {name}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise LaunchError."""
        raise LaunchError(f"{message}; see {self.prog} --help.")
