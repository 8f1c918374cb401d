"""The ways in that are found by name: the command `sm-launch`, and the toolkit's way to us.

SageMaker's toolkit puts the user's code folder in PYTHONPATH, in front of site-packages,
so a `launcher.py` there would be imported in place of ours. This module bears a name that
no training code has, and takes the `launcher` that lies beside it.
"""

import importlib
import importlib.util
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
    # By its path: sys.path might have another `launcher` first, and putting site-packages first
    # there would have old backports (enum34) stand in for the standard library.
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher")
    path = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        "launcher", path, submodule_search_locations=[folder]
    )
    assert spec and spec.loader
    sys.modules["launcher"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module(name)
