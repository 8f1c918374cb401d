"""The way in for the command `sm-launch`.

SageMaker's toolkit puts the user's code folder in PYTHONPATH, in front of site-packages,
so a `launcher.py` there would be imported in place of ours. This module bears a name that
no training code has, and takes the `launcher` that lies beside it.
"""

import os
import sys


def main() -> int:
    """Run the launcher; return its exit code."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    from launcher.cli import main as launch

    sys.path.remove(here)
    return launch()
