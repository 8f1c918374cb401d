"""Where dist/launcher.py begins (`make bundle`): Python executes the __main__.py of an archive.

It unpacks the archive into a folder, from which the launcher runs as from any other.
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

# A stop that comes now is kept until the launcher notes stops. Modules that are built in: others
# could be the user's.
import _signal  # noqa: E402
import time  # noqa: E402

_signal.pthread_sigmask(
    _signal.SIG_BLOCK, (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT)
)
archive = os.path.dirname(os.path.abspath(__file__))


def unpack():
    """Unpack this file into a new folder of TMPDIR; return the folder."""
    loader = zipimport.zipimporter(archive)
    parent = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    # As host/folders.py names folders: one that a killed launcher leaves is found, and removed.
    folder = os.path.join(parent, "sm-launch-%d-%x" % (os.getpid(), time.time_ns()))
    try:
        os.mkdir(folder, 0o700)
        for name in loader.get_data("FILES").decode().split():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(loader.get_data(name))
    except OSError as error:
        remove(folder)
        found = (archive, parent, error.strerror)
        refuse("cannot unpack %s into %s (%s); set TMPDIR to a folder where 2 MB are free." % found)
    return folder


def remove(folder):
    """Remove the folder with all that is in it, as far as that can be."""
    for path, folders, files in os.walk(folder, topdown=False):
        for act, names in ((os.remove, files), (os.rmdir, folders)):
            for name in names:
                try:
                    act(os.path.join(path, name))
                except OSError:
                    pass
    try:
        os.rmdir(folder)
    except OSError:
        pass


unpacked = unpack()
try:
    # From there alone: beside this file, and in PYTHONPATH, there may be another `launcher`.
    real = os.path.realpath(archive)
    others = [path for path in sys.path if os.path.realpath(path) != real]
    sys.path[:] = [unpacked]
    sys.modules.pop("launcher", None)
    from launcher import __main__ as program

    sys.path[:] = others
    code = program.run()
finally:
    remove(unpacked)
sys.exit(code)
