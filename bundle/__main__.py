"""Where dist/launcher.py begins (`make bundle`): Python executes the __main__.py of an archive.

Python 2.7 and 3.6 can read it, too, so as to say that they are too old.
"""
# ruff: noqa: UP024, UP031, UP036, RUF005

import os
import sys
import zipimport


def refuse(problem):
    """End as for any configuration error: one line, the failure file, exit code 2."""
    line = "launcher: " + problem + "\n"
    base = os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml"
    folder = os.environ.get("SM_OUTPUT_DIR") or os.path.join(base, "output")
    try:
        sys.stderr.write(line)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never over one that is there
        file = os.open(os.path.join(folder, "failure"), flags, 438)  # 0o666, as for any new file
        os.write(file, line.encode())
    except (AttributeError, EnvironmentError, ValueError):  # no stderr, no such folder
        pass
    sys.exit(2)


if sys.version_info < (3, 9):
    found = (sys.executable,) + tuple(sys.version_info[:2])
    refuse("%s is Python %d.%d; expected 3.9 or later, the Python that has torch." % found)

archive = os.path.dirname(os.path.abspath(__file__))


class Importer(zipimport.zipimporter):
    """Compiles each module once. Python's own compiles it a first time for its file's name."""

    def get_filename(self, fullname):
        """Return the path of a module's source."""
        if self.archive != archive:
            return super().get_filename(fullname)
        path = os.path.join(archive, self.prefix + fullname.rpartition(".")[2])
        return os.path.join(path, "__init__.py") if self.is_package(fullname) else path + ".py"


sys.path_hooks.insert(0, Importer)
sys.path_importer_cache.pop(archive, None)

# From here alone: beside this file, and in PYTHONPATH, there may be another `launcher`.
others = [path for path in sys.path if path != archive]
sys.path[:] = [archive]
sys.modules.pop("launcher", None)
from launcher import __main__ as program  # noqa: E402

sys.path[:] = others
sys.exit(program.run())
