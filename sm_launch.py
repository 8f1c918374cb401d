"""Starts the launcher by name: for the command `sm-launch` and for the toolkit.

SageMaker's toolkit puts the user's code folder in PYTHONPATH, in front of site-packages, so a
`launcher.py` there would be imported in place of ours. This module has a name that no training code
has, and uses the `launcher` beside it.
"""

import importlib
import os


def main() -> None:
    """Run the launcher, and exit with its exit code."""
    _run("__main__")


def train() -> None:
    """Train as the toolkit's training module (SAGEMAKER_TRAINING_MODULE=sm_launch:train)."""
    _run("launcher.__main__")  # now sys.modules has our `launcher`
    importlib.import_module("launcher.container.training").main()


def _run(name: str) -> None:
    # As `python launcher/__main__.py` does. runpy would import modules before __main__.py can set
    # the order of sys.path.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launcher", "__main__.py")
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, {"__name__": name, "__file__": path, "__package__": ""})
