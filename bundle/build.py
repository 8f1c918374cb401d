"""Makes one file of the launcher, an archive that Python executes.

    python bundle/build.py dist/launcher.py

The same sources give the same bytes, whoever builds where: files are stored as they are (what
deflates them differs between versions of Python), in order, all with one time and mode.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent


def contents() -> dict[str, bytes]:
    """Return the files of the archive by their names there; FILES names those to be unpacked."""
    files = {}
    for package in ("launcher", "launcher_tools", "smddp"):
        for path in (REPO / package).rglob("*.py"):
            files[path.relative_to(REPO).as_posix()] = path
    names = "\n".join(sorted(files)).encode()
    files |= {"__main__.py": HERE / "__main__.py", "LICENSE": REPO / "LICENSE"}
    return {"FILES": names, **{name: path.read_bytes() for name, path in files.items()}}


def build(out: Path) -> None:
    """Write the archive; one that is there is replaced only by a whole one."""
    entries = contents()
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    with open(part, "wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                entry.create_system = 3  # Unix, wherever this is
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, entries[name])
    os.chmod(part, 0o755)
    os.replace(part, out)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
