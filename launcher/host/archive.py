"""Where this package is: a folder, or an archive, the one file that `make bundle` makes."""

from __future__ import annotations

import os
from typing import Any

import launcher

_LOADER: Any = launcher.__spec__ and launcher.__spec__.loader
ARCHIVE: str = getattr(_LOADER, "archive", "")  # "" for a folder
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path: str) -> bytes:
    """Return the content of a file of this package. Raises OSError."""
    content: bytes = _LOADER.get_data(path)
    return content
