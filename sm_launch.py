"""The ways in that are found by name: the command `sm-launch`, and the toolkit's way to us.

SageMaker's toolkit puts the user's code folder in PYTHONPATH, in front of site-packages,
so a `launcher.py` there would be imported in place of ours. This module bears a name that
no training code has, and takes the `launcher` that lies beside it.
"""

import importlib
import os


def main() -> None:
    """Run the launcher, and exit with its exit code."""
    _run("__main__")


def train() -> None:
    """Train as the toolkit's training module (SAGEMAKER_TRAINING_MODULE=sm_launch:train)."""
    _run("launcher.__main__")  # from now on `launcher` is ours
    importlib.import_module("launcher.training").main()


def _run(name: str) -> None:
    # As `python launcher/__main__.py` does. runpy would import what it is to come before.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher", "__main__.py")
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": name, "__file__": path, "__package__": ""})
