"""Fetch the pictures of ants and bees from PyTorch's transfer learning tutorial (45 MB).

    python examples/fetch_hymenoptera.py [FOLDER]     by default data/

They are then in FOLDER/hymenoptera_data: 244 to train with, 153 to validate with.
"""

import hashlib
import os
import sys
import tempfile
import urllib.request
import zipfile

URL = "https://download.pytorch.org/tutorial/hymenoptera_data.zip"
SIZE = 47286322  # bytes
SHA256 = "fbc41b31d544714d18dd1230b1e2b455e1557766e13e67f9f5a7a23af7c02209"
LIMIT = 10 * SIZE  # unpacked


def main(argv):
    """Fetch, check and unpack; return 0, or what went wrong. A second argument is another URL."""
    folder = argv[0] if argv else "data"
    url = argv[1] if len(argv) > 1 else URL
    target = os.path.join(folder, "hymenoptera_data")
    if os.path.isdir(target):
        print(f"{target} is there already.")
        return 0
    os.makedirs(folder, exist_ok=True)
    print(f"fetching {url} ({SIZE / 1e6:.0f} MB) ...", flush=True)
    # In a folder beside the target, which gets its name when all is there.
    with tempfile.TemporaryDirectory(dir=folder) as making:
        archive = os.path.join(making, "archive.zip")
        try:
            with urllib.request.urlopen(url, timeout=60) as source, open(archive, "wb") as file:
                data = source.read(SIZE + 1)
                file.write(data)
        except (OSError, ValueError) as error:
            return f"cannot fetch {url}: {error}"
        found = hashlib.sha256(data).hexdigest()
        if found != SHA256:
            return f"{url} is not what it was: SHA-256 {found}; expected {SHA256}"
        try:
            with zipfile.ZipFile(archive) as pictures:
                unpack(pictures, making)
        except ValueError as error:
            return str(error)
        os.rename(os.path.join(making, "hymenoptera_data"), target)
    print(f"fetched {target}")
    return 0


def unpack(archive, folder):
    """Unpack an archive below folder; ValueError if it would go elsewhere, or over LIMIT bytes."""
    if sum(member.file_size for member in archive.infolist()) > LIMIT:
        raise ValueError(f"{archive.filename} unpacks to more than {LIMIT} bytes")
    for member in archive.infolist():
        path = os.path.realpath(os.path.join(folder, member.filename))
        if not path.startswith(os.path.realpath(folder) + os.sep):
            raise ValueError(f"{archive.filename} holds {member.filename}, outside of its folder")
    archive.extractall(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
