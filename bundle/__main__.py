"""Where dist/launcher.py begins (`make bundle`): Python executes the __main__.py of an archive.

It is read by any Python, and so says to an old one what it lacks.
"""

import os
import sys


def refuse(problem):
    """End as for any configuration error: one line, the failure file, exit code 2."""
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    folder = os.environ.get("SM_OUTPUT_DIR") or os.path.join(base, "output")
    line = "launcher: " + problem + "\n"
    sys.stderr.write(line)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never over one that is there
        file = os.open(os.path.join(folder, "failure"), flags, 438)  # 0o666, as open() has it
        os.write(file, line.encode())
    except OSError:
        pass
    sys.exit(2)


if sys.version_info < (3, 9):
    refuse(
        "%s is Python %d.%d; expected 3.9 or later: run the launcher with the Python that has torch."
        % ((sys.executable,) + tuple(sys.version_info[:2]))
    )

# Only here: beside this file or in PYTHONPATH there may be another `launcher`.
archive = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != archive]
sys.path[:] = [archive]
sys.modules.pop("launcher", None)
from launcher import __main__ as program  # noqa: E402

sys.path[:] = others
sys.exit(program.run())
