"""The failure file, whose first 1,024 characters SageMaker shows as FailureReason."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping

from launcher.job import toolkit
from launcher.text.log import log

# The versions that the files had before this launcher started, an earlier run's, by their paths.
_earlier: dict[str, tuple[int, ...] | None] = {}
_RESERVE = 8192  # bytes: more than the text has
# The descriptor of an unlinked file that reserves them on the failure file's volume until the file
# is written: full volumes are frequent failures. Creating `failure` early would end the toolkit's
# uploads.
_reserve: list[int] = []


def output_dir(environ: Mapping[str, str]) -> str:
    """Return the folder where SageMaker reads the failure file."""
    return environ.get("SM_OUTPUT_DIR") or os.path.join(toolkit.base_dir(environ), "output")


def version_of(path: str) -> tuple[int, ...] | None:
    """Return a value that changes when a file is written or replaced; None if there is no file.

    No clocks are compared: the file system's may be another machine's.
    """
    with contextlib.suppress(OSError):
        seen = os.lstat(path)
        if stat.S_ISREG(seen.st_mode):
            return (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    return None


def prepare_failure(environ: Mapping[str, str]) -> None:
    """Reserve space for the failure file, and note an earlier run's."""
    path = _path(environ)
    with contextlib.suppress(OSError):  # the folder does not exist, or its volume is full already
        name = f"{path}-reserve-{os.getpid()}"
        _reserve.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(name)
        os.posix_fallocate(_reserve[-1], 0, _RESERVE)
    _earlier[path] = version_of(path)


def write_failure(text: str, environ: Mapping[str, str], *, quiet: bool = False) -> None:
    """Write the failure file, but not over one of this run.

    A missing or read-only folder costs a line in the log (none if quiet), not the job.
    """
    path = _path(environ)
    earlier = _earlier.get(path)
    is_earlier = earlier is not None and earlier == version_of(path)
    while _reserve:
        os.close(_reserve.pop())
    try:
        with open(path, "w" if is_earlier else "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        if not quiet:
            log(f"{path} already exists; it is kept as it is.")
    except OSError as error:
        if not quiet:
            log(f"warning: cannot write {path} ({error.strerror}).")
        with contextlib.suppress(OSError):
            if not os.path.getsize(path):  # it is useless
                os.remove(path)
    else:
        if is_earlier:
            log(f"{path} was left by an earlier run; it has been replaced.")


def _path(environ: Mapping[str, str]) -> str:
    return os.path.join(output_dir(environ), "failure")
