"""The checks of `sm-launch doctor`: each function checks one property of this host.

It gets the planned job (whose `plan` is an error if it would not start) and the environment, and
yields its findings. It may hang: doctor.py does not wait for ever. `root` is a prefix of /proc,
/sys and /dev, for tests.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import resource
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Callable, NamedTuple

from launcher.host import cgroups
from launcher.host.cgroups import read_text
from launcher.host.child import Answer
from launcher.host.network import is_literal, listen, look_up
from launcher.job import resources, toolkit
from launcher.job.job import Job
from launcher.job.options import INIT
from launcher.result.failure import output_dir
from launcher.text.words import flag, is_loopback, join_and_count, plural, shortened, some_of

# How bad a finding is; only the last one changes the exit code.
OK, WARNING, PROBLEM = "ok", "warning", "problem"
NAMES_SECONDS, _CONNECT_SECONDS = 10, 2
_MOST_NAMES = 64  # hosts, at most, whose names are looked up
_MOST_ABOVE = 50  # processes
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_PLUGINS = (  # of aws-ofi-nccl, as in AWS's installer and AWS's images
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/local/lib",
    "/usr/lib/*-linux-gnu",
)
_SHM, _SHM_USE = "/dev/shm", "data loader workers and NCCL pass data through it"
_LITTLE_SHM, _LITTLE_DISK = 512 << 20, 1 << 30  # bytes; Docker's default of the first is 64 MiB
_FEW_FILES, _DESCRIPTORS = 4096, 30  # the first launcher needs so many, and one for each host
_OTHER_THREADS = 16  # of a rank: torch's own, and its keeper's processes
_INITS = ("tini", "tini-static", "dumb-init", "docker-init", "catatonit")
_FEWER_WORKERS = "use fewer data loader workers (num_workers)"


class Finding(NamedTuple):
    """A finding of a check. `to_do` is empty if there is nothing to fix."""

    level: str  # OK, WARNING or PROBLEM
    seen: str
    to_do: str = ""


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Start a function in a thread of its own, which ends with this process at the latest."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # this container allows no more threads
        run()
    return future


def _listed(words: Sequence[str]) -> str:
    shown = some_of(words)
    return join_and_count(shown, len(words) - len(shown))


def _restart(environ: Mapping[str, str], option: str, otherwise: str) -> str:
    """Return how to raise a container's limit: SageMaker has no such option."""
    if "TRAINING_JOB_ARN" in environ:
        return otherwise
    return f"start the container with {option}, or {otherwise}"


# The other hosts


def names(job: Job, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check whether the names of the other hosts resolve to them."""
    cluster = job.cluster
    others = [host for host in cluster.hosts[:_MOST_NAMES] if host != cluster.current_host]
    asked = {host: in_thread(look_up, cluster.address(host)) for host in others}
    wait_for(asked.values(), NAMES_SECONDS)
    found = {host: answer.result() if answer.done() else [] for host, answer in asked.items()}
    addresses = {host: str(answer[0][1][0]) for host, answer in found.items() if answer}
    unknown = [host for host in others if host not in addresses]
    here = [
        host
        for host, address in addresses.items()
        if is_loopback(address) and not is_literal(cluster.address(host))
    ]
    if unknown:
        to_do = f"a job waits for missing hosts, for up to {job.options.start_timeout} s; if they "
        to_do += "have started, check this container's DNS (/etc/resolv.conf)"
        seen = f"no address within {NAMES_SECONDS} s for {_listed(unknown)}"
        yield Finding(WARNING, seen, to_do)
    if here:
        seen = f"{_listed(here)} resolves to this host's own loopback"
        yield Finding(WARNING, seen, "remove the name from /etc/hosts, or fix DNS")
    if others and not (unknown or here):
        shown = [f"{host} is {address}" for host, address in addresses.items()]
        yield Finding(OK, f"all resolve: {_listed(shown)}")


def interface(
    job: Job, environ: Mapping[str, str], have: Sequence[str] | None = None
) -> Iterator[Finding]:
    """Check whether the interface that the user names exists, with a single host, too."""
    have = sorted(resources.network_interfaces()) if have is None else have
    shown = _listed(have) or "none"
    users = {name: environ[name] for name in _INTERFACES if environ.get(name)}
    for variable, value in users.items():
        if not have or _fits(variable, value, have):
            yield Finding(OK, f"{variable}={value}, as you set it")
            continue
        needed = "NCCL_" if job.cluster.num_gpus else "GLOO_"  # the job may not use the other
        yield Finding(
            PROBLEM if variable.startswith(needed) else WARNING,
            f"{variable}={value}, but this host has {shown}",
            f"unset {variable} and let the launcher choose, or name an interface that exists",
        )
    if not users and job.cluster.nnodes > 1:
        yield Finding(OK, f"you set none; this host has {shown}")


def _fits(variable: str, value: str, have: Sequence[str]) -> bool:
    """Tell whether the user's *_SOCKET_IFNAME matches an interface.

    Both match a name's beginning. gloo needs all names of a list; for NCCL ^ excludes, = is exact.
    """
    if variable.startswith("GLOO_"):
        return all(any(name.startswith(part) for name in have) for part in value.split(","))
    if value.startswith("^"):
        return True
    parts = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
    if value.startswith("="):
        return any(name in parts for name in have)
    return any(name.startswith(tuple(parts)) for name in have)


def ports(job: Job, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the first host's ports: there whether they are free, elsewhere the connection."""
    cluster, options = job.cluster, job.options
    wanted = {flag("peer_port"): options.peer_port} if cluster.nnodes > 1 else {}
    if wanted and (not environ.get("PET_RDZV_ENDPOINT") or "rdzv_port" in options.given):
        wanted[flag("rdzv_port")] = options.rdzv_port
    for option, port in wanted.items():
        first, where = cluster.hosts[0], f"port {port} ({option})"
        try:
            if cluster.node_rank == 0:
                for listener in listen((), port):
                    listener.close()
                yield Finding(OK, f"{where} is free on this host, where all hosts connect")
            else:
                address = cluster.address(first), port
                socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
                yield Finding(OK, f"{first} answers at {where}")
        except ConnectionRefusedError:
            yield Finding(OK, f"{first} can be reached; nothing is listening yet at {where}")
        except OSError as error:
            if cluster.node_rank == 0:
                to_do = f"choose another port with {option}, the same on every host"
                seen = f"this host cannot listen on {where}: {os.strerror(error.errno or 0)}"
                yield Finding(PROBLEM, seen, to_do)
            else:
                to_do = "if it has started, allow all traffic between the hosts (security group)"
                yield Finding(WARNING, f"{first} did not answer at {where}", to_do)


def efa(job: Job, environ: Mapping[str, str], root: str = "") -> Iterator[Finding]:
    """Check whether there is an EFA device, and what it lacks."""
    if not resources.has_efa(f"{root}/sys/class/infiniband"):
        if job.cluster.nnodes > 1:
            yield Finding(OK, "this host has no EFA device")
        return
    searched = [glob.escape(path) for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    searched += [root + path for path in _PLUGINS]
    plugins = [path for folder in searched for path in glob.glob(f"{folder}/libnccl-net*.so*")]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if job.cluster.num_gpus and not plugins:
        seen = "this host has an EFA device, but no NCCL plugin (libnccl-net*.so) was found in "
        seen += "LD_LIBRARY_PATH or where AWS installs it"
        to_do = "install aws-ofi-nccl in the image; without it, NCCL uses TCP"
        yield Finding(WARNING, seen, to_do)
    elif _is_less(locked, 16 << 30):
        seen = f"EFA locks memory, but only {locked >> 10} KiB may be locked"
        to_do = _restart(environ, "--ulimit memlock=-1", "have NCCL use TCP (NCCL_NET=Socket)")
        yield Finding(WARNING, seen, to_do)
    else:
        plugin = f", NCCL's plugin is {plugins[0]}" if plugins else ""
        yield Finding(OK, f"this host has an EFA device{plugin}")


# Devices and torch


def devices(job: Job, environ: Mapping[str, str], root: str = "") -> Iterator[Finding]:
    """Report the ranks' devices, and whether there are more ranks than devices."""
    cluster, cores = job.cluster, resources.usable_cores()
    gpus, neurons = cluster.num_gpus, cluster.num_neurons
    seen, most = f"no GPU; {plural(cores, 'core')}", cores
    if gpus:
        what = "MIG slice" if cluster.mig else "GPU"
        models = ", ".join(cluster.gpu_models) or "not listed by nvidia-smi"
        seen, most = f"{plural(gpus, what)} for the job: {models}", gpus
    elif neurons:
        seen, most = f"{plural(neurons, 'Neuron core')}, {plural(cores, 'core')}", neurons
    elif "CUDA_VISIBLE_DEVICES" not in environ and _has_gpu(root):
        seen = "this host has an NVIDIA GPU, but nvidia-smi lists none: a job would run on CPU"
        yield Finding(PROBLEM, seen, "replace this host, or its driver")
        return
    yield Finding(OK, seen)
    if (ranks := _ranks(job)) > most:
        seen = f"{ranks} ranks would share {seen.partition(' for')[0]}"
        to_do = f"use {flag('nproc_per_node')} {most}, or a larger instance"
        yield Finding(WARNING, seen, to_do)


def _ranks(job: Job) -> int:
    """Return the number of ranks of this host; for torchrun's words, its number of GPUs."""
    count = job.plan.nproc_per_node
    return int(count) if count.isdecimal() else job.cluster.num_gpus or 1


def _has_gpu(root: str) -> bool:
    """Tell whether the kernel knows an NVIDIA GPU, by a device file or on the bus."""
    vendors = glob.glob(f"{root}/sys/bus/pci/devices/*/vendor")
    return bool(glob.glob(f"{root}/dev/nvidia[0-9]*")) or any(
        read_text(path).strip() == "0x10de" for path in vendors
    )


def torch(job: Job, answer: Answer) -> Iterator[Finding]:
    """Report doctor_probe.py's findings, its lines of JSON, however it ended."""
    for line in answer.out.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            yield Finding(*json.loads(line))
    if answer.problem:
        last = answer.err.strip().rpartition("\n")[2]
        to_do = "reinstall torch in the image; another module of that name may hide it"
        if answer.is_late:
            to_do = "run doctor again: the first import can take minutes on a new machine"
        level = WARNING if answer.is_late and not job.cluster.num_gpus else PROBLEM
        yield Finding(level, f"torch cannot be used: {answer.problem} ({last})", to_do)


# Folders and limits


def disk(job: Job, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report each unusable folder; the usable ones of one disk share a line."""
    fine: dict[str, list[str]] = {}
    workers = f"{_FEWER_WORKERS}, or torch.multiprocessing.set_sharing_strategy('file_system')"
    for path, use in _folders(environ, job.options.log_dir):
        where, is_shm = f"{path} ({use})", path == _SHM
        try:
            size = os.statvfs(path)
            if not os.access(path, os.W_OK | os.X_OK) or not os.path.isdir(path):
                raise PermissionError(errno.EACCES, "this user cannot make a file there")
        except OSError as error:
            must_be = use in (flag("log_dir"), "TMPDIR")
            to_do = "create it, make it writable for this user, or name another folder"
            yield Finding(PROBLEM if must_be else WARNING, f"{where}: {error.strerror}", to_do)
            continue
        free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
        to_do = "raise volume_size of the estimator, or remove files"
        if is_shm:
            to_do = _restart(environ, "--shm-size=2g", workers)
        if size.f_files and not size.f_favail:
            yield Finding(WARNING, f"{where}: no files left", to_do)
        elif free < (_LITTLE_SHM if is_shm else _LITTLE_DISK):
            seen = f"{where}: {in_bytes(free)} of {in_bytes(total)} left"
            yield Finding(WARNING, seen, to_do)
        else:
            fine.setdefault(in_bytes(free), []).append(where)
    for free_size, places in fine.items():
        yield Finding(OK, f"{free_size} free: {', '.join(places)}")


def in_bytes(number: float) -> str:
    """Return a number of bytes for people: `63 MiB`, `1.5 GiB`."""
    number /= 1 << 20
    if number < 1024:
        return f"{number:.0f} MiB"
    number /= 1024
    return f"{number:.1f} GiB" if number < 10 else f"{number:.0f} GiB"


def _folders(environ: Mapping[str, str], log_dir: str) -> Iterator[tuple[str, str]]:
    """Yield the folders that a job writes to, and what they are for."""
    base = toolkit.base_dir(environ)
    if "SM_HOSTS" in environ or os.path.isdir(os.path.join(base, "input", "config")):
        yield environ.get("SM_MODEL_DIR") or os.path.join(base, "model"), "the model"
        yield output_dir(environ), "the failure reason"
    checkpoints = os.path.join(base, "checkpoints")
    if os.path.isdir(checkpoints):
        yield checkpoints, "checkpoints"
    if log_dir:
        there = os.path.abspath(log_dir)
        while not os.path.exists(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)  # the launcher creates the rest
        yield there, flag("log_dir")
    yield environ.get("TMPDIR") or "/tmp", "TMPDIR"
    yield _SHM, _SHM_USE


def limits(job: Job, environ: Mapping[str, str], root: str = "") -> Iterator[Finding]:
    """Check the limits on open files, and on processes and threads.

    The launcher itself raises the soft limit of files. The number of data loader workers is a
    guess: one for each core.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = max(_FEW_FILES, job.cluster.nnodes + _DESCRIPTORS)
    level = WARNING if _is_less(files, needs) else OK
    seen = f"a process may have {'any number of' if files < 0 else files} files open"
    to_do = _restart(environ, f"--ulimit nofile={needs}", _FEWER_WORKERS)
    yield Finding(level, seen, to_do if level == WARNING else "")
    left = []
    for folder in cgroups.folders("pids", root):
        most, now = (read_text(f"{folder}/pids.{name}").strip() for name in ("max", "current"))
        if most.isdecimal() and now.isdecimal():
            left.append(int(most) - int(now))
    if not left:
        return
    ranks = _ranks(job)
    text = {**job.plan.environment, **environ}.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() else 1
    workers = max(1, resources.usable_cores() // ranks)
    needs = ranks * (threads + workers + _OTHER_THREADS)
    seen = f"{min(left)} more processes and threads may be started"
    if min(left) < needs:
        seen += f"; {plural(ranks, 'rank')} with {plural(threads, 'thread')} and "
        seen += f"{plural(workers, 'data loader worker')} each need about {needs}"
        fewer = f"{_FEWER_WORKERS} and threads (OMP_NUM_THREADS)"
        yield Finding(WARNING, seen, _restart(environ, "--pids-limit=-1", fewer))
    else:
        yield Finding(OK, seen)


def _is_less(limit: int, number: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < number


# PID 1

_PUT_INIT = (
    "start the container with `sm-launch init`: by your image's ENTRYPOINT, in exec form, or the "
    "estimator's container_entry_point (docs/guide.md)"
)
_SYSTEMS = ("systemd", "init", "launchd")


def stop(job: Job, environ: Mapping[str, str], root: str = "", pid: int = 0) -> Iterator[Finding]:
    """Check whether a stop, SIGTERM to PID 1, would reach the ranks of a job started here."""
    pid = pid or os.getpid()
    above = _above(root, pid)
    words = _arguments(root, 1)
    program = words[0].rpartition("/")[2] if words else ""
    shown = f"PID 1 is `{shortened(' '.join(words), 80)}`"
    if any(_is_launcher(parent) and "local" in parent for parent in above.values()):
        yield Finding(OK, "`sm-launch local` forwards stops")
    elif pid == 1 or _is_launcher(words) or _init_answers(environ):
        yield Finding(OK, "PID 1 is the launcher, or its `init`: every rank gets a stop")
    elif program in _SYSTEMS or 1 not in above:
        yield Finding(OK, "not under a container's PID 1: stop the launcher itself (SIGTERM)")
    elif program in _INITS and next(iter(above)) == 1:
        yield Finding(OK, f"{shown}, which forwards stops to the launcher")
    else:
        seen = f"{shown}: a stop reaches ranks only if that forwards SIGTERM to the launcher; "
        seen += "shells, SageMaker's toolkit and the start script of AWS's images do not"
        yield Finding(WARNING, seen, _PUT_INIT)


def _above(root: str, pid: int) -> dict[int, list[str]]:
    """Return the arguments of a process's ancestors, by their pids, the parent first."""
    found: dict[int, list[str]] = {}
    for _ in range(_MOST_ABOVE):
        match = re.search(r"^PPid:\s*(\d+)$", read_text(f"{root}/proc/{pid}/status"), re.MULTILINE)
        pid = int(match[1]) if match else 0
        if not pid:
            break
        found[pid] = _arguments(root, pid)
    return found


def _arguments(root: str, pid: int) -> list[str]:
    """Return a process's arguments; none if this user cannot see them."""
    text = read_text(f"{root}/proc/{pid}/cmdline").rstrip("\0")
    return text.split("\0") if text else []


def _is_launcher(words: Sequence[str]) -> bool:
    """Tell whether a process is the launcher: by its name, module or path."""
    return _runs(words, "sm-launch", "launcher", "launcher.py") or any(
        word.endswith("launcher/__main__.py") for word in words[:3]
    )


def _runs(words: Sequence[str], *names: str) -> bool:
    """Tell whether a process is one of these programs, or a Python that runs it."""
    bases = [word.rpartition("/")[2] for word in words if not word.startswith("-")]
    if bases and not bases[0].startswith("python"):
        bases = bases[:1]
    return any(base in names for base in bases[:2])


def _init_answers(environ: Mapping[str, str]) -> bool:
    name = environ.get(INIT, "").partition(":")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
        to.connect("\0" + name)
        return bool(name)
    return False  # the init of this variable has ended
