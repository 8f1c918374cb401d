"""The checks of `sm-launch doctor`: each function checks one property of this host.

It gets the planned job (with an `error` if it would not start) and the environment, and
yields its findings. It may hang: doctor.py does not wait for ever.
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
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Callable, TypeVar

from launcher.host import cgroups
from launcher.host.cgroups import read_text
from launcher.host.child import ask
from launcher.host.network import listen_on_all, look_up
from launcher.host.processes import stat
from launcher.host.signals import Signals
from launcher.job import resources, toolkit
from launcher.job.job import Job
from launcher.job.options import HOST_ADDRESSES, INIT
from launcher.result.failure import output_dir
from launcher.text.words import flag, is_loopback, listed, other_port, plural, shortened

_T = TypeVar("_T")
_ROOT = ""  # of /proc, /sys and /dev/nvidia*; tests have another
# Each is a level, what was seen, and what to do, if anything.
Findings = Iterator[tuple[str, ...]]
# How bad a finding is; only the last one changes the exit code.
OK, WARNING, PROBLEM = "ok", "warning", "problem"
NAMES_SECONDS, _CONNECT_SECONDS, _POLL_SECONDS = 10, 2, 0.02
TORCH_SECONDS = 60  # its import from a new disk can take most of a minute
_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "doctor_probe.py")
_MOST_NAMES = 64  # hosts, at most, whose names are looked up
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_PLUGINS = (  # of aws-ofi-nccl, as in AWS's installer and AWS's images
    "/opt/amazon/ofi-nccl/lib*",
    "/opt/amazon/ofi-nccl/lib/*-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/local/lib",
    "/usr/lib/*-linux-gnu",
)
_SHM, _SHM_USE = "/dev/shm", "data loader workers and NCCL pass data through it"
_LITTLE_SHM, _LITTLE_DISK = 1 << 29, 1 << 30  # bytes; Docker's default of the first is 64 MiB
_LOCKED = 16 << 30  # bytes that EFA may lock
_FEW_FILES, _DESCRIPTORS = 4096, 30  # that the first launcher needs, besides one for each host
_OTHER_THREADS = 16  # of a rank: torch's own, and its keeper's processes
_SYSTEMS = ("systemd", "init", "launchd")
_INITS = ("tini", "tini-static", "dumb-init", "docker-init", "catatonit")
_LAUNCHER = r"(\S*python\S*( -\S+)* )?(\S*/)?(sm-launch|launcher(\.py|/__main__\.py)?)( |$)"
_PUT_INIT = (
    "start the container with `sm-launch init`: by your image's ENTRYPOINT, in exec form, or the "
    "estimator's container_entry_point (docs/guide.md)"
)
_FEWER_WORKERS = "use fewer data loader workers (num_workers)"


def at_once(function: Callable[[str], _T], names: Iterable[str], seconds: float) -> dict[str, _T]:
    """Call function(name) for all names, in threads; return the results that come in time.

    A stop ends the wait. A thread that hangs ends with this process. Raises what a call has raised.
    """
    futures: dict[str, Future[_T]] = {name: Future() for name in names}

    def call(name: str) -> None:
        try:
            futures[name].set_result(function(name))
        except Exception as error:
            futures[name].set_exception(error)

    for name in futures:
        try:
            # Not by background.start: children inherit what a thread blocks.
            threading.Thread(target=call, args=[name], daemon=True).start()
        except RuntimeError:  # this container allows no more threads
            call(name)
    deadline = time.monotonic() + seconds
    while wait(futures.values(), _POLL_SECONDS).not_done and time.monotonic() < deadline:
        if Signals.stop:
            break
    return {name: future.result() for name, future in futures.items() if future.done()}


def _restart(environ: Mapping[str, str], option: str, otherwise: str) -> str:
    """Return how to raise a container's limit: SageMaker has no such option."""
    if "TRAINING_JOB_ARN" in environ:
        return otherwise
    return f"start the container with {option}, or {otherwise}"


# The other hosts


def names(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check whether the names of the other hosts resolve to them; made-up hosts have none."""
    hosts, addresses = job.cluster.hosts[:_MOST_NAMES], job.cluster.addresses
    others = [host for host in hosts if host not in (job.current_host, *addresses)]
    found = at_once(look_up, others, NAMES_SECONDS)
    resolved = {host: str(answer[0][1][0]) for host, answer in found.items() if answer}
    here = [host for host, address in resolved.items() if is_loopback(address)]
    if unknown := [host for host in others if host not in resolved]:
        seen = f"no address within {NAMES_SECONDS} s for {listed(unknown)}"
        to_do = f"a job waits for missing hosts, for up to {job.options.start_timeout} s; if they "
        yield WARNING, seen, to_do + "have started, check this container's DNS (/etc/resolv.conf)"
    if here:
        seen = f"{listed(here)} resolves to this host's own loopback"
        yield WARNING, seen, "remove the name from /etc/hosts, or fix DNS"
    if others and not (unknown or here):
        yield OK, f"all resolve: {listed([f'{host} is {resolved[host]}' for host in others])}"


def interface(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check whether the interface that the user names exists, with a single host, too.

    Which is used otherwise is among the settings.
    """
    have = sorted(resources.network_interfaces())
    for variable in _INTERFACES:
        value = environ.get(variable, "")
        if value and (not have or _fits(variable, value, have)):
            yield OK, f"{variable}={value}, as you set it"
        elif value:
            needed = "NCCL_" if job.cluster.num_gpus else "GLOO_"  # the job may not use the other
            level = PROBLEM if variable.startswith(needed) else WARNING
            to_do = f"unset {variable} and let the launcher choose, or name one that exists"
            yield level, f"{variable}={value}, but this host has {listed(have)}", to_do


def _fits(variable: str, value: str, have: Sequence[str]) -> bool:
    """Tell whether the user's *_SOCKET_IFNAME matches an interface.

    Both match a name's beginning. gloo needs all names of a list; for NCCL ^ excludes, = is exact.
    """
    is_nccl = variable.startswith("NCCL_")
    is_exact = is_nccl and value.startswith("=")
    parts = [part.partition(":")[0] for part in value[is_exact:].split(",")]
    fits = [
        any(name == part if is_exact else name.startswith(part) for name in have) for part in parts
    ]
    return value.startswith("^") or any(fits) if is_nccl else all(fits)


def ports(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check the first host's ports: there whether they are free, elsewhere the connection."""
    cluster, options = job.cluster, job.options
    fields = ["peer_port"] if cluster.nnodes > 1 else []
    if fields and (not environ.get("PET_RDZV_ENDPOINT") or "rdzv_port" in options.given):
        fields.append("rdzv_port")
    for field in fields:
        first, port = cluster.hosts[0], getattr(options, field)
        where = f"port {port} ({flag(field)})"
        if cluster.node_rank == 0:
            try:
                listen_on_all(port).close()
                yield OK, f"{where} is free on this host, where all hosts connect"
            except OSError as error:
                seen = f"this host cannot listen on {where}: {os.strerror(error.errno or 0)}"
                yield PROBLEM, seen, other_port(field)
            continue
        try:
            address = cluster.address(first), port
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            yield OK, f"{first} answers at {where}"
        except ConnectionRefusedError:
            yield OK, f"{first} can be reached; nothing is listening yet at {where}"
        except (OSError, UnicodeError):  # the latter for a name such as a..b
            to_do = "if it has started, allow all traffic between the hosts (security group)"
            yield WARNING, f"{first} did not answer at {where}", to_do


def efa(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check whether there is an EFA device, and what it lacks."""
    if not resources.has_efa(f"{_ROOT}/sys/class/infiniband"):
        if job.cluster.nnodes > 1:
            yield OK, "this host has no EFA device"
        return
    searched = [glob.escape(path) for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    searched += [_ROOT + path for path in _PLUGINS]
    plugins = [path for folder in searched for path in glob.glob(f"{folder}/libnccl-net*.so*")]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if job.cluster.num_gpus and not plugins:
        seen = "this host has an EFA device, but no NCCL plugin (libnccl-net*.so) was found in "
        seen += "LD_LIBRARY_PATH or where AWS installs it"
        yield WARNING, seen, "install aws-ofi-nccl in the image; without it, NCCL uses TCP"
    elif 0 <= locked < _LOCKED:  # it is -1 without a limit
        seen = f"EFA locks memory, but only {locked >> 10} KiB may be locked"
        to_do = _restart(environ, "--ulimit memlock=-1", "have NCCL use TCP (NCCL_NET=Socket)")
        yield WARNING, seen, to_do
    else:
        plugin = f", NCCL's plugin is {plugins[0]}" if plugins else ""
        yield OK, f"this host has an EFA device{plugin}"


# Devices and torch


def devices(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check whether there are enough devices for the ranks, and a GPU that nobody lists."""
    cluster, ranks = job.cluster, _ranks(job)
    most, units = cluster.num_gpus or cluster.num_neurons, cluster.devices
    # Without hosts the mistake was found before anybody counted devices.
    if cluster.hosts and not most and "CUDA_VISIBLE_DEVICES" not in environ and _has_gpu():
        seen = "this host has an NVIDIA GPU, but nvidia-smi lists none: a job would run on CPU"
        yield PROBLEM, seen, "replace this host, or its driver"
        return
    if not most:
        most = len(resources.physical_cores())
        units = f"no GPU; {plural(most, 'core')}"
    if ranks > most:
        to_do = f"use {flag('nproc_per_node')} {most}, or a larger instance"
        yield WARNING, f"{ranks} ranks would share {units}", to_do


def _ranks(job: Job) -> int:
    """Return the number of ranks of this host; for torchrun's words, its number of GPUs."""
    count = job.plan.nproc_per_node
    return int(count) if count.isdecimal() else job.cluster.num_gpus or 1


def _has_gpu() -> bool:
    """Tell whether the kernel knows an NVIDIA GPU, by a device file or on the bus."""
    vendors = glob.glob(f"{_ROOT}/sys/bus/pci/devices/*/vendor")
    return bool(glob.glob(f"{_ROOT}/dev/nvidia[0-9]*")) or any(
        read_text(path).strip() == "0x10de" for path in vendors
    )


def torch(job: Job, environ: Mapping[str, str]) -> Findings:
    """Report doctor_probe.py's findings, its lines of JSON, however it ended."""
    command = (sys.executable, _PROBE, str(job.cluster.num_gpus))
    answer = ask(command, environ, TORCH_SECONDS)
    for line in answer.out.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            level, seen, to_do = json.loads(line)
            if level in (OK, WARNING, PROBLEM):  # not a line of sitecustomize
                yield level, seen, to_do
    if answer.problem:
        last = answer.err.strip().rpartition("\n")[2]
        to_do = "reinstall torch in the image; another module of that name may hide it"
        if answer.is_late:
            to_do = "run doctor again: the first import can take minutes on a new machine"
        level = WARNING if answer.is_late and not job.cluster.num_gpus else PROBLEM
        yield level, f"torch cannot be used: {answer.problem} ({last})", to_do


# Folders and limits


def disk(job: Job, environ: Mapping[str, str]) -> Findings:
    """Report each unusable folder; the usable ones of one disk share a line."""
    fine: dict[str, list[str]] = {}
    for path, use in _folders(environ, job.options.log_dir):
        where, little = f"{path} ({use})", _LITTLE_DISK
        to_do = "raise volume_size of the estimator, or remove files"
        if path == _SHM:
            workers = "torch.multiprocessing.set_sharing_strategy('file_system')"
            to_do = _restart(environ, "--shm-size=2g", f"{_FEWER_WORKERS}, or {workers}")
            little = _LITTLE_SHM
        try:
            size = os.statvfs(path)
            if not os.access(path, os.W_OK | os.X_OK) or not os.path.isdir(path):
                raise PermissionError(errno.EACCES, "this user cannot make a file there")
        except OSError as error:
            must_be = use in (flag("log_dir"), "TMPDIR")
            usable = "create it, make it writable for this user, or name another folder"
            yield PROBLEM if must_be else WARNING, f"{where}: {error.strerror}", usable
            continue
        free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
        if size.f_files and not size.f_favail:
            yield WARNING, f"{where}: no files left", to_do
        elif free < little:
            yield WARNING, f"{where}: {_size(free)} of {_size(total)} left", to_do
        else:
            fine.setdefault(_size(free), []).append(where)
    for free_size, places in fine.items():
        yield OK, f"{free_size} free: {', '.join(places)}"


def _size(count: int) -> str:
    """Return a number of bytes for people; run/clues.py, which has more units, is for ranks."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def _folders(environ: Mapping[str, str], log_dir: str) -> Iterator[tuple[str, str]]:
    """Yield the folders that a job writes to, and what they are for."""
    base = toolkit.base_dir(environ)
    if "SM_HOSTS" in environ or os.path.isdir(toolkit.config_dir(base)):
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


def limits(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check the limits on open files, and on processes and threads.

    The launcher itself raises the soft limit of files. The number of data loader workers is a
    guess: one for each core.
    """
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = max(_FEW_FILES, job.cluster.nnodes + _DESCRIPTORS)
    seen = f"a process may have {'any number of' if files < 0 else files} files open"
    if 0 <= files < needs:  # it is -1 without a limit
        yield WARNING, seen, _restart(environ, f"--ulimit nofile={needs}", _FEWER_WORKERS)
    else:
        yield OK, seen
    limited = [f"{folder}/pids" for folder in cgroups.folders("pids", _ROOT)]
    pairs = [(read_text(f"{pids}.max"), read_text(f"{pids}.current")) for pids in limited]
    left = [int(most) - int(now) for most, now in pairs if most.strip().isdecimal() and now]
    if not left:
        return
    ranks = _ranks(job)
    text = {**job.plan.environment, **environ}.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() else 1
    workers = max(1, len(resources.physical_cores()) // ranks)
    needs = ranks * (threads + workers + _OTHER_THREADS)
    seen = f"{min(left)} more processes and threads may be started"
    if min(left) >= needs:
        yield OK, seen
        return
    seen += f"; {plural(ranks, 'rank')} with {plural(threads, 'thread')} and "
    seen += f"{plural(workers, 'data loader worker')} each need about {needs}"
    fewer = f"{_FEWER_WORKERS} and threads (OMP_NUM_THREADS)"
    yield WARNING, seen, _restart(environ, "--pids-limit=-1", fewer)


# PID 1


def stop(job: Job, environ: Mapping[str, str]) -> Findings:
    """Check whether a stop, SIGTERM to PID 1, would reach the ranks of a job started here."""
    first = read_text(f"{_ROOT}/proc/1/cmdline").replace("\0", " ").strip()
    program = first.partition(" ")[0].rpartition("/")[2]
    shown = f"PID 1 is `{shortened(first, 80)}`"
    init = environ.get(INIT, "").partition(":")[0]
    has_init = f"@{init}\n" in read_text(f"{_ROOT}/proc/net/unix")
    pids = _up_to_the_top()
    if HOST_ADDRESSES in environ:
        yield OK, "`sm-launch local` forwards stops"
    elif pids[0] == 1 or re.match(_LAUNCHER, first) or has_init:
        yield OK, "PID 1 is the launcher, or its `init`: every rank gets a stop"
    elif program in _SYSTEMS or 1 not in pids:  # docker exec: PID 1 is not above this process
        yield OK, "not under a container's PID 1: stop the launcher itself (SIGTERM)"
    elif program in _INITS and pids[1] == 1:
        yield OK, f"{shown}, which forwards stops to the launcher"
    else:
        seen = f"{shown}: a stop reaches ranks only if that forwards SIGTERM to the launcher; "
        seen += "shells, SageMaker's toolkit and the start script of AWS's images do not"
        yield WARNING, seen, _PUT_INIT


def _up_to_the_top() -> list[int]:
    """Return the pids of this process and those above it, upwards; this user may not see all."""
    pids = [os.getpid()]
    while fields := stat(pids[-1]):
        pids.append(int(fields[1]))
    return pids


_CHECKS = (names, interface, ports, efa, devices, torch, disk, limits, stop)  # the report's order
CHECKS = {check.__name__: check for check in _CHECKS}
