"""Makes one file of the launcher, an archive that Python executes.

    python bundle/build.py dist/launcher.py

The bytes depend on nothing but the files in it: they are stored as they are (zlib's versions differ),
in order, with one time and one mode for all.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent


def contents() -> dict[str, bytes]:
    """Return what is in the archive: names, in order, and bytes; None for a folder."""
    sources = {"__main__.py": HERE / "__main__.py", "LICENSE": REPO / "LICENSE"}
    for path in (REPO / "launcher").rglob("*.py"):
        sources[path.relative_to(REPO).as_posix()] = path
    return {name: sources[name].read_bytes() for name in sorted(sources)}


def folders(names: list[str]) -> set[str]:
    """Return the folders of files. Python sees a package without __init__.py only if they are there."""
    return {f"{parent.as_posix()}/" for name in names for parent in list(Path(name).parents)[:-1]}


def build(out: Path) -> None:
    """Write the archive, in place of one that is there only when it is whole."""
    files = contents()
    entries = {**dict.fromkeys(folders(list(files)), b""), **files}
    part = out.with_name(f"{out.name}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.create_system = 3  # Unix, whatever this is
                info.external_attr = (0o40755 << 16 | 0x10) if name[-1] == "/" else 0o100644 << 16
                archive.writestr(info, entries[name])
    os.chmod(part, 0o755)
    os.replace(part, out)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
