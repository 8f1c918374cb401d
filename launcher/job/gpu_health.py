"""Which GPUs of this host are broken, by the words of their driver. No processes.

`nvidia-smi -q` is asked, not `--query-gpu`: an older driver refuses all of a query of which it does
not know one field, as the recovery action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

COMMAND = ("nvidia-smi", "-q")
# Of the values of "GPU Recovery Action" (NVML_GPU_RECOVERY_ACTION_...), all but None.
_ACTION = re.compile("Reset|Reboot|Drain")
_GPU = re.compile(r"GPU [\dA-Fa-f]+:[\dA-Fa-f]+:[\dA-Fa-f.]+\s*$")  # begins what is said of one
_LOST = "GPU is lost"


class _Field(NamedTuple):
    """One value of a GPU, and where it stands: ("ECC Errors", "Volatile", "DRAM Uncorrectable")."""

    path: tuple[str, ...]
    value: str


def broken(text: str, environ: Mapping[str, str]) -> str:
    """Return which of the GPUs that ranks may use are broken, by what `nvidia-smi -q` says.

    "GPU 3 (GPU-5a...) has uncorrectable ECC errors", "" if none is, or if that is not known. If
    CUDA_VISIBLE_DEVICES names GPUs, only those count; if it names none, a script may set it.
    """
    entries = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    visible = [entry for entry in entries if entry and entry != "-1"]
    found = []
    for number, fields in enumerate(_gpus(text)):
        uuid = next((one.value for one in fields if one.path == ("GPU UUID",)), "")
        what = _what_is_wrong(fields)
        if what and (not visible or _is_among(number, uuid, visible)):
            found.append(f"GPU {number}{uuid and f' ({uuid})'} {what}")
    if not (visible or found):
        found += _lost(text)
    more = f", and {len(found) - 1} more of its GPUs are broken" if len(found) > 1 else ""
    return "".join(found[:1]) + more


def _lost(text: str) -> list[str]:
    """Return which GPUs nvidia-smi gives up at, each by its address.

    "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.  Reboot the system..."
    """
    lines = [line for line in text.splitlines() if f": {_LOST}" in line and line[:1] != " "]
    addresses = [line.partition(f": {_LOST}")[0].split()[-1:] for line in lines]
    return [f"GPU {one.replace('GPU', '')} is lost" for address in addresses for one in address]


def _what_is_wrong(fields: list[_Field]) -> str:
    """Return in words what is wrong with a GPU, "" if nothing is known to be."""
    if any(_LOST in one.value for one in fields):
        return "is lost"
    what = []
    if any(_counts_errors(one) for one in fields):
        what.append("has uncorrectable ECC errors")
    action = next(filter(None, map(_recovery_action, fields)), "")
    if action:
        what.append(f"needs a recovery action ({action})")
    return " and ".join(what)


def _recovery_action(field: _Field) -> str:
    """Return what the driver wants done to a GPU before it is used again, "" for nothing.

    Drivers before that action say whether a reset is required, or recommended.
    """
    if field.path == ("GPU Recovery Action",):
        return field.value if _ACTION.search(field.value) else ""
    is_asked = field.path[0] == "GPU Reset Status" and field.value == "Yes"
    return field.path[-1] if is_asked else ""


def _counts_errors(field: _Field) -> bool:
    """Tell whether a field counts uncorrectable errors since the driver was loaded, and has some.

    Up to Volta these are double bit errors. The aggregate counts are of the GPU's whole life.
    """
    if field.path[:2] != ("ECC Errors", "Volatile"):
        return False
    is_uncorrectable = any("Uncorrectable" in one or one == "Double Bit" for one in field.path[2:])
    return is_uncorrectable and field.value.isdecimal() and int(field.value[:18]) > 0


def _is_among(number: int, uuid: str, visible: Sequence[str]) -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES may name a GPU: by its number, UUID, or a slice of it."""
    return any(
        entry == str(number)
        or (entry.startswith("GPU-") and uuid.startswith(entry))
        or entry.startswith("MIG-")
        for entry in visible
    )


def _gpus(text: str) -> Iterator[list[_Field]]:
    """Yield the fields of each GPU, in the order of their numbers; what is indented is below."""
    fields: list[_Field] | None = None
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if _GPU.match(line):
            if fields is not None:
                yield fields
            fields, above = [], []
        elif fields is not None and line[:1] == " " and line.strip():
            name, colon, value = (part.strip() for part in line.partition(":"))
            indent = len(line) - len(line.lstrip())
            while above and above[-1][0] >= indent:
                above.pop()
            if colon:
                fields.append(_Field((*(name for _, name in above), name), value))
            else:
                above.append((indent, name))
    if fields is not None:
        yield fields
