"""Reports to the launcher, from inside a rank, how far its collectives are, and where it is.

A thread waits for the launcher's requests. It starts only when the script imports torch.distributed
(or makes its first process group, if that is already imported: a warm start), or when the script
has ended and its process still runs. It replies within milliseconds. To a poll it replies that
there was progress; otherwise which collectives this rank has begun, which of them have not ended,
and where its main thread is; after the script's end, also what keeps the process alive. To a
request for stacks it adds where all threads are. If it does not reply, the script's C code holds
the interpreter, or the process is suspended. Then faulthandler, at a signal, writes where the main
thread is to the same connection: in C, and without the interpreter.

While a rank makes a group, it waits for the others that make it: it reports this as a wait in a
group of a special kind. At the end of its script a rank reports whether it worked alone: whether no
collective began in any of its groups. It notes them as they are made and destroyed.

For gloo it reads torch's flight recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp, from
torch 2.8 on). It does not read NCCL's entries: that asks the GPU for the state of events, some of
which may be gone (ProcessGroupNCCL.cpp, as for graphs and blocking waits). For NCCL a rank reports
how many collectives it has begun and, with torch 2.10 to 2.14, where the recorder is on by default,
whether torch's watchdog has seen the last one end: integers in memory. In 2.15 `nccl` is
ProcessGroupNCCL2, unless TORCH_DIST_USE_NCCL2 is 0: it feeds another recorder, and has no uid.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import sys
import threading

# Bound before the script runs, which may replace them (gevent).
from _thread import allocate_lock, get_ident, get_native_id, start_new_thread
from collections.abc import Mapping, Sequence
from io import FileIO
from json import loads
from os import listdir
from time import monotonic, sleep
from typing import Any, Callable

_MODULE = "torch.distributed.distributed_c10d"
# Functions that init_process_group calls; not the first if it is given a store.
_AT_FIRST_GROUP = ("rendezvous", "_new_process_group_helper")
_ENTRIES = "2000"  # of the recorder: torch's default where it is on by default
# Limits of a reply: groups, and characters of a group's ranks; calls of a thread, threads.
_MOST_GROUPS, _LONGEST_RANKS = 64, 2000
_MOST_CALLS, _MOST_THREADS = 60, 30
_LONGEST, _LONGEST_NAME = 300, 100  # characters of a call's function or file; of other names
_LONGEST_STACKS = 200_000  # characters: the launcher accepts 1 MiB
_END_SECONDS = 1.0  # in which most processes end after their script
# Functions of _MODULE that make a group; the first makes the one of all ranks.
_MAKES_GROUP = ("init_process_group", "new_group", "_new_group_with_tag")
_GIVEN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_ARGUMENTS = {"RANK": "rank", "WORLD_SIZE": "world_size"}  # of init_process_group
_ARGUMENTS.update(MASTER_ADDR="init_method", MASTER_PORT="init_method")
# Modules through which ranks may exchange data, or whose child may do their work.
_OTHER_WAYS = {"mpi4py.MPI", "horovod.torch"}
_OTHER_WAYS |= {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"}
_WORK_SECONDS = 1.0  # of CPU that another program used: about what importing torch takes
_SPAWNS = (
    "its own ranks (torch.multiprocessing.spawn), though torchrun has started one for each "
    "process: the script has to call their function itself"
)


def begin(keeper: Any) -> Replier:
    """Reply to the launcher's requests once the script imports torch.distributed.

    They come from the keeper (rank.py, KeeperConnection).
    """
    replier = Replier(keeper)
    sys.meta_path.insert(0, replier)
    if _MODULE in sys.modules:  # by sitecustomize, or before this process was forked
        replier.see_groups()
        for name in _AT_FIRST_GROUP:
            if hasattr(sys.modules[_MODULE], name):
                replier.begin_at(sys.modules[_MODULE], name)
    return replier


def _record() -> None:
    """Turn the recorder on, but not with GPUs: the same variable would turn NCCL's on."""
    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


class Replier:
    """The thread that replies.

    It is also an import finder that finds nothing, but sees the script's imports. It stays in
    sys.meta_path: another thread may be iterating over that.
    """

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self._main, self._pid = get_ident(), os.getpid()
        self._is_imported = self._has_started = False
        self._has_returned = False  # of the script
        self._numbers: Any = None  # of all collectives, at the last poll
        self._since = 0.0  # when they changed
        self._groups: list[dict[str, Any]] | None = None  # since then, once they were needed
        self._signal = 0
        self._busy = allocate_lock()
        self._given = {name: os.environ.get(name, "") for name in _GIVEN}
        self._sees_groups = self._has_exchanged = False
        self._in_child = mmap.mmap(-1, 1)  # shared with forks of the script: has one made a group?

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Start if the script imports torch.distributed."""
        if not self._sees_groups and hasattr(sys.modules.get(_MODULE), "_update_default_pg"):
            self.see_groups()
        if name == _MODULE and not self._is_imported:
            self._is_imported = True
            if os.getpid() == self._pid:  # a fork of the script is not a rank
                with contextlib.suppress(Exception):
                    _record()
                    if not self._has_started:
                        self._start()

    def begin_at(self, module: Any, name: str) -> None:
        """Start only when the script calls that function: no thread may exist before."""
        function = getattr(module, name)

        def begin(*args: Any, **options: Any) -> Any:
            if getattr(module, name) is begin:  # and no other code has wrapped it since
                setattr(module, name, function)
            self.find_spec(_MODULE)
            return function(*args, **options)

        setattr(module, name, begin)

    def see_groups(self) -> None:
        """Note, just before the script destroys its groups, whether they had collectives."""
        self._sees_groups = True
        module: Any = sys.modules[_MODULE]
        update: Any = getattr(module, "_update_default_pg", None)

        def noting(group: Any) -> Any:
            with contextlib.suppress(Exception):
                if os.getpid() == self._pid:
                    self._note_collectives()
                else:
                    self._in_child[0] = 1
            return update(group)

        if update:
            module._update_default_pg = noting

    def _note_collectives(self) -> None:
        world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
        groups = dict(world.pg_group_ranks)
        begun = any(_sequence(group) for group, ranks in groups.items() if len(ranks) > 1)
        kinds = ("fr", "nccl") if has_status(world, groups) else ("fr",)
        is_recorded = any(recorded(kind).get("pg_status") for kind in kinds)
        self._has_exchanged = self._has_exchanged or begun or is_recorded

    def is_alone(self) -> bool:
        """Tell whether this rank has worked alone in a job of several, as far as can be known."""
        with contextlib.suppress(Exception):  # an unknown version of torch
            return os.getpid() == self._pid and self._is_alone()
        return False

    def _is_alone(self) -> bool:
        if self._given["WORLD_SIZE"] in ("", "1") or _MODULE not in sys.modules:
            return False  # we do not know what did its work
        self._note_collectives()
        calls = getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0)
        if self._has_exchanged or calls or self._in_child[0]:
            return False
        forks = "multiprocessing.popen_fork" in sys.modules  # workers that load data
        worked = not forks and sum(os.times()[2:4]) > _WORK_SECONDS
        return not worked and _OTHER_WAYS.isdisjoint(sys.modules)

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Return the report of a rank that fails: its groups, and a note."""
        found: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            if os.getpid() == self._pid and _MODULE in sys.modules:
                trace, frames = error.__traceback__, list[Any]()
                while trace:
                    frames.insert(0, trace.tb_frame)
                    trace = trace.tb_next
                if not self._has_exchanged:
                    found["notes"] = list(filter(None, [self._note(frames)]))
                found["groups"] = self._groups_now(has_failed=True)
        return found

    def script_ended(self) -> None:
        """Start in any case; from now on also report what keeps the process alive."""
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                if not self._has_started:
                    self._start(after=_END_SECONDS)
                self._has_returned = True

    def _start(self, after: float = 0.0) -> None:
        """Start the thread, which replies after so many seconds."""
        self._has_started, self._since = True, monotonic()
        atexit.register(self._end)
        with contextlib.suppress(RuntimeError):  # ulimit -u
            start_new_thread(self._run, (after,))

    def _end(self) -> None:
        """Keep threads out of C++ while Python exits: ending one there would abort the process.

        A stop may arrive meanwhile. Python then prints an exception of the script's handler, but
        not SystemExit or KeyboardInterrupt: it is too late for an exit code.
        """
        if os.getpid() == self._pid:
            raised = _raised_in(lambda: self._busy.acquire(timeout=1))
            self._since = monotonic()
            raised = _raised_in(let_torchs_threads_finish) or raised
            if isinstance(raised, Exception):
                raise raised

    def _run(self, after: float) -> None:
        # An exception: the keeper is gone, or Python is.
        with contextlib.suppress(Exception):
            if after:
                never = allocate_lock()
                never.acquire()
                never.acquire(timeout=after)
            self._signal = _write_at_signal(self._keeper)
            self._keeper.send({"watch": self._signal})
            for request in self._keeper.requests():
                self._keeper.send({**request, **self._reply(wants_all="stacks" in request)})

    def _reply(self, *, wants_all: bool) -> dict[str, Any]:
        """Return the reply: that there was progress, or since when not, and where threads are."""
        found: dict[str, Any] = {"ends": True, "unchanged": monotonic() - self._since}
        try:
            if self._busy.acquire(blocking=False):
                try:
                    found = self._progress(wants_all=wants_all)
                finally:
                    self._busy.release()
            # A handler of the script may have replaced faulthandler's.
            if self._signal and signal.getsignal(self._signal) != signal.SIG_DFL:
                found["signal"] = 0
        except Exception as error:  # an unknown version of torch
            found = {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}
        if wants_all or self._has_returned or "unchanged" in found:
            with contextlib.suppress(Exception):
                found.update(self._threads(wants_all=wants_all))
        return found

    def _threads(self, *, wants_all: bool) -> dict[str, Any]:
        """Return where the main thread is, and if `wants_all` all others but this one.

        After the script also what keeps the process alive, as Python waits for it: how many of the
        threads after the main one, which are not daemons, and a child of multiprocessing.
        """
        frames = current_frames()
        threads = {one.ident: one for one in list(getattr(threading, "_active", {}).values())}
        frames.pop(get_ident(), None)
        first, about = [self._main], dict[str, Any]()
        if self._has_returned:
            keep = [one for one in threads if one != self._main and not threads[one].daemon]
            first += [one for one in keep if one in frames]
            about = {"kept": len(first) - 1, "child": None}
            with contextlib.suppress(Exception):  # an unknown version of Python
                children = (_joined(frames.get(one)) for one in first)
                about["child"] = next(filter(None, children), None)
        found, room = list[Any](), _LONGEST_STACKS
        others = [one for one in frames if wants_all and one not in first]
        for thread in [*first, *others][:_MOST_THREADS]:
            name = hex(thread)  # of a thread that C++ has started, or without a name
            with contextlib.suppress(Exception):  # the script's own code may run here
                name = str(threads[thread].name)[:_LONGEST_NAME] or name
            found.append(["" if thread == self._main else name, calls(frames.get(thread))])
            room -= sum(len(function) + len(path) for function, path, _ in found[-1][1])
            if room < 0:
                break
        return {"threads": found, **about}

    def _progress(self, *, wants_all: bool) -> dict[str, Any]:
        """Return the state of each group, unless it has changed since the last poll."""
        world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
        if world is None:  # it has not imported torch.distributed
            return {"unchanged": monotonic() - self._since, "groups": []}
        names = dict(world.pg_names)
        frames = _outward(current_frames().get(self._main))
        making = self._making(frames)
        status = recorded("nccl").get("pg_status", {}) if has_status(world, names) else {}
        numbers = recorded("fr"), status, [_sequence(group) for group in names], making
        now = monotonic()
        found: dict[str, Any] = unknown(world, names, is_recorded=bool(numbers[0].get("pg_status")))
        if numbers != self._numbers:
            self._numbers, self._since, self._groups = numbers, now, None
            self._note_collectives()
            if not wants_all:
                return found
        if self._groups is None:  # reading thousands of entries is slow: do it once
            self._groups = self._groups_now(making=making)
        found.update(unchanged=now - self._since, groups=self._groups)
        if not self._has_exchanged and self._given["WORLD_SIZE"] not in ("", "1"):
            found.update(before=not self._has_returned, note=self._note(frames))
        return found

    def _groups_now(self, making: Any = None, *, has_failed: bool = False) -> list[dict[str, Any]]:
        """Return the state of each group; a rank that `has_failed` was in its last one."""
        world = sys.modules[_MODULE]._world
        names = dict(world.pg_names)
        status = recorded("nccl").get("pg_status", {}) if has_status(world, names) else {}
        entries = recorded("fr", entries=True).get("entries", [])
        if has_failed and entries:
            entries[-1]["retired"] = False
        found = groups(world, names, entries, status)
        return [*([making] if making else []), *found][:_MOST_GROUPS]

    def _making(self, frames: Sequence[Any]) -> dict[str, Any] | None:
        """Return the group that the main thread is making, as a group in which it waits."""
        for frame in frames:
            name = frame.f_code.co_name
            if name in _MAKES_GROUP and sys.modules[_MODULE].__file__ == frame.f_code.co_filename:
                ranks = range(int(self._given["WORLD_SIZE"] or 1))
                if name != _MAKES_GROUP[0]:
                    name, ranks = _MAKES_GROUP[1], frame.f_locals.get("ranks") or ranks
                text = ranges(sorted(ranks))
                return {"ranks": text, "order": -1, "last": 1, "waits": 1, "op": name}
        return None

    def _note(self, frames: Sequence[Any]) -> str:
        """Return why the ranks that this one waits for will not come, "" if unknown."""
        for frame in frames:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if path.endswith("torch/multiprocessing/spawn.py") and name == "join":
                return f"rank {self._given['RANK']} has spawned {_SPAWNS}"
            if path.endswith("torch/distributed/rendezvous.py") and "hostname" in frame.f_locals:
                seen = map(frame.f_locals.get, ("hostname", "port", "rank", "world_size"))
                return elsewhere(self._given, *seen)
            if name == _MAKES_GROUP[0]:
                return elsewhere(self._given, *_asked(frame.f_locals))
        return ""


def _raised_in(wait: Callable[[], Any]) -> BaseException | None:
    """Wait, again if a handler of the script raises meanwhile; return its last exception.

    An error of this file's own code is dropped: no free descriptor, say.
    """
    raised: BaseException | None = None
    for _ in range(3):  # stops come once or twice
        try:
            wait()
            break
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_next:
                trace = trace.tb_next
            if trace and trace.tb_frame.f_code.co_filename != __file__:
                raised = error
    return raised


def let_torchs_threads_finish(seconds: float = 1.0) -> None:
    """Wait, for at most so many seconds, until none of torch's own threads is working.

    Poll at least 100 times: the process may have been suspended meanwhile.

    A collective completes before gloo's thread has released its tensors. On a busy machine the
    thread may do so only while Python exits, which aborts the process: "terminate called without an
    active exception". destroy_process_group() joins that thread, but not if the script has made an
    optimizer (torch 2.13).
    """
    until, polls, idle = monotonic() + seconds, 0, 0
    # Twice idle: at the first poll the thread may be waiting for Python's lock.
    while idle < 2 and (polls < 100 or monotonic() < until):
        polls, idle = polls + 1, 0 if _is_torch_at_work() else idle + 1
        sleep(0.001)


def _is_torch_at_work() -> bool:
    """Tell whether a thread of torch runs or waits for a core. Raises OSError.

    Gloo's is `pt_gloo_runloop`; an older torch leaves it the name of the thread that started it.
    """
    python = {getattr(one, "native_id", 0) for one in getattr(threading, "_active", {}).values()}
    inherited, _ = _stat(get_native_id())
    for thread in {*map(int, listdir("/proc/self/task"))} - python - {get_native_id()}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name, state = _stat(thread)
            if state == b"R" and (name.startswith(b"pt_") or name == inherited):
                return True
    return False


def _stat(thread: int) -> tuple[bytes, bytes]:
    """Return a thread's name and state, as in proc(5). Raises OSError."""
    with FileIO(f"/proc/self/task/{thread}/stat") as file:
        name, _, rest = file.read(60).partition(b"(")[2].rpartition(b") ")
    return name, rest[:1]


def _outward(frame: Any) -> list[Any]:
    """Return a frame and its callers, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _asked(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the host, port, rank and world of a call of init_process_group, "" for none."""
    url = str(arguments.get("init_method") or "file://")  # else it was given a store
    where: tuple[Any, ...] = ("", "")
    if url.startswith("env://"):
        where = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    elif url.startswith("tcp://"):
        host, _, port = url[6:].partition("?")[0].partition("/")[0].rpartition(":")
        where = host, port
    else:
        return "", "", "", ""
    numbers = []
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        number = arguments.get(name, -1)
        numbers.append(os.environ.get(variable, "") if number == -1 else number)
    return (*where, *numbers)


def elsewhere(given: Mapping[str, str], host: Any, port: Any, rank: Any, world: Any) -> str:
    """Return how a rank's rendezvous differs from this job's, "" if it does not.

    `given` are the variables of the rank's start; the others are what the rank uses, "" if unknown.
    """
    used = dict(zip(_GIVEN, map(str, (rank, world, host, port))))
    if host in ("localhost", "127.0.0.1", "::1", os.uname().nodename):
        if given["GROUP_RANK"] in ("", "0"):  # on the first host localhost is the same
            used["MASTER_ADDR"] = given["MASTER_ADDR"]
    other = [name for name in used if used[name] not in ("", "None", given[name]) and given[name]]
    if not other:
        return ""
    name, who = other[-1], f"rank {given['RANK']}"
    how = f"sets {name}" if os.environ.get(name) == used[name] else f"passes {_ARGUMENTS[name]}"
    if name.startswith("MASTER"):
        meet = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
        waits = f"waits at {host}:{port}, but this job's ranks meet at {meet}"
    elif name == "WORLD_SIZE":
        waits = f"waits until there are {world} ranks, but this job has {given[name]}"
    else:
        waits = f"joins as rank {rank}"
    return f"{who} {waits}: the script {how}"


def unknown(world: Any, names: Mapping[Any, str], *, is_recorded: bool) -> dict[str, str]:
    """Return an `error` to reply with, for groups that cannot be watched; {} if there are none.

    `is_recorded` tells whether gloo's recorder holds anything.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return {"error": "TORCH_DISTRIBUTED_DEBUG=DETAIL makes ranks wait before each collective"}
    version = sys.modules["torch"].__version__
    has_recorder = hasattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json")
    for group in names:
        backends = world.pg_backend_config.get(group, "")
        is_known = has_recorder and "gloo" in _kinds(backends)
        if is_known and not is_recorded and _sequence(group):
            is_known = False  # TORCH_FR_BUFFER_SIZE is 0
        if not (_is_counted(backends) or is_known):
            return {"error": f"torch {version} keeps no record of groups with {backends}"}
    return {}


def has_status(world: Any, names: Mapping[Any, str]) -> bool:
    """Tell whether torch may know which NCCL collectives have ended, and can report it safely.

    Before 2.10 the call also calls NCCL's profiler plugin, and with ROCm the communicators.
    """
    torch = sys.modules["torch"]
    if torch.__version__ < (2, 10) or torch.version.hip:
        return False
    return any("nccl" in _kinds(world.pg_backend_config.get(one, "")) for one in names)


def recorded(which: str, *, entries: bool = False) -> dict[str, Any]:
    """Return the contents of torch's recorder `fr` or `nccl`; {} if there is none."""
    dump = getattr(sys.modules["torch._C._distributed_c10d"], f"_dump_{which}_trace_json", None)
    return dict(loads(dump(entries, False))) if dump else {}


def groups(
    world: Any,
    names: Mapping[Any, str],
    entries: Sequence[dict[str, Any]],
    status: Mapping[str, Mapping[str, str]],
) -> list[dict[str, Any]]:
    """Return the state of each process group (progress.Group), by torch's records.

    Groups in which the rank waits come first. `entries` are gloo's, `status` is NCCL's, by a
    group's `uid`.
    """
    found, seen = [], dict[str, int]()
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in entries:
        if one["profiling_name"].startswith("gloo:"):
            by_name.setdefault(one["process_group"][0], []).append(one)
    has_lost = bool(entries) and entries[0]["record_id"] > 0  # the oldest ones, for lack of room
    for group, name in names.items():
        ranks = ranges(sorted(world.pg_group_ranks[group]))
        order = seen[ranks] = seen.get(ranks, -1) + 1  # among groups of the same ranks
        if len(ranks) > _LONGEST_RANKS:
            continue
        which = {"ranks": ranks, "order": order}
        is_counted = _is_counted(world.pg_backend_config.get(group, ""))
        if is_counted:
            found.append({**which, **counted(group, status), "is_counted": True})
        own = by_name.get(name, [])
        if own or not is_counted:  # one group may have both NCCL and gloo
            found.append({**which, **summary(own, _sequence(group), has_lost=has_lost)})
    return sorted(found, key=lambda one: not one["waits"])


def _is_counted(backends: str) -> bool:
    """Tell whether a group's counter counts only collectives: NCCL's, from torch 2.6 on.

    Before that, a batch of point-to-point operations counted, too (pytorch/pytorch#135132).
    """
    return "nccl" in _kinds(backends) and bool(sys.modules["torch"].__version__ >= (2, 6))


def _kinds(backends: str) -> list[str]:
    """Return the backends of a group: for `cpu:gloo,cuda:nccl`, gloo and nccl."""
    return [one.rpartition(":")[2] for one in backends.split(",")]


def counted(group: Any, status: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Return a group's last NCCL collective; `waits` is set if it has not ended.

    torch numbers sends separately, but keeps only the last number of both. So the number may be
    unknown; and a collective seems not to have ended if a send has ended after it. A backend
    without a uid has no status: the recorder's entries are another backend's.
    """
    last = _sequence(group)
    found = {"name": _label(getattr(group, "group_desc", "")), "last": last, "waits": 0}
    if status:
        backend = group._get_backend(sys.modules["torch"].device("cuda"))
        uid = getattr(backend, "uid", None)
        seen = {} if uid is None else status.get(str(uid), {})
        has_ended = seen.get("last_completed_collective") == str(last)
        if seen.get("last_enqueued_collective") == str(last) and not has_ended:
            found["waits"] = last
    return found


def _label(description: str) -> str:
    return "" if description == "undefined" else description[:_LONGEST_NAME]


def _sequence(group: Any) -> int:
    """Return a group's own counter, which gloo's point-to-point operations increase, too."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend without a counter
        return 0


def summary(own: Sequence[dict[str, Any]], count: int, *, has_lost: bool) -> dict[str, Any]:
    """Return the last collective that a recorded group has begun, and the first unfinished one.

    `waits` is the latter's number, 0 if there is none; `op` is its operation, `size` its input's
    size. `count`, of all the group's operations, is used if the recorder `has_lost` its entries.
    """
    newest = max((one["pg_id"] for one in own), default=0)  # a name may be used again
    own = [one for one in own if one["pg_id"] == newest and not one["is_p2p"]]
    if own and own[-1]["op_id"] > count:
        own = []  # they are an earlier group's: this one has begun nothing yet
    last = max((one["collective_seq_id"] for one in own), default=count if has_lost else 0)
    begun = [one for one in own if not one["retired"]]
    first = min(begun, key=lambda one: int(one["collective_seq_id"]), default=None)
    label = _label(own[0]["process_group"][1]) if own else ""
    found = {"name": label, "last": last, "waits": 0}
    if first:
        found["waits"] = first["collective_seq_id"]
        found["op"] = str(first["profiling_name"]).partition(":")[2]
        found["size"] = input_size(first.get("input_sizes") or [], first.get("input_dtypes") or [])
    return found


def input_size(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    """Return the shape and type of a collective's first input, as in `1024x2 Float`."""
    if not sizes:
        return ""
    return f"{'x'.join(map(str, sizes[0])) or 'one'} {types[0] if types else ''}".strip()


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: `0-7`, `0-56:8` for every eighth, `0,1,5` for others."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(after - before == step for before, after in zip(ranks, ranks[1:])):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def calls(frame: Any) -> list[Any]:
    """Return the calls that led to a frame, the innermost last: function, file and line of each."""
    found: list[Any] = []
    while frame is not None and len(found) < _MOST_CALLS:
        code = frame.f_code
        found.append([code.co_name[:_LONGEST], code.co_filename[-_LONGEST:], frame.f_lineno])
        frame = frame.f_back
    return found[::-1]


def _joined(frame: Any) -> list[Any] | None:
    """Return the name and pid of the child that a thread waits for at exit, if any.

    The thread is in multiprocessing's exit handler, or the thread of a pool of concurrent.futures.
    """
    while frame is not None:
        name, path, child = frame.f_code.co_name, frame.f_code.co_filename, None
        if name == "_exit_function" and path.endswith("multiprocessing/util.py"):
            child = frame.f_locals.get("p")
        elif name == "run" and path.endswith("concurrent/futures/process.py"):
            child = next(iter(dict(frame.f_locals["self"].processes).values()), None)
        if child:
            return [str(child.name)[:_LONGEST_NAME], int(child.pid)]
        frame = frame.f_back
    return None


def current_frames() -> dict[int, Any]:
    """Return the innermost frame of each thread.

    In Python 3.11 this must not collect garbage: it holds a lock that collected objects may want
    (python/cpython#106883). If a script turns collection off at that very moment, it is turned on
    again.
    """
    collects = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _write_at_signal(keeper: Any) -> int:
    """Have faulthandler write where the main thread is at a signal; return its number, 0 if none.

    A high real-time signal, which the script is unlikely to use itself.
    """
    if signal.getsignal(signal.SIGRTMAX - 3) != signal.SIG_DFL:
        return 0
    number = int(signal.SIGRTMAX - 3)
    faulthandler.register(number, file=keeper.fileno(), all_threads=False)
    return number
