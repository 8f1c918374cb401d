"""Reports to the launcher, from inside a rank, how far its collectives are, and where it is.

A thread waits for the launcher's requests. It starts when the script imports torch.distributed
(before the script, if that is already imported: a warm start). It replies within milliseconds that
there was progress since the last poll; or else which collectives this rank has begun, which of them
have not ended, and where all threads are. If it does not reply, the script's C code holds the
interpreter, or the process is suspended. Then faulthandler, at a signal, writes where the main
thread is to the same connection: in C, and without the interpreter.

While a rank makes a group, it waits for the others that make it: it reports this as a wait in a
group of a special kind. At the end of its script a rank reports whether it was isolated: whether no
collective began in any of its groups, and nothing else has exchanged data or done its work, as far
as can be known. Of groups that are gone by then, only gloo's recorder knows.

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
import os
import signal
import sys
import threading

# Bound before the script runs, which may replace them (gevent).
from _thread import allocate_lock, get_ident, get_native_id, start_new_thread
from collections.abc import Mapping, Sequence
from io import FileIO
from itertools import islice
from json import dumps, loads
from os import listdir
from time import monotonic, sleep
from traceback import walk_stack, walk_tb
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"
_RECORDER, _ENTRIES = "TORCH_FR_BUFFER_SIZE", "2000"  # torch's default where it is on by default
# Limits of a reply: bytes of the groups of all ranks of a host, whose report has 64 KiB, and
# characters of a group's ranks; threads, and calls of a thread.
_GROUPS_BYTES, _LONGEST_RANKS = 16_000, 2000
_MOST_THREADS, _MOST_CALLS, _LONGEST = 30, 60, 200  # characters of a file's path, or of a name
# Functions of _MODULE that make a group; the first makes the one of all ranks.
_MAKES_GROUP = ("init_process_group", "new_group", "_new_group_with_tag")
# And functions of it in which a rank waits without a collective.
_WITHOUT_ENTRY = ("recv", "send", "monitored_barrier")
# Arguments of init_process_group that take the place of variables of the rank's start.
_ARGUMENTS = {"RANK": "rank", "WORLD_SIZE": "world_size"}
_ARGUMENTS.update(MASTER_ADDR="init_method", MASTER_PORT="init_method")
_GIVEN = (*_ARGUMENTS, "GROUP_RANK", "LOCAL_WORLD_SIZE")
# Modules through which ranks may exchange data, or whose child may do their work.
_OTHER_WAYS = {"mpi4py.MPI", "horovod.torch"}
_OTHER_WAYS |= {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"}
_WORK_SECONDS = 1.0  # of CPU that another program used: about what importing torch takes
_LOADER = "torch/utils/data/dataloader.py"
_SPAWNS = (
    "its own ranks (torch.multiprocessing.spawn), though torchrun has already started a process "
    "for each rank: call the function without mp.spawn"
)


def begin(keeper: Any) -> Replier:
    """Reply to the launcher's requests once the script imports torch.distributed.

    They come from the keeper (rank.py, KeeperConnection).
    """
    replier = Replier(keeper)
    sys.meta_path.insert(0, replier)
    os.register_at_fork(after_in_parent=replier.forked)
    if _MODULE in sys.modules:  # by sitecustomize, or before this process was forked
        replier.find_spec(_MODULE)
    return replier


class Replier:
    """The thread that replies.

    It is also an import finder that finds nothing, but sees the script's imports. It stays in
    sys.meta_path: another thread may be iterating over that.
    """

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self._main, self._pid = get_ident(), os.getpid()
        self._has_started = self._has_returned = False  # the thread; the script
        self._has_exchanged = self._has_forked = False
        self._numbers: Any = None  # of all collectives, at the last poll
        self._since = 0.0  # when they changed
        self._signal = 0
        self._busy = allocate_lock()
        self._given = {name: os.environ.get(name, "") for name in _GIVEN}
        self._has_others = self._given["WORLD_SIZE"] not in ("", "1")  # ranks

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Start if the script imports torch.distributed."""
        if name == _MODULE and not self._has_started and os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                if not os.path.exists("/dev/nvidiactl"):  # the variable turns NCCL's on, too
                    os.environ.setdefault(_RECORDER, _ENTRIES)
                self._start()

    def forked(self) -> None:
        """Note that the script has forked a process that may do its work, not load its data."""
        files = [frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe())]
        self._has_forked |= not any(file.endswith(_LOADER) for file in files)

    def _note_collectives(self) -> None:
        """Note whether a collective has begun, as the script may destroy its groups later."""
        world = sys.modules[_MODULE]._world
        # Only those with a name: one is torch's mark for groups of which this rank is no member.
        groups = [group for group, ranks in dict(world.pg_group_ranks).items() if len(ranks) > 1]
        begun = any(_sequence(group) for group in groups if group in world.pg_names)
        self._has_exchanged |= begun or bool(recorded("fr").get("pg_status"))

    def is_isolated(self) -> bool:
        """Tell whether this rank was isolated in a job of several, as far as can be known."""
        with contextlib.suppress(Exception):  # an unknown version of torch
            module = sys.modules[_MODULE]  # else we do not know what did its work
            self._note_collectives()
            had_group = getattr(module, "_default_pg_init_method", None) is not None
            is_recorded = _RECORDER in os.environ and bool(recorded("fr"))
            loads_data = "multiprocessing.popen_fork" in sys.modules
            may_have_others = (
                self._has_exchanged,
                self._has_forked,
                had_group and not (module._world.pg_map or is_recorded),
                getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0),
                not loads_data and sum(os.times()[2:4]) > _WORK_SECONDS,
                not _OTHER_WAYS.isdisjoint(sys.modules),
                sum(not one.daemon for one in threading.enumerate()) > 1,
            )
            return self._has_others and not any(may_have_others)
        return False

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Return the report of a rank that fails: its groups, and a fact."""
        found: dict[str, Any] = {}
        with contextlib.suppress(BaseException):  # a signal handler of the script may raise
            if _MODULE in sys.modules:
                raised = [frame for frame, _ in walk_tb(error.__traceback__)]
                making, fact = self._meeting(raised[::-1])
                if fact and not self._has_exchanged:
                    found["facts"] = [fact]
                file = sys.modules[_MODULE].__file__
                own = {one.f_code.co_name for one in raised if one.f_code.co_filename == file}
                # gloo's recorder has no entry for these.
                has_failed = not making and own.isdisjoint(_WITHOUT_ENTRY)
                found["groups"], _ = self._fitting(making + groups_now(has_failed=has_failed))
        return found

    def script_ended(self) -> None:
        """Note that from now on a rank is expected to end."""
        self._has_returned = True

    def _start(self) -> None:
        """Start the thread that replies."""
        self._has_started, self._since = True, monotonic()
        atexit.register(self._at_exit)
        with contextlib.suppress(RuntimeError):  # ulimit -u
            start_new_thread(self._run, ())

    def _at_exit(self) -> None:
        """Keep threads out of C++ while Python exits: ending one there would abort the process."""
        if os.getpid() == self._pid:
            try:
                self._busy.acquire(timeout=1)  # and keep it
                self._since = monotonic()
                let_torchs_threads_finish()
            except BaseException as error:  # of a script's handler, at a stop
                let_torchs_threads_finish()
                if isinstance(error, Exception):  # others are too late for the exit code
                    raise  # Python prints it

    def _run(self) -> None:
        # An exception: the keeper is gone, or Python is.
        with contextlib.suppress(Exception):
            self._signal = _write_at_signal(self._keeper)
            self._keeper.send({"watch": self._signal})
            for request in self._keeper.requests():
                self._keeper.send({**request, **self._reply(wants_all="stacks" in request)})

    def _reply(self, *, wants_all: bool) -> dict[str, Any]:
        """Return the reply: that there was progress, or since when not, and where threads are."""
        found: dict[str, Any] = {"ends": True}  # if `_at_exit` holds the lock
        try:
            if self._busy.acquire(blocking=False):
                try:
                    found = self._progress(wants_all=wants_all)
                finally:
                    self._busy.release()
            if found:
                found["unchanged"] = monotonic() - self._since
            # A handler of the script may have replaced faulthandler's.
            if self._signal and signal.getsignal(self._signal) != signal.SIG_DFL:
                found["signal"] = 0
        except Exception:  # an unknown version of torch
            found = {}
        if wants_all or "unchanged" in found:
            with contextlib.suppress(Exception):
                found.update(self._threads())
                if not self._has_returned and (handles := handled(self._main)):
                    found["handles"] = f"rank {self._given['RANK']} is handling {handles}"
        return found

    def _threads(self) -> dict[str, Any]:
        """Return where all threads but this one are, the main one first, and a child process.

        Of each thread its name, its calls, and whether Python waits for it at the script's end.
        """
        known, found = dict(getattr(threading, "_active", {})), list[Any]()
        for ident, frame in of_threads("_current_frames").items():
            if ident != get_ident():
                thread, is_main = known.get(ident), ident == self._main
                # C++ has started it, or it has no name.
                name = "" if is_main else str(getattr(thread, "name", "") or hex(ident))[:_LONGEST]
                keeps = not (is_main or thread is None or thread.daemon)
                found.append([name, written(frame), keeps])
        found.sort(key=lambda thread: (thread[0] != "", not thread[2]))
        processes = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
        children = [f"{one.name[:_LONGEST]} (pid {one.pid})" for one in processes if not one.daemon]
        return {"threads": found[:_MOST_THREADS], "child": (children or [""])[0]}

    def _progress(self, *, wants_all: bool) -> dict[str, Any]:
        """Return the state of each group, unless it has changed since the last poll."""
        world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
        if world is None:  # it is importing torch.distributed
            return {"groups": []}
        main = of_threads("_current_frames").get(self._main, sys._getframe())  # it may have ended
        making, fact = self._meeting([frame for frame, _ in walk_stack(main)])
        counts = [_sequence(group) for group in dict(world.pg_names)]
        numbers = recorded("fr").get("pg_status"), status(world), counts, making
        if numbers != self._numbers:
            self._numbers, self._since = numbers, monotonic()
            self._note_collectives()
            if not wants_all:
                return {}
        groups, has_more = self._fitting(making + groups_now())
        found: dict[str, Any] = {"groups": groups, "has_more": has_more}
        may_exchange = self._has_exchanged or self._has_forked or self._has_returned
        if self._has_others and not may_exchange:
            found["fact"] = fact
        return found

    def _fitting(self, groups: list[Any]) -> tuple[list[Any], bool]:
        """Return the groups that a report has room for, and whether there are more."""
        fitting, room = list[Any](), _GROUPS_BYTES // int(self._given["LOCAL_WORLD_SIZE"] or 1)
        for group in groups:
            size = len(dumps(group))
            if size < room:
                fitting, room = [*fitting, group], room - size
        return fitting, len(fitting) < len(groups)

    def _meeting(self, frames: Sequence[Any]) -> tuple[list[list[Any]], str]:
        """Return the group that a stack is making, as a group in which it waits.

        And why the ranks that it waits for will not come, "" if unknown.
        """
        for frame in frames:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if path.endswith("torch/multiprocessing/spawn.py") and name == "join":
                return [], f"rank {self._given['RANK']} has spawned {_SPAWNS}"
            if name in _MAKES_GROUP and path == sys.modules[_MODULE].__file__:
                ranks, fact = range(int(self._given["WORLD_SIZE"] or 1)), ""
                if name == _MAKES_GROUP[0]:
                    fact = elsewhere(self._given, frame.f_locals)
                else:
                    name, ranks = _MAKES_GROUP[1], frame.f_locals.get("ranks") or ranks
                return [[ranges(sorted(ranks)), -1, "", 1, 1, name]], fact
        return [], ""


def let_torchs_threads_finish(seconds: float = 1.0) -> None:
    """Wait until none of torch's own threads is working, for at most `seconds`.

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
    with FileIO("/proc/thread-self/comm") as file:
        names = (b"pt_", file.read().rstrip())
    for thread in {*map(int, listdir("/proc/self/task"))} - python - {get_native_id()}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            with FileIO(f"/proc/self/task/{thread}/stat") as file:
                name, _, rest = file.read(60).partition(b"(")[2].rpartition(b") ")
            if rest.startswith(b"R") and name.startswith(names):
                return True
    return False


def elsewhere(given: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """Return how a rank's rendezvous differs from this job's, "" if it does not.

    `given` are the variables of the rank's start, `arguments` those of init_process_group.
    """
    url = str(arguments.get("init_method") or "")  # "": it was given a store
    numbers = {name: arguments.get(_ARGUMENTS[name], -1) for name in ("RANK", "WORLD_SIZE")}
    passed = {name: str(number) for name, number in numbers.items() if number != -1}
    if url.startswith("tcp://"):
        address = url[6:].partition("?")[0].partition("/")[0]
        passed["MASTER_ADDR"], _, passed["MASTER_PORT"] = address.rpartition(":")
    elif not url.startswith("env://"):
        return ""
    used = {name: passed.get(name, os.environ.get(name, "")) for name in _ARGUMENTS}
    meets = "waits at {MASTER_ADDR}:{MASTER_PORT}".format_map(used)
    meets += ", but this job's ranks meet at {MASTER_ADDR}:{MASTER_PORT}".format_map(given)
    if used["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1", os.uname().nodename):
        if given["GROUP_RANK"] in ("", "0"):  # on the first host localhost is the same
            used["MASTER_ADDR"] = given["MASTER_ADDR"]
    other = [name for name in used if given[name] and used[name] not in ("", given[name])]
    if not other:
        return ""
    name = other[-1]
    if not name.startswith("MASTER"):
        meets = f"waits with {name}={used[name]}, but was given {given[name]}"
    how = f"passes {_ARGUMENTS[name]}" if name in passed else f"sets {name}"
    return f"rank {given['RANK']} {meets}: the script {how}"


# What torch knows of its groups.


def recorded(which: str, *, entries: bool = False) -> dict[str, Any]:
    """Return the contents of torch's recorder `fr` or `nccl`; {} if there is none."""
    dump = getattr(sys.modules["torch._C._distributed_c10d"], f"_dump_{which}_trace_json", None)
    return dict(loads(dump(entries, False))) if dump else {}


def status(world: Any) -> Mapping[str, Mapping[str, str]]:
    """Return which NCCL collectives have ended, by a group's `uid`, if torch can tell it safely.

    Before 2.10 the call also calls NCCL's profiler plugin, and with ROCm the communicators.
    """
    torch = sys.modules["torch"]
    is_safe = torch.__version__ >= (2, 10) and not torch.version.hip
    has_nccl = any(map(_has_nccl, dict(world.pg_backend_config).values()))
    return recorded("nccl").get("pg_status", {}) if is_safe and has_nccl else {}


def groups_now(*, has_failed: bool = False) -> list[list[Any]]:
    """Return the state of each process group; a rank that `has_failed` was in its last one."""
    world = sys.modules[_MODULE]._world
    entries = recorded("fr", entries=True).get("entries", [])
    if has_failed and entries:
        entries[-1]["retired"] = False
    return groups(world, entries, status(world))


def groups(
    world: Any, entries: Sequence[dict[str, Any]], ended: Mapping[str, Mapping[str, str]]
) -> list[list[Any]]:
    """Return the state of each process group (waits.Group), by torch's records.

    Groups in which the rank waits come first. `entries` are gloo's, `ended` is NCCL's.
    """
    found, seen = list[list[Any]](), dict[str, int]()
    for group, name in dict(world.pg_names).items():
        ranks = ranges(sorted(world.pg_group_ranks[group]))
        order = seen[ranks] = seen.get(ranks, -1) + 1  # among groups of the same ranks
        label = getattr(group, "group_desc", "")[:_LONGEST].replace("undefined", "")
        is_counted = _is_counted(world.pg_backend_config.get(group, ""))
        own = [
            one
            for one in entries
            if one["process_group"][0] == name and one["profiling_name"].startswith("gloo:")
        ]
        states = [counted(group, ended)] if is_counted else []
        if own or not is_counted:  # one group may have both NCCL and gloo
            states.append(summary(own, _sequence(group)))
        found += [[ranks, order, label, *one] for one in states if len(ranks) <= _LONGEST_RANKS]
    return sorted(found, key=lambda one: not one[4])


def _is_counted(backends: str) -> bool:
    """Tell whether a group's counter counts only collectives: NCCL's, from torch 2.6 on.

    Before that, a batch of point-to-point operations counted, too (pytorch/pytorch#135132).
    """
    return _has_nccl(backends) and bool(sys.modules["torch"].__version__ >= (2, 6))


def _has_nccl(backends: str) -> bool:
    """Tell whether NCCL is one of a group's backends: `cpu:gloo,cuda:nccl`."""
    return "nccl" in backends.replace(":", ",").split(",")


def counted(group: Any, ended: Mapping[str, Mapping[str, str]]) -> list[Any]:
    """Return a group's fields after its name, by its number of collectives.

    It waits in the last one if that has surely not ended. torch numbers sends separately, but keeps
    only the last number of both. So the number may be unknown; and a collective seems not to have
    ended if a send has ended after it. A backend without a uid has no status: the recorder's
    entries are another backend's.
    """
    last, waits = _sequence(group), 0
    if ended:
        backend = group._get_backend(sys.modules["torch"].device("cuda"))
        seen = ended.get(str(getattr(backend, "uid", "unknown")), {})
        has_ended = seen.get("last_completed_collective") == str(last)
        if seen.get("last_enqueued_collective") == str(last) and not has_ended:
            waits = last
    return [last, waits, "", "", True]


def _sequence(group: Any) -> int:
    """Return a group's own counter, which gloo's point-to-point operations increase, too."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend without a counter
        return 0


def summary(own: Sequence[dict[str, Any]], count: int) -> list[Any]:
    """Return a group's fields after its name, by the recorder's entries.

    It waits in the first collective that has not ended. `count` is the number of all
    operations of the group. Entries that the recorder has lost, for lack of room, count as not
    begun.
    """
    newest = max((one["pg_id"] for one in own), default=0)  # a name may be used again
    own = [one for one in own if one["pg_id"] == newest and not one["is_p2p"]]
    if own and own[-1]["op_id"] > count:
        own = []  # they are an earlier group's: this one has begun nothing yet
    last = max((one["collective_seq_id"] for one in own), default=0)
    begun = [one for one in own if not one["retired"]]
    if not begun:
        return [last, 0]
    first = min(begun, key=lambda one: int(one["collective_seq_id"]))
    op = str(first["profiling_name"]).partition(":")[2]
    size = ""  # of its first input: `1024x2 Float`
    for shape, kind in zip(first.get("input_sizes", ())[:1], first.get("input_dtypes", ())):
        size = f"{'x'.join(map(str, shape)) or 'one'} {kind}"
    return [last, first["collective_seq_id"], op, size]


def ranges(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: `0-7`, `0-56:8` for every eighth, `0,1,5` for others."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(after - before == step for before, after in zip(ranks, ranks[1:])):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


# Where threads are.


def written(frame: Any) -> list[str]:
    """Return the calls that led to a frame as faulthandler writes them, the innermost first."""
    calls = [(call.f_code, line) for call, line in islice(walk_stack(frame), _MOST_CALLS)]
    return [
        f'  File "{code.co_filename[-_LONGEST:]}", line {line or 0} in {code.co_name[:_LONGEST]}'
        for code, line in calls
    ]


def handled(thread: int) -> str:
    """Return the exception that a thread handles, and where it was raised; "" if none, or unknown.

    It may be in a `finally` or an `__exit__`: Python shows the exception only after these. None of
    the script's code is called for its text, which might wait for a GPU.
    """
    found = of_threads("_current_exceptions").get(thread)  # from Python 3.10 on
    error = found[1] if isinstance(found, tuple) else found  # as from Python 3.12 on
    if error is None or isinstance(error, (ImportError, StopIteration)):
        return ""  # a program often runs on in their handlers
    args = vars(BaseException)["args"].__get__(error)  # error.args may be the script's own
    text = " ".join(one for one in args if type(one) is str)[:_LONGEST]
    *_, (frame, line) = walk_tb(error.__traceback__)
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    code, title = frame.f_code, f"{kind.removeprefix('__main__.')}: {text}".removesuffix(": ")
    return f"{title}, raised in {code.co_name}, {os.path.basename(code.co_filename)}:{line}"


def of_threads(function: str) -> dict[int, Any]:
    """Return the result of a function of sys, about each thread; {} if there is none.

    In Python 3.11 this must not collect garbage: it holds a lock that collected objects may want
    (python/cpython#106883). If a script turns collection off at that very moment, it is turned on
    again.
    """
    collects = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return dict(getattr(sys, function, dict)())
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
