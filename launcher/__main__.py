"""`python -m launcher`, and `python launcher/__main__.py` as SageMaker runs an entry point."""

import os
import sys

if not __package__:
    # Run by path: sys.path[0] is this folder, whose modules nobody should import by their
    # bare names. Its parent is where the package `launcher` is found.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [os.path.dirname(here)] + [path for path in sys.path if path != here]

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
