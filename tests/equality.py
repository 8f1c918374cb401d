"""What a rank is, fact by fact, and how it differs from a plain torchrun one: docs' equality.md.

Each function under @fact is a row of that page, and a probe: a rank runs it and reports what it
returns. Where a start of the launcher's is not equal, the row says how. tests/test_equality.py runs
this file in ranks and compares; docs/tables.py prints the rows.
"""

from __future__ import annotations

import sys

LOADED = sorted(sys.modules)  # before this file imports anything

import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import time  # noqa: E402
from typing import Any, Callable, NamedTuple  # noqa: E402

STARTS = ("cold", "warm")  # values of --launcher-start: the page has a column for each


class Other(NamedTuple):
    """How a rank differs, in the page's words, and what the fact is then: by default whatever."""

    words: str
    value: Any = ...


class Part(NamedTuple):
    """Rows of one job; `job` is the name of what test_equality.py runs."""

    title: str
    job: str


class Row(NamedTuple):
    """A fact; `other` has the starts of which it differs. `fact` tells of the others."""

    part: Part
    words: str
    probe: Callable[[], Any]
    other: dict[str, Other]
    is_drawn: bool
    within: float
    rank: int | None

    @property
    def name(self) -> str:
        return self.probe.__name__


ROWS: list[Row] = []
PART = Part("At the script's first line", "script")
LONGEST = 60  # s that workers may take
RANK_PY = "rank.py stands before the script, which it runs"
ARGUMENTS = ("--epochs", "1", "", "a b", "--", "--help", "-m")
# What differs between two jobs of plain torchrun's, too.
OF_ONE_JOB = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def fact(words, *, is_drawn=False, within=0.0, rank=None, **other):
    """Have a function be a row of the part that is begun; None of a start: equal again.

    A warm start differs as a cold one does, unless its own `Other` says how.

    is_drawn: what counts is how many of its values differ, over two ranks and two attempts.
    within: numbers that differ by no more than this share are equal. rank: the only one to have it,
    as it takes long.
    """

    if "cold" in other:
        other.setdefault("warm", other["cold"])
    other = {start: how for start, how in other.items() if how}

    def keep(probe):
        ROWS.append(Row(PART, words, probe, other, is_drawn, within, rank))
        return probe

    return keep


def status(field):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(field + ":"))


def signals(field):
    mask = int(status(field), 16)
    return [number for number in range(1, 65) if mask >> (number - 1) & 1]


def own_file(name):
    with open(f"/proc/self/{name}", errors="surrogateescape") as file:
        return file.read()


def descriptors():
    """Return what is open above stderr; but for the folder that is read here."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
        except OSError:
            pass
    return found


def short(words):
    return [os.path.basename(word) for word in words]


@fact("`torch` is not imported yet", warm=Other("it is, and what it imports"))
def torch_is_imported():
    return "torch" in LOADED


@fact(
    "`sys.modules`",
    cold=Other("more of the standard library, which the launcher's lines need"),
)
def modules():
    return LOADED


@fact("threads of the process")
def tasks():
    return len(os.listdir("/proc/self/task"))


@fact("descriptors that children inherit, but for 0 to 2")
def inherited():
    return [number for number in descriptors() if os.get_inheritable(number)]


@fact(
    "other descriptors",
    cold=Other("the connection to the launcher, and the file for a crash's place"),
)
def open_files():
    return sorted(os.path.basename(name).split("-")[0] for name in descriptors().values())


@fact("signals that are ignored")
def ignored():
    return signals("SigIgn")


@fact("signals that are blocked")
def blocked():
    return signals("SigBlk")


@fact(
    "signals that are caught",
    cold=Other("those of a crash, too: faulthandler notes its place", [2, 4, 6, 7, 8, 11]),
)
def caught():
    return signals("SigCgt")


@fact("`signal.getsignal` of each, the wakeup descriptor, timers")
def handlers():
    import signal

    own = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    return own, signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL)


@fact("`sys.argv`")
def arguments():
    return sys.argv


@fact("`sys.orig_argv` (Python 3.10)", cold=Other(RANK_PY))
def orig_argv():
    return short(getattr(sys, "orig_argv", ()))


@fact(
    "`/proc/PID/cmdline`",
    cold=Other(RANK_PY),
    warm=Other("those of the process that forks it: warm.py"),
)
def cmdline():
    return short(own_file("cmdline").split("\0"))


@fact("the process's program and name, but for `pt_main_thread`, as importing torch 2.4 names it")
def program():
    return own_file("comm").replace("pt_main_thread", "python3"), os.readlink("/proc/self/exe")


@fact(
    "`os.environ`",
    cold=Other("`LAUNCHER_JOB_MARK`, by which a launcher that the script starts knows of this one"),
)
def environment():
    return sorted(os.environ)


@fact(
    "values of the variables that both have, but for the job's id and port, and"
    " TORCHELASTIC_USE_AGENT_STORE: True from the first restart on, with torch 2.4 False otherwise"
)
def values():
    ours = (*OF_ONE_JOB, "LAUNCHER_JOB_MARK", "TORCHELASTIC_USE_AGENT_STORE")
    return {name: text for name, text in os.environ.items() if name not in ours}


@fact(
    "`/proc/PID/environ` is `os.environ`",
    cold=Other("and where the launcher is: `LAUNCHER_...`", ["LAUNCHER"]),
    warm=Other("that of the process that forks it"),
)
def proc_environ():
    names = {one.partition("=")[0] for one in own_file("environ").split("\0") if one}
    return sorted({name.split("_")[0] for name in names ^ set(os.environ)})


@fact("current folder")
def folder():
    return os.getcwd()


@fact("umask")
def umask():
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


@fact(
    "how many files it may have open",
    cold=Other("the soft limit is the hard one, at most 65,536, if it was lower", [700, 700]),
)
def file_limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@fact("other limits, priority, cores, the kernel's out-of-memory score")
def limits():
    lines = [line for line in own_file("limits").splitlines() if "open files" not in line]
    mine = lines, os.getpriority(os.PRIO_PROCESS, 0), own_file("oom_score_adj")
    return mine, sorted(os.sched_getaffinity(0))


@fact("user and groups")
def user():
    return os.getresuid(), os.getresgid(), sorted(os.getgroups()), status("CapEff")


@fact("leads its session and its process group; has no terminal")
def session():
    terminal = own_file("stat").rpartition(")")[2].split()[4]
    return os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), terminal


@fact(
    "parent",
    cold=Other("the rank's keeper, a process between torchrun and the script", ["stub.py"]),
    warm=Other("the rank's keeper, a process between torchrun and the script", ["warm.py"]),
)
def parent():
    ours = "torch.distributed.run", "stub.py", "warm.py"
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        return [one for one in short(file.read().split("\0")) if one in ours]


def is_open_as(numbers):
    import fcntl

    found = [(*os.fstat(number)[:3], fcntl.fcntl(number, fcntl.F_GETFL)) for number in numbers]
    return found, [os.isatty(number) for number in numbers]


@fact("0 is the same open file; so are 1 and 2 where they are a terminal")
def files():
    return is_open_as([0])


@fact(
    "1 and 2 elsewhere: a pipe, a file",
    cold=Other("pipes of the rank's keeper, which writes whole lines to these"),
)
def outputs():
    return is_open_as([1, 2])


@fact("`sys.stdin`, `sys.stdout`, `sys.stderr`: encoding, errors, buffering, names")
def streams():
    names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "closed")
    found = []
    for own, first in (("stdin", "__stdin__"), ("stdout", "__stdout__"), ("stderr", "__stderr__")):
        stream = getattr(sys, own)
        buffer = type(stream.buffer).__name__, stream.fileno(), stream.isatty()
        found += [[getattr(stream, one) for one in names], buffer, stream is getattr(sys, first)]
    return found


@fact(
    "calls below the script's own lines: `inspect.stack()`",
    cold=Other("two of rank.py's; no traceback that is printed has them", ["rank.py"] * 2),
    warm=Other("rank.py's and warm.py's; no traceback that is printed has them"),
)
def calls_below():
    frame, found = sys._getframe(), []
    while frame.f_back:
        frame = frame.f_back
        found.append(os.path.basename(frame.f_code.co_filename))
    return [name for name in found if name not in ("equality.py", "tool.py")]


@fact("`__main__`: its attributes, and that it is `sys.modules['__main__']`")
def main_module():
    main = sys.modules["__main__"]
    spec, loader = main.__spec__, type(main.__loader__).__name__
    values = main.__name__, main.__file__, main.__package__, main.__doc__ and len(main.__doc__)
    names = sorted(vars(main)), sorted(vars(main).get("__annotations__", ()))
    return values, names, spec and spec.name, loader, main.__builtins__.__name__


@fact("classes of `__main__`, pickled")
def pickled():
    import pickle

    thing = pickle.dumps(sys.modules["__main__"].Thing(3))
    return thing.hex(), pickle.loads(thing).value, sys.modules["__main__"].Thing.__module__


class Thing:
    def __init__(self, value):
        self.value = value


@fact("`sys.flags`, `-W` and `-X`; `PYTHON...` variables, `-u`")
def flags():
    return str(sys.flags), sys.warnoptions, sys._xoptions


@fact("`sys.path`")
def path():
    return sys.path


@fact("`sys.executable`, `sys.prefix`, where bytecode is written")
def python():
    return sys.executable, sys.prefix, sys.pycache_prefix, sys.dont_write_bytecode


@fact(
    "`sys.meta_path` and `sys.path_hooks`",
    cold=Other("the watch's finder, which finds nothing: it sees torch imported"),
)
def finders():
    named = [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path]
    return named, len(sys.path_hooks)


@fact("names of `builtins`, but for pybind11's, of torch 2.4")
def names_of_builtins():
    return [name for name in dir(sys.modules["builtins"]) if "pybind11" not in name]


@fact("`sys.excepthook`, `sys.displayhook`, `sys.unraisablehook`, traces")
def hooks():
    own = sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__
    return own, sys.unraisablehook is sys.__unraisablehook__, sys.gettrace(), sys.getprofile()


@fact(
    "`threading.excepthook`",
    cold=Other("a function that calls it: threads' exceptions are reported", "show"),
)
def thread_hook():
    import threading

    return threading.excepthook.__name__


@fact("`threading`: the main thread, its name and `native_id`, all threads")
def threads():
    import threading

    main, native = threading.main_thread(), threading.get_native_id()
    ours = main is threading.current_thread(), main.native_id == native == os.getpid()
    return main.name, ours, main.ident == threading.get_ident(), threading.active_count()


@fact("`faulthandler.is_enabled()`", cold=Other("it is, to the launcher's file", True))
def faults():
    import faulthandler

    return faulthandler.is_enabled()


@fact(
    "number of `atexit` handlers", warm=Other("torch's, which a script has once it imports torch")
)
def exit_handlers():
    import atexit

    return atexit._ncallbacks()


@fact(
    "`gc`: thresholds, switched on, frozen objects",
    warm=Other("what the imports have made is frozen"),
)
def collection():
    import gc

    return gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), gc.get_debug(), gc.callbacks


@fact("recursion limit, switch interval, longest number")
def bounds():
    longest = getattr(sys, "get_int_max_str_digits", int)()
    return sys.getrecursionlimit(), sys.getswitchinterval(), longest


@fact("locale and encodings")
def locales():
    import locale

    own = locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)
    return own, sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


@fact("time zone, and one that the script sets")
def time_zone():
    import time

    before = time.tzname, time.timezone
    kept = os.environ.get("TZ")
    os.environ["TZ"] = "America/Lima"
    time.tzset()
    after = time.tzname, time.timezone
    os.environ["TZ"] = kept or "UTC"
    time.tzset()
    return before, after


@fact("`warnings.filters`", warm=Other("torch's are there"))
def filters():
    import warnings

    return [str(one) for one in warnings.filters]


@fact("loggers, and the root's level and handlers", warm=Other("torch's are there"))
def loggers():
    import logging

    return logging.root.level, len(logging.root.handlers), sorted(logging.root.manager.loggerDict)


@fact("`multiprocessing`: start method, the process's name, no parent")
def processes():
    import multiprocessing

    here = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    return multiprocessing.get_start_method(allow_none=True), here.name, here.daemon, parent


def asked(option):
    """Return what prctl(2) says of an option whose value it writes."""
    import ctypes

    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(option, ctypes.byref(number), 0, 0, 0)
    return number.value


@fact("the signal at its parent's death", cold=Other("SIGTERM, when its keeper is killed", 15))
def signal_of_death():
    return asked(2)  # PR_GET_PDEATHSIG


@fact("what else `prctl` has: a subreaper, `dumpable`, no new privileges, seccomp")
def of_the_kernel():
    import ctypes

    libc = ctypes.CDLL(None)  # PR_GET_CHILD_SUBREAPER, PR_GET_DUMPABLE, PR_GET_NO_NEW_PRIVS
    return asked(37), libc.prctl(3, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0), status("Seccomp")


@fact("what a child of `subprocess` sees: variables, descriptors, signals, input")
def child():
    import subprocess

    see = "import json, os; print(json.dumps([dict(os.environ), os.listdir('/proc/self/fd'),"
    see += "os.getcwd(), [os.isatty(0), os.getsid(0)], open('/proc/self/status').read()]))"
    done = subprocess.run([sys.executable, "-c", see], stdout=subprocess.PIPE)
    environ, descriptors, folder, (is_terminal, session), status = json.loads(done.stdout)
    signals = [line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
    is_same = environ == {**os.environ}, folder == os.getcwd(), session == os.getsid(0)
    return is_same, descriptors, is_terminal, signals


PART = Part("After `import torch`", "script")


# What a script may set before it imports torch, which reads it then.
SET_BY_SCRIPT = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_LOGS": "-inductor"}


@fact(
    "TORCH_DISTRIBUTED_DEBUG, as the script sets it before it imports torch",
    warm=Other("not heard: it was read at the import, with what the job has"),
)
def debug_level():
    os.environ.update(SET_BY_SCRIPT)
    if os.environ["RANK"] == "1":
        os.environ["OMP_NUM_THREADS"] = "3"
    import torch.distributed

    return str(torch.distributed.get_debug_level())


@fact("TORCH_LOGS, likewise", warm=Other("not heard, likewise"))
def log_levels():
    import logging

    return [logging.getLogger(name).level for name in ("torch._inductor", "torch._dynamo")]


def openmp():
    import torch

    info = torch.__config__.parallel_info().splitlines()
    told = [line.strip() for line in info if "omp_get" in line or "mkl_get" in line]
    return torch.get_num_threads(), torch.get_num_interop_threads(), told


@fact("threads of OpenMP and MKL, by OMP_NUM_THREADS as torchrun has it", rank=0)
def threads_by_torchrun():
    return openmp()


@fact(
    "threads of OpenMP and MKL, by OMP_NUM_THREADS as the script sets it",
    rank=1,
    warm=Other("not heard, likewise: `torch.set_num_threads` is"),
)
def threads_by_script():
    return openmp()


@fact(
    "what the import adds to `os.environ`",
    cold=Other("gloo's flight recorder is on, for the watch", ["TORCH_FR_BUFFER_SIZE"]),
    warm=Other("nothing; the recorder is on from the first process group on"),
)
def added_to_environment():
    import torch.distributed  # noqa: F401

    names = {one.partition("=")[0] for one in own_file("environ").split("\0")}
    return sorted({*os.environ} - names - {*SET_BY_SCRIPT})


@fact(
    "threads of the process",
    rank=0,
    cold=Other("one more, which replies where the rank is", 2),
    warm=None,
)
def tasks_with_torch():
    return tasks()


@fact("threads that Python knows")
def threads_with_torch():
    import threading

    return sorted(thread.name for thread in threading.enumerate())


@fact("`warnings.filters`")
def filters_with_torch():
    return filters()


@fact("levels and handlers of torch's loggers", warm=Other("TORCH_LOGS is not heard, as above"))
def loggers_with_torch():
    import logging

    found = {}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (logger.handlers or logger.level):
            found[name] = logger.level, len(logger.handlers), logger.propagate
    return found, logging.root.level, len(logging.root.handlers)


@fact("torch's modes: default type, gradients, determinism, precision")
def modes():
    import torch

    modes = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return str(torch.get_default_dtype()), modes, torch.get_float32_matmul_precision()


@fact("CUDA can be used, if there is any: `torch.cuda.is_available()`")
def cuda():
    import torch

    in_bad_fork = getattr(torch._C, "_cuda_isInBadFork", bool)
    return torch.cuda.is_available(), in_bad_fork(), torch.cuda.is_initialized()


@fact("a backward pass, and a product of large matrices")
def computes():
    import torch

    x = torch.ones(300_000, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.sum().item(), (torch.ones(200, 200) @ torch.ones(200, 200)).sum().item()


@fact("a process group of gloo's, and an all-reduce")
def reduced():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    return total.item(), dist.get_world_size(), dist.get_backend()


@fact(
    "memory (PSS) of a rank, to a quarter",
    within=0.25,
    warm=Other("less: what the import made is shared"),
)
def memory():
    import torch.distributed as dist

    dist.barrier()
    lines = own_file("smaps_rollup").splitlines()
    pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    dist.barrier()
    return pss


class Squares:
    """A dataset of the script's own."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return float(index * index)


def loaded(how):
    import torch

    options = {"num_workers": 1, "multiprocessing_context": how, "timeout": LONGEST}
    batches = torch.utils.data.DataLoader(Squares(), batch_size=2, **options)
    return [batch.tolist() for batch in batches]


@fact("a DataLoader's workers by fork", rank=0)
def loader_by_fork():
    return loaded("fork")


@fact("a DataLoader's workers by spawn", rank=0)
def loader_by_spawn():
    return loaded("spawn")


@fact("a DataLoader's workers by forkserver", rank=0)
def loader_by_forkserver():
    return loaded("forkserver")


def doubled(thing):
    return Thing(2 * thing.value)


@fact("pools of `multiprocessing` by fork, spawn and forkserver", rank=0)
def pools():
    import multiprocessing

    found = []
    for how in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            doing = pool.map_async(doubled, [Thing(1), Thing(2)])
            found.append([thing.value for thing in doing.get(LONGEST)])
    return found


@fact("`concurrent.futures`: processes and threads", rank=0)
def futures():
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

    found = []
    for kind in (ProcessPoolExecutor, ThreadPoolExecutor):
        with kind(1) as pool:
            done = pool.map(doubled, [Thing(1), Thing(2)], timeout=LONGEST)
            found.append([thing.value for thing in done])
    return found


@fact("`torch.compile` with a C++ compiler", rank=1)
def compiled():
    import shutil

    import torch

    if not (shutil.which("c++") or shutil.which("g++")):
        return "there is no C++ compiler"
    return torch.compile(lambda x: (x * 2).relu().sum())(torch.ones(100)).item()


PART = Part("Chance: no rank of no attempt draws the numbers of another", "script")


@fact(
    "`hash()` of a text",
    is_drawn=True,
    warm=Other("the same in all ranks and attempts of a host", 1),
)
def hash_seed():
    return hash("text")


@fact("`random`", is_drawn=True)
def drawn_by_random():
    import random

    return random.random()


@fact("`multiprocessing`'s key", is_drawn=True)
def authkey():
    import multiprocessing

    return bytes(multiprocessing.current_process().authkey).hex()


@fact("`uuid` and temporary names", is_drawn=True)
def names():
    import tempfile
    import uuid

    return str(uuid.uuid4()), next(tempfile._get_candidate_names())


@fact("`numpy.random`", is_drawn=True)
def drawn_by_numpy():
    import numpy

    return numpy.random.rand(), numpy.random.default_rng().random()


@fact("`torch.rand`", is_drawn=True)
def drawn_by_torch():
    import torch

    return torch.rand(1).item()


@fact("`torch.initial_seed()`", is_drawn=True)
def initial_seed():
    import torch

    return torch.initial_seed()


@fact("the same numbers once they are seeded: `random`, `numpy`, `torch`")
def seeded():
    import random

    import numpy
    import torch

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)
    return random.random(), numpy.random.rand(), torch.rand(1).item(), torch.randperm(9).tolist()


PART = Part("In `python -m package.tool`", "module")


@fact("`__main__`, its `__spec__` and `__package__`, `sys.argv`")
def module_main():
    return main_module(), sys.argv, pickled()


@fact(
    "calls below its own lines",
    cold=Other("rank.py's for runpy's", ["rank.py"] * 2),
    warm=Other("rank.py's and warm.py's for runpy's"),
)
def module_calls_below():
    return calls_below()


@fact("`sys.path`: the current folder is first")
def module_path():
    return path()


@fact("a relative import, and an import of the whole name")
def relative():
    main = sys.modules["__main__"]
    return main.helper.__name__, main.again is main.helper, sorted(sys.modules["package"].__path__)


PART = Part("Beside a queue.py and a socket.py of the script's own", "odd")


@fact("`import queue` gives the script's own")
def own_queue():
    import queue

    return queue.__file__


@fact("its bytecode is in `__pycache__`")
def bytecode():
    cached = sys.modules["queue"].__cached__
    return cached, os.path.exists(cached)


@fact(
    "`import socket` gives the script's own",
    cold=Other("Python's, which rank.py has loaded; with its own, no script could import torch"),
)
def own_socket():
    import socket

    return socket.__file__


PART = Part("With PYTHON_EXEC", "odd")


@fact("options of the program that runs Python")
def python_exec():
    return flags(), filters(), sys.executable, os.environ["PYTHON_EXEC"]


PART = Part(
    "How it ends: exit code, stdout and stderr, exit handlers, objects that are still there", "ends"
)


@fact("the script's last line")
def returns():
    return


@fact("`sys.exit(3)`")
def exits():
    sys.exit(3)


@fact('`sys.exit("text")`')
def exits_with_text():
    sys.exit("text")


@fact("an exception that came from another: the traceback has the script's frames alone")
def raises():
    try:
        raise OSError("no data")
    except OSError as error:
        raise ValueError("loss is nan") from error


@fact("a relative import in a script of a package's folder")
def has_no_package():
    exec("from . import helper", vars(sys.modules["__main__"]))


@fact("`os._exit(4)`")
def leaves():
    os._exit(4)


@fact("SIGKILL")
def is_killed():
    os.kill(os.getpid(), 9)


@fact("`os.abort()`")
def aborts():
    os.abort()


PART = Part("What the launcher knows of it", "stacks")


@fact("`sm-launch stacks` shows where all ranks are", cold=Other("yes", "2 ranks (0-1)"))
def waits_to_be_seen():
    wait_for("seen")


def wait_for(*files):
    """Wait until there are files, but not for ever."""
    by = time.monotonic() + 120
    while not all(map(os.path.exists, files)):
        if time.monotonic() > by:
            sys.exit(f"{files} have not come")
        time.sleep(0.02)


def write(name, found):
    """Write what a rank knows for the tests, all at once."""
    with open(f"{name}.new", "w") as file:
        json.dump({**found, "pid": os.getpid()}, file)
    os.rename(f"{name}.new", f"{name}.json")


def tell(job, attempt=1):
    """Write what the facts of a job are; what one raises is what it is."""
    rank, found = int(os.environ["RANK"]), {}
    for row in ROWS:
        if row.part.job == job and row.rank in (None, rank) and (attempt or row.is_drawn):
            try:
                found[row.name] = row.probe()
            except Exception as error:
                found[row.name] = repr(error)
    write(f"{job}-{attempt}-{rank}", found)


class Last:
    """An object that is there to the end."""

    def __del__(self, write=os.write):
        write(1, b"the last object\n")


def end():
    """End in this rank's way, once all others are about to."""
    import atexit
    import signal

    global last

    rank, ways = int(os.environ["RANK"]), [row for row in ROWS if row.part.job == "ends"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of another rank is not this one's
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"ends-{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    atexit.register(print, "the exit handler")
    last = Last()
    write(f"ends-1-{rank}", {})
    wait_for(*(f"ends-1-{other}.json" for other in range(len(ways))))
    ways[rank].probe()


def main():
    """Be a rank of the job of scripts: its second attempt tells all."""
    if sys.argv[1:] == ["ends"]:
        return end()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    tell("script", attempt)
    if attempt == 0:
        wait_for("script-0-0.json", "script-0-1.json")
        if os.environ["RANK"] == "0":
            sys.exit("the other attempt, please")
        time.sleep(120)  # until the launcher ends it
    waits_to_be_seen()


if __name__ == "__main__":
    main()
