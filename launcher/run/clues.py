"""In a rank and its keeper: what the words of an error, or of a dead process, point to.

Errors seldom name what ran out. A full disk, little shared memory, a limit on processes and a
missing network interface are looked up at the error: later, nobody could tell. The launcher
(keepers.py) reads whether the kernel has killed for memory, or refused a process: it knows the
counts from before the job.

rank.py loads this in the script's process, at its exception; keeper.py imports it when a
script ends, or says why it will. It imports no module of ours.
"""

from __future__ import annotations

import _socket  # a keeper loads this, too: see lines.py
import errno
import os
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# What an error may come from, by its words: those of Python, torch, NumPy, SQLite, Rust and others.
_KINDS = {
    "shared memory": r"shared memory(?:\.| ?\(shm\)| (?:segment|object|limit|file))|</torch_"
    r"|/dev/shm/nccl|signal: Bus error|\bSIGBUS\b",
    "space": r"No space left on device|Disk quota exceeded|os error (?:28|122)\b"
    r"|(?:disk|device) is full|unexpected pos \d+ vs \d+|PytorchStreamWriter|file write failed"
    r"|iostream error|\b\d{1,19} requested and \d+ written|[Nn]ot enough (?:free |disk )+space",
    "files": r"Too many open files(?! in system)|\breceived 0 items of ancdata",
    # EAGAIN, in the words of Python, C++ and OpenBLAS; then ENOMEM, also that of shared memory.
    "processes": r"can't start new thread|Resource temporarily unavailable|pthread_create",
    "allocation": r"Cannot allocate memory",
    # SIGKILL has ended a process: torch's data loader ("is killed by signal: Killed") and spawn
    # ("terminated with signal SIGKILL"), subprocess ("died with <Signals.SIGKILL: 9>", "returned
    # non-zero exit status 137"), joblib ("exit codes of the workers are {SIGKILL(-9)}"). Or the
    # parent does not know how it ended: concurrent.futures, datasets' map(), and torch's data
    # loader, if it has not seen its worker's signal.
    "memory": r"(?i:\bSIGKILL\b|\bsignal:? (?:9|Killed)\b"
    r"|\b(?:exit|return)[ _]?(?:ed with )?(?:code|status)\W{1,5}(?:-9|137|247)\b)"
    r"|\bterminated abruptly\b|\babruptly died\b|\(pid\(s\) [\d, ]+\) exited unexpectedly",
    "GLOO_SOCKET_IFNAME": r"Unable to find (?:address|interface) for\b",
    "NCCL_SOCKET_IFNAME": r"\bno (?:usable )?(?:listening |socket )?interfaces? found",
}
# CUDA's words for errors 214 and 220 (cudaGetErrorString, cuGetErrorString), as torch, NCCL and
# others pass them on, or their names; and NVML's words for a GPU that has fallen off the bus.
_BROKEN = {
    "an uncorrectable ECC error": r"uncorrectable ECC error encountered"
    r"|cudaErrorECCUncorrectable|CUDA_ERROR_ECC_UNCORRECTABLE",
    "an uncorrectable NVLink error": r"uncorrectable NVLink error detected"
    r"|cudaErrorNvlinkUncorrectable|CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "a lost GPU": r"\bGPU is lost\b",
}
# Messages right before abort(): C++'s for an uncaught exception, Python's for a fatal error,
# glibc's, and assert()'s.
_ABORTS = re.compile(
    # C++: what() may have many lines, the first one says what happened.
    r"^terminate called after throwing an instance of '(?P<type>[^'\n]+)'\n"
    r"(?:\s*what\(\):\s*(?P<what>.*))?"
    # Not faulthandler's own line for any abort().
    r"|^(?P<python>Fatal Python error: (?!Aborted$|Segmentation fault$|Bus error$).+)"
    # A program may put names before it. Bounded: one line may be as long as all of the output that
    # is kept.
    r"|(?:^|(?<=: ))(?P<other>terminate called without an active exception"
    r"|(?:malloc|free|realloc|calloc|munmap_chunk|malloc_consolidate|malloc_printerr)\(\): [a-z].+"
    r"|double free or corruption.*|corrupted (?:size vs\. prev_size|double-linked list).*"
    r"|\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*: .*"
    r"|[^\n:]+:\d+: .{1,500}: Assertion .{1,500} failed\.)$",
    re.MULTILINE,
)
_FATAL = "Fatal Python error: "  # faulthandler's
# If the output continues like this, the message was another process's, such as a data loader's
# worker.
_GOES_ON = re.compile(r"^Traceback \(most recent call last\):", re.MULTILINE)
# How argparse, click and fire say what is wrong; hints on their usage may follow.
_ERROR_LINE = re.compile(r"(?:\S+: )?error: ", re.IGNORECASE)
# faulthandler's, of a stack.
_STACK_LINE = re.compile(r'(?:Current thread|Thread|Stack) .*most recent|File ".+", line \d+ in ')
_LAST_LINES = 8
_OF_SPACE = {errno.ENOSPC, errno.EDQUOT}
_PATH = r"""['"<](/[^'"<>\n]+)['">]"""
_SHM = "/dev/shm"
_LITTLE = 1 << 30  # bytes: so little may fill up and be free again within a moment
# Volumes whose server may not answer.
_REMOTE = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "9p", "autofs", "afs", "beegfs")
_LONGEST_LINE = 1000


def behind(text: str, errors: Sequence[BaseException] = ()) -> dict[str, Any]:
    """Return what may have caused an error with this text.

    `facts` (in words) and `broken` (the hardware that the text reports as broken) are fields of
    causes.Exit; `counted` are kinds that the kernel counts, memory and processes: keepers.py makes
    `recorded` of them. The text is that of the exceptions `errors`, or the last words of a process.
    """
    said = [*filter(None, map(_of_command, errors))]
    text = "\n".join([text, *said])
    kinds = {kind for kind, words in _KINDS.items() if re.search(words, text)}
    facts = [f'the command\'s last line: "{line[:300]}"' for line in said]
    try:
        facts += _of_volumes(kinds, text, errors)
        if kinds & {"processes", "allocation"}:
            facts += _of_processes()
        if "files" in kinds:
            facts.append(f"ulimit -n is {os.sysconf('SC_OPEN_MAX'):,}")
        for variable in sorted(kind for kind in kinds if kind.endswith("_IFNAME")):
            there = ", ".join(name for _, name in _socket.if_nameindex())
            value = os.environ.get(variable)
            wanted = f"{variable} is {value!r}, and " if value else ""
            facts.append(f"{wanted}this host's interfaces are {there}")
    except OSError:
        pass  # proc(5) hides it
    broken = (what for what, words in _BROKEN.items() if re.search(words, text))
    counted = sorted(kinds & {"memory", "processes"})
    return {"facts": facts, "counted": counted, "broken": next(broken, "")}


def _of_command(error: BaseException) -> str:
    """Return the last line of a failed command whose output the script has caught; "" if none."""
    if type(error).__module__ != "subprocess":
        return ""
    output = getattr(error, "stderr", None) or getattr(error, "output", None) or ""
    return last_line(output.decode(errors="replace") if isinstance(output, bytes) else str(output))


def of_process(code: int, output: str) -> dict[str, Any]:
    """Return the same as `behind` for a process that has ended, and what its last output says.

    `words` say why, `crash` is what its own faulthandler has written. `code` is negative for a
    signal.
    """
    crash = "".join(output.rpartition(_FATAL)[1:]) if code < 0 and _FATAL in output else ""
    words = last_words(output) if code == -signal.SIGABRT else last_line(output) if code > 0 else ""
    return {"words": words, "crash": crash, **behind("SIGBUS" if code == -signal.SIGBUS else words)}


def last_words(text: str) -> str:
    """Return why a process with this last output was aborted, in one line; "" if not sure."""
    *_, found = (None, *_ABORTS.finditer(text))
    if found is None or _GOES_ON.search(text, found.end()):
        return ""
    if found["type"]:
        what = " ".join((found["what"] or "").split())
        return f"{found['type']}: {what}" if what else found["type"]
    return " ".join((found["python"] or found["other"]).split())


def last_line(text: str) -> str:
    """Return the last line of output that is not blank, as a terminal shows it, in part; or "".

    Among the last few, one that says that it is an error. A stack of faulthandler's says less than
    what it wrote before: `Timeout (0:10:00)!`.
    """
    lines = [line.rstrip().rpartition("\r")[2].strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not _STACK_LINE.match(line)]
    lines = lines[: -_LAST_LINES - 1 : -1]
    return next(filter(_ERROR_LINE.match, lines), lines[0] if lines else "")[:_LONGEST_LINE]


def _of_volumes(kinds: set[str], text: str, errors: Sequence[BaseException]) -> list[str]:
    """Return which volume is full, over its quota or nearly full, if the error may come from that.

    It is that of shared memory; that of the failed calls' paths; without paths, that of a path in
    the text; otherwise any full volume of this machine.
    """
    likely, others = [_SHM], list[str]()
    if "shared memory" in kinds:
        if re.search("SIGBUS|Bus error", text):  # a mapped file can cause it, too
            others = _mounts()
    elif "space" in kinds:
        failed = [one for one in errors if isinstance(one, OSError) and one.errno in _OF_SPACE]
        names = [name for error in failed for name in (error.filename, error.filename2)]
        own = [name for name in names if isinstance(name, str)]
        likely = own or re.findall(_PATH, text)
        others = [] if own else _mounts()
    elif "allocation" not in kinds:
        return []
    if found := _full(likely) or _full(others):
        return found
    if likely and re.search(r"Disk quota exceeded|os error 122\b", text):
        return [f"the disk quota on {_mount(likely[0])} is used up"]
    # Little shared memory may have been freed already.
    is_other = "allocation" in kinds or "Too many open files" in text
    return [] if is_other else _full(likely, _LITTLE)


def _full(paths: Iterable[str], little: int = 0) -> list[str]:
    """Return the first volume of these paths that is full, if any.

    If `little` is not 0, a volume with fewer free bytes, or less than a tenth free, counts, too.
    """
    for folder in dict.fromkeys(map(_folder, paths)):
        try:
            volume = os.statvfs(folder)
        except OSError:
            continue
        free, size = volume.f_bavail * volume.f_frsize, volume.f_blocks * volume.f_frsize
        if volume.f_flag & os.ST_RDONLY or not size:
            continue
        # File systems may reserve some space for themselves.
        if free <= max(1 << 16, min(size // 100, 1 << 26)):
            return [f"{_mount(folder)} is full ({_bytes(free)} of {_bytes(size)} free)"]
        if volume.f_files and volume.f_favail <= volume.f_files // 1000:
            counts = f"{volume.f_favail:,} of {volume.f_files:,}"
            return [f"{_mount(folder)} is full ({counts} inodes free)"]
        if little and free < max(little, size // 10):
            return [f"{_mount(folder)} has only {_bytes(free)} of {_bytes(size)} free"]
    return []


def _of_processes() -> list[str]:
    """Return that this user has about as many processes and threads as ulimit -u allows."""
    most, user = os.sysconf("SC_CHILD_MAX"), os.getuid()  # -1: no limit
    if most < 0 or not user:  # root is not limited
        return []
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    used = f"user {user} runs {count:,} of {most:,} processes and threads (ulimit -u)"
    return [used] if count >= most * 0.9 else []


def _mounts() -> list[str]:
    """Return the mount points of this machine's own volumes (proc(5), mountinfo)."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.partition(" - ") for line in file]
    own = [mount.split()[4] for mount, _, kind in mounts if not kind.startswith(_REMOTE)]
    paths = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path) for path in own)
    return [path for path in paths if os.path.isdir(path)]


def _mount(path: str) -> str:
    """Return the mount point of a path's volume."""
    return _folder(os.path.realpath(_folder(path)), os.path.ismount)


def _folder(path: str, is_wanted: Callable[[str], bool] = os.path.isdir) -> str:
    """Return the nearest folder of a kind at or above a path, such as one that exists."""
    path = os.path.abspath(path)
    while not is_wanted(path) and path != os.sep:
        path = os.path.dirname(path)
    return path


def _bytes(count: float) -> str:
    """Return a number of bytes for people: 0, 12 KiB, 1.5 GiB."""
    if not count:
        return "0"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            break
        count, unit = count / 1024, "TiB"
    return f"{f'{count:.1f}'.removesuffix('.0') if count < 10 else f'{count:.0f}'} {unit}"
