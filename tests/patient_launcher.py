"""The real launcher, which waits as long as a busy machine needs for torchrun and the copier.

patient_launcher.py ARGUMENT ... For tests of what happens where nothing is late.
"""

from __future__ import annotations

import sys

del sys.path[0]  # the folder of the tests

from launcher.cli import main  # noqa: E402
from launcher.host import console  # noqa: E402
from launcher.run import ending  # noqa: E402


def be_patient() -> None:
    """Give torchrun and the copier a minute, in place of a few seconds."""
    ending.CLOSE_REQUEST_SECONDS = ending.MARGIN_SECONDS = 60
    console._SYNC_SECONDS = 60


if __name__ == "__main__":
    be_patient()
    sys.exit(main())
