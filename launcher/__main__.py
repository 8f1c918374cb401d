"""Every way into the launcher: `python -m launcher`, `python launcher/__main__.py` as SageMaker
runs an entry point, and sm_launch.py, which runs this file by its path, too.
"""

import os
import sys

if not __package__:
    # By path: the package is the folder of this file. sys.path is left to others: a `launcher` may
    # come first in it, and this folder's modules are not to be imported by their bare names.
    folder = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if path != folder]
    sys.path[:] = [os.path.dirname(folder)]
    sys.modules.pop("launcher", None)
    import launcher  # noqa: F401

    sys.path[:] = others

if __name__ == "__main__":
    # The toolkit puts the user's folder, where a json.py may be, in front of Python's own modules,
    # and old backports (enum34) lie beside the package in site-packages.
    library = os.path.dirname(os.__file__)
    sys.path.sort(key=lambda path: path not in (library, os.path.join(library, "lib-dynload")))

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
