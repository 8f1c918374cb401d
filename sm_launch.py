"""The ways in that are found by name: the command `sm-launch`, and the toolkit's way to us.

SageMaker's toolkit puts the user's code folder in PYTHONPATH, in front of site-packages,
so a `launcher.py` there would be imported in place of ours. This module bears a name that
no training code has, and takes the `launcher` that lies beside it.
"""

import importlib
import os
import sys
from types import ModuleType


def main() -> int:
    """Run the launcher; return its exit code."""
    exit_code: int = _import("launcher.cli").main()
    return exit_code


def train() -> None:
    """Train as the toolkit's training module (SAGEMAKER_TRAINING_MODULE=sm_launch:train)."""
    _import("launcher.training").main()


def _import(name: str) -> ModuleType:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)
