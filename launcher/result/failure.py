"""The failure file, whose first 1,024 characters SageMaker shows as FailureReason."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.job import toolkit
from launcher.log import log


def output_dir(environ: Mapping[str, str]) -> str:
    """Return the folder that SageMaker reads the failure file from."""
    return environ.get("SM_OUTPUT_DIR") or os.path.join(toolkit.base_dir(environ), "output")


def write_failure(text: str, environ: Mapping[str, str], *, quiet: bool = False) -> str | None:
    """Write the failure file, never over one that is there; return its path if written.

    A folder that is missing or read-only costs a line in the log (none if quiet), not the job.
    """
    path = os.path.join(output_dir(environ), "failure")
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        if not quiet:
            log(f"{path} exists already; left as it is.")
    except OSError as error:
        if not quiet:
            log(f"warning: cannot write {path} ({error.strerror}).")
    else:
        return path
    return None
