"""Every start of the launcher begins here: `python -m launcher`; `python launcher/__main__.py`, as
SageMaker runs an entry point; sm_launch.py, which also runs this file by its path; and
bundle/__main__.py, the start of the one-file launcher.

__init__.py, next to this file, says where each decision is made.
"""

import os
import sys

if not __package__:
    # Run by path: the package is the folder of this file. Do not search sys.path for it, where
    # another `launcher` may come first. And do not leave this folder in sys.path: its modules could
    # be imported as top-level ones.
    folder = os.path.dirname(os.path.abspath(__file__))
    real = os.path.dirname(os.path.realpath(__file__))  # the first path, as Python has made it
    others = [path for path in sys.path if os.path.realpath(path) != real]
    sys.path[:] = [os.path.dirname(folder)]
    sys.modules.pop("launcher", None)
    import launcher  # noqa: F401

    sys.path[:] = others


def run() -> int:
    """Run the launcher as this process's program; return its exit code."""
    # Replace closed streams. Otherwise ranks would get the launcher's files as theirs.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    # The toolkit puts the user's folder, where a json.py may be, in front of Python's own modules,
    # and site-packages may have old backports (enum34).
    library = os.path.dirname(os.__file__)
    sys.path.sort(key=lambda path: path not in (library, os.path.join(library, "lib-dynload")))
    import signal

    # Block stops until there are handlers for them (signals.py).
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    from launcher.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
