"""What a rank is, fact by fact, and how it differs from a plain torchrun one: docs' equality.md.

Each row of FACTS is a row of that page, with a probe: a rank calls it and reports what it returns.
Where a start of the launcher's is not equal, the row says how. tests/test_equality.py runs this
file in ranks and compares; docs/tables.py prints the rows.
"""
# ruff: noqa: E402

from __future__ import annotations

import sys

LOADED = sorted(sys.modules)  # before this file imports anything

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import locale
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
import warnings
from typing import Any, Callable, NamedTuple

STARTS = ("cold", "warm")  # values of --launcher-start: the page has a column for each
LONGEST = 60  # s that workers may take
ARGUMENTS = ("--epochs", "1", "", "a b", "--", "--help", "-m")
# What differs between two jobs of plain torchrun's, too.
OF_ONE_JOB = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
# What a script may set before it imports torch, which reads it then.
SET_BY_SCRIPT = {"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_LOGS": "-inductor"}


class Later:
    """A module that is imported where a probe first uses it.

    torch is to come late, and multiprocessing not beside a socket.py of the script's own.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


torch, dist, numpy = Later("torch"), Later("torch.distributed"), Later("numpy")
multiprocessing = Later("multiprocessing")


class Part(NamedTuple):
    """Rows of one job; `job` is the name of what test_equality.py runs."""

    title: str
    job: str


class Other(NamedTuple):
    """How a rank differs, in the page's words, and what the fact is then: by default whatever."""

    words: str
    value: Any = ...


EQUAL, AS_COLD = Other("equal"), Other("as after a cold start")


class Fact(NamedTuple):
    """A row: its words, the probe, and how ranks of each start differ.

    is_drawn: what counts is how many of its values differ, over two ranks and two attempts.
    within: numbers that differ by no more than this share are equal. rank: the only one to have it,
    as it takes long.
    """

    words: str
    probe: Callable[[], Any]
    cold: Other = EQUAL
    warm: Other = AS_COLD
    is_drawn: bool = False
    within: float = 0.0
    rank: int | None = None

    def after(self, start: str) -> Other:
        """Return how a rank differs after one of STARTS."""
        return self.cold if start == "cold" or self.warm is AS_COLD else self.warm


def own_file(name):
    with open(f"/proc/self/{name}", errors="surrogateescape") as file:
        return file.read()


def status(field):
    lines = own_file("status").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(field + ":"))


def signals(field):
    mask = int(status(field), 16)
    return [number for number in range(1, 65) if mask >> (number - 1) & 1]


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


def tasks():
    return len(os.listdir("/proc/self/task"))


def handlers():
    own = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    timers = signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL)
    return signals("SigIgn"), signals("SigBlk"), own, timers


def session():
    own = own_file("comm").replace("pt_main_thread", "python3"), os.readlink("/proc/self/exe")
    terminal = own_file("stat").rpartition(")")[2].split()[4]
    return own, os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), terminal


def values():
    ours = (*OF_ONE_JOB, "LAUNCHER_JOB_MARK", "TORCHELASTIC_USE_AGENT_STORE")
    ours += ("TORCH_FR_BUFFER_SIZE",)
    return {name: text for name, text in os.environ.items() if name not in ours}


def names_of_start():
    """Return the names of the variables that the process was started with."""
    return {one.partition("=")[0] for one in own_file("environ").split("\0") if one}


def inherited():
    mask = os.umask(0o77)
    os.umask(mask)
    lines = [line for line in own_file("limits").splitlines() if "open files" not in line]
    mine = lines, os.getpriority(os.PRIO_PROCESS, 0), own_file("oom_score_adj")
    user = os.getresuid(), os.getresgid(), sorted(os.getgroups()), status("CapEff")
    return os.getcwd(), mask, mine, sorted(os.sched_getaffinity(0)), user


def parent():
    ours = "torch.distributed.run", "stub.py", "warm.py"
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        return [one for one in short(file.read().split("\0")) if one in ours]


def is_open_as(*numbers):
    found = [(*os.fstat(number)[:3], fcntl.fcntl(number, fcntl.F_GETFL)) for number in numbers]
    return found, [os.isatty(number) for number in numbers]


def streams():
    names = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "closed")
    found = []
    for own in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, own)
        buffer = type(stream.buffer).__name__, stream.fileno(), stream.isatty()
        is_first = stream is getattr(sys, f"__{own}__")
        found += [[getattr(stream, one) for one in names], buffer, is_first]
    return found


def calls_below():
    frame, found = sys._getframe(), []
    while frame.f_back:
        frame = frame.f_back
        found.append(os.path.basename(frame.f_code.co_filename))
    return [name for name in found if name not in ("equality.py", "tool.py")]


def main_module():
    main = sys.modules["__main__"]
    spec, loader = main.__spec__, type(main.__loader__).__name__
    values = main.__name__, main.__file__, main.__package__, main.__doc__ and len(main.__doc__)
    names = sorted(vars(main)), sorted(vars(main).get("__annotations__", ()))
    thing = pickle.dumps(main.Thing(3))
    pickled = thing.hex(), pickle.loads(thing).value, main.Thing.__module__
    return values, names, spec and spec.name, loader, main.__builtins__.__name__, pickled


class Thing:
    def __init__(self, value):
        self.value = value


def python():
    options = str(sys.flags), sys.warnoptions, sys._xoptions, sys.pycache_prefix
    return options, sys.executable, sys.prefix, sys.dont_write_bytecode, sys.path


def finders():
    named = [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path]
    return named, len(sys.path_hooks)


def interpreter():
    hooks = sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__
    hooks += sys.unraisablehook is sys.__unraisablehook__, sys.gettrace(), sys.getprofile()
    longest = getattr(sys, "get_int_max_str_digits", int)()
    names = [one for one in dir(sys.modules["builtins"]) if "pybind11" not in one]
    return hooks, sys.getrecursionlimit(), sys.getswitchinterval(), longest, names


def places():
    own = locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)
    own += sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), time.tzname, time.timezone
    before = os.environ.get("TZ", "UTC")
    os.environ["TZ"] = "America/Lima"
    time.tzset()
    after = time.tzname, time.timezone
    os.environ["TZ"] = before
    time.tzset()
    return own, after


def threads():
    main, native = threading.main_thread(), threading.get_native_id()
    ours = main is threading.current_thread(), main.native_id == native == os.getpid()
    own = main.name, ours, main.ident == threading.get_ident(), threading.active_count()
    here, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    return own, multiprocessing.get_start_method(allow_none=True), here.name, here.daemon, parent


def filters():
    return [str(one) for one in warnings.filters]


def asked(option):
    """Return what prctl(2) says of an option whose value it writes."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(option, ctypes.byref(number), 0, 0, 0)
    return number.value


def of_the_kernel():
    libc = ctypes.CDLL(None)  # PR_GET_CHILD_SUBREAPER, PR_GET_DUMPABLE, PR_GET_NO_NEW_PRIVS
    return asked(37), libc.prctl(3, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0), status("Seccomp")


def child():
    see = "import json, os; print(json.dumps([dict(os.environ), os.listdir('/proc/self/fd'),"
    see += "os.getcwd(), [os.isatty(0), os.getsid(0)], open('/proc/self/status').read()]))"
    done = subprocess.run([sys.executable, "-c", see], stdout=subprocess.PIPE)
    environ, descriptors, folder, (is_terminal, session), status = json.loads(done.stdout)
    signals = [line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
    is_same = environ == {**os.environ}, folder == os.getcwd(), session == os.getsid(0)
    return is_same, descriptors, is_terminal, signals


def debug_level():
    os.environ.update(SET_BY_SCRIPT)
    if os.environ["RANK"] == "1":
        os.environ["OMP_NUM_THREADS"] = "3"
    return str(dist.get_debug_level())


def openmp():
    info = torch.__config__.parallel_info().splitlines()
    told = [line.strip() for line in info if "omp_get" in line or "mkl_get" in line]
    return torch.get_num_threads(), torch.get_num_interop_threads(), told


def levels():
    found = {}
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and (logger.handlers or logger.level):
            found[name] = logger.level, len(logger.handlers), logger.propagate
    return found, logging.root.level, len(logging.root.handlers)


def modes():
    modes = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    cuda = torch.cuda.is_available(), getattr(torch._C, "_cuda_isInBadFork", bool)()
    cuda += (torch.cuda.is_initialized(),)
    return str(torch.get_default_dtype()), modes, torch.get_float32_matmul_precision(), cuda


def computes():
    x = torch.ones(300_000, requires_grad=True)
    (x * x).sum().backward()
    product = (torch.ones(200, 200) @ torch.ones(200, 200)).sum().item()
    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    return x.grad.sum().item(), product, total.item(), dist.get_world_size(), dist.get_backend()


def memory():
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


def doubled(thing):
    return Thing(2 * thing.value)


def workers(how):
    """Return what a DataLoader's and a pool's workers make, which start so."""
    options = {"num_workers": 1, "multiprocessing_context": how, "timeout": LONGEST}
    batches = [*torch.utils.data.DataLoader(Squares(), batch_size=2, **options)]
    with multiprocessing.get_context(how).Pool(1) as pool:
        done = pool.map_async(doubled, [Thing(1), Thing(2)]).get(LONGEST)
    return [batch.tolist() for batch in batches], [thing.value for thing in done]


def compiled():
    if not (shutil.which("c++") or shutil.which("g++")):
        return "there is no C++ compiler"
    return torch.compile(lambda x: (x * 2).relu().sum())(torch.ones(100)).item()


def drawn():
    names = str(uuid.uuid4()), next(tempfile._get_candidate_names())
    key = bytes(multiprocessing.current_process().authkey).hex()
    of_numpy = numpy.random.rand(), numpy.random.default_rng().random()
    of_torch = torch.rand(1).item(), torch.initial_seed()
    return [random.random(), *of_numpy, *of_torch, *names, key]


def seeded():
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)
    return random.random(), numpy.random.rand(), torch.rand(1).item(), torch.randperm(9).tolist()


def relative():
    main = sys.modules["__main__"]
    return main.helper.__name__, main.again is main.helper, sorted(sys.modules["package"].__path__)


def own_queue():
    queue = importlib.import_module("queue")
    return queue.__file__, queue.__cached__, os.path.exists(queue.__cached__)


def raises():
    try:
        raise OSError("no data")
    except OSError as error:
        raise ValueError("loss is nan") from error


def waits_to_be_seen():
    wait_for("seen")


RANK_PY = Other("rank.py stands before the script, which it runs")
KEEPER = "the rank's keeper, a process between torchrun and the script"
FACTS = {
    Part("At the script's first line", "script"): [
        Fact(
            "`torch` is not imported yet",
            lambda: "torch" in LOADED,
            warm=Other("it is, and what it imports"),
        ),
        Fact(
            "`sys.modules`",
            lambda: LOADED,
            Other("more of the standard library, which the launcher's lines need"),
        ),
        Fact(
            "number of threads",
            tasks,
            warm=Other("one more, which replies where the rank is", 2),
        ),
        Fact(
            "descriptors that children inherit, but for 0 to 2",
            lambda: [one for one in descriptors() if os.get_inheritable(one)],
        ),
        Fact(
            "other descriptors",
            lambda: sorted(os.path.basename(one).split("-")[0] for one in descriptors().values()),
            Other("the connection to the launcher, and the file for a crash's place"),
        ),
        Fact(
            "signals that are ignored and blocked, `signal.getsignal` of each, the wakeup"
            " descriptor, timers",
            handlers,
        ),
        Fact(
            "signals that are caught",
            lambda: signals("SigCgt"),
            Other("those of a crash, too: faulthandler notes its place", [2, 4, 6, 7, 8, 11]),
            Other("likewise, and SIGRTMAX-3, at which it notes where a rank is; one of threads"),
        ),
        Fact("`sys.argv`", lambda: sys.argv),
        Fact(
            "`sys.orig_argv` (Python 3.10)", lambda: short(getattr(sys, "orig_argv", ())), RANK_PY
        ),
        Fact(
            "`/proc/PID/cmdline`",
            lambda: short(own_file("cmdline").split("\0")),
            RANK_PY,
            Other("those of the process that forks it: warm.py"),
        ),
        Fact(
            "leads its session and its process group, has no terminal; its program, and its name"
            " but for `pt_main_thread`, as importing torch 2.4 names it",
            session,
        ),
        Fact(
            "`os.environ`",
            lambda: sorted(os.environ),
            Other(
                "`LAUNCHER_JOB_MARK`, by which a launcher that the script starts knows of this one"
            ),
            Other("likewise, and `TORCH_FR_BUFFER_SIZE`: gloo's flight recorder is on"),
        ),
        Fact(
            "values of the variables that both have, but for the job's id and port, and"
            " TORCHELASTIC_USE_AGENT_STORE: True from the first restart on, with torch 2.4 False"
            " otherwise",
            values,
        ),
        Fact(
            "`/proc/PID/environ` is `os.environ`",
            lambda: sorted({name.split("_")[0] for name in names_of_start() ^ set(os.environ)}),
            Other("and where the launcher is: `LAUNCHER_...`", ["LAUNCHER"]),
            Other("that of the process that forks it"),
        ),
        Fact(
            "current folder, umask, limits but that of open files, priority, cores, the kernel's"
            " out-of-memory score, user, groups and capabilities",
            inherited,
        ),
        Fact(
            "how many files it may have open",
            lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
            Other("the soft limit is the hard one, at most 65,536, if it was lower", [700, 700]),
        ),
        Fact("parent", parent, Other(KEEPER, ["stub.py"]), Other(KEEPER, ["warm.py"])),
        Fact(
            "0 is the same open file; so are 1 and 2 where they are a terminal",
            lambda: is_open_as(0),
        ),
        Fact(
            "1 and 2 elsewhere: a pipe, a file",
            lambda: is_open_as(1, 2),
            Other("pipes of the rank's keeper, which writes whole lines to these"),
        ),
        Fact(
            "`sys.stdin`, `sys.stdout`, `sys.stderr`: encoding, errors, buffering, names", streams
        ),
        Fact(
            "calls below the script's own lines: `inspect.stack()`",
            calls_below,
            Other("three of rank.py's; no traceback that is printed has them", ["rank.py"] * 3),
            Other("rank.py's and warm.py's; no traceback that is printed has them"),
        ),
        Fact(
            "`__main__`: its attributes, that it is `sys.modules['__main__']`, how its classes are"
            " pickled",
            main_module,
        ),
        Fact(
            "`sys.flags`, `-W`, `-X` and `-u`, `PYTHON...` variables, `sys.path`,"
            " `sys.executable`, `sys.prefix`, where bytecode is written",
            python,
        ),
        Fact(
            "`sys.meta_path` and `sys.path_hooks`",
            finders,
            Other("the watch's finder, which finds nothing: it sees torch imported"),
        ),
        Fact(
            "`sys.excepthook`, `sys.displayhook`, `sys.unraisablehook`, traces, recursion limit,"
            " switch interval, longest number; names of `builtins`, but for pybind11's, of torch"
            " 2.4",
            interpreter,
        ),
        Fact(
            "`threading.excepthook`",
            lambda: threading.excepthook.__name__,
            Other("a function that calls it: threads' exceptions are reported", "show"),
        ),
        Fact(
            "`threading`: the main thread, its name and `native_id`, all threads;"
            " `multiprocessing`: start method, the process's name, no parent",
            threads,
        ),
        Fact(
            "`faulthandler.is_enabled()`",
            faulthandler.is_enabled,
            Other("it is, to the launcher's file", True),
        ),
        Fact(
            "number of `atexit` handlers",
            atexit._ncallbacks,
            warm=Other("torch's, which a script has once it imports torch"),
        ),
        Fact(
            "`gc`: thresholds, switched on, frozen objects",
            lambda: (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), gc.callbacks),
            warm=Other("what the imports have made is frozen"),
        ),
        Fact("locale, encodings, time zone, also one that the script sets", places),
        Fact("`warnings.filters`", filters, warm=Other("torch's are there")),
        Fact(
            "loggers, and the root's level and handlers",
            lambda: (levels(), sorted(logging.root.manager.loggerDict)),
            warm=Other("torch's are there"),
        ),
        Fact(
            "the signal at its parent's death",
            lambda: asked(2),  # PR_GET_PDEATHSIG
            Other("SIGTERM, when its keeper is killed", 15),
        ),
        Fact(
            "what else `prctl` has: a subreaper, `dumpable`, no new privileges, seccomp",
            of_the_kernel,
        ),
        Fact("what a child of `subprocess` sees: variables, descriptors, signals, input", child),
    ],
    Part("After `import torch`", "script"): [
        Fact(
            "TORCH_DISTRIBUTED_DEBUG, as the script sets it before it imports torch",
            debug_level,
            warm=Other("not heard: it was read at the import, with what the job has"),
        ),
        Fact(
            "TORCH_LOGS, likewise",
            lambda: [logging.getLogger(f"torch.{one}").level for one in ("_inductor", "_dynamo")],
            warm=Other("not heard, likewise"),
        ),
        Fact("threads of OpenMP and MKL, by OMP_NUM_THREADS as torchrun has it", openmp, rank=0),
        Fact(
            "threads of OpenMP and MKL, by OMP_NUM_THREADS as the script sets it",
            openmp,
            rank=1,
            warm=Other("not heard, likewise: `torch.set_num_threads` is"),
        ),
        Fact(
            "what the import adds to `os.environ`",
            lambda: sorted({*os.environ} - names_of_start() - {*SET_BY_SCRIPT}),
            Other("gloo's flight recorder is on, for the watch", ["TORCH_FR_BUFFER_SIZE"]),
            Other("nothing; the recorder is on from the start"),
        ),
        Fact(
            "number of threads",
            tasks,
            Other("one more, which replies where the rank is", 2),
            rank=0,
        ),
        Fact(
            "threads that Python knows; `warnings.filters`",
            lambda: (sorted(thread.name for thread in threading.enumerate()), filters()),
        ),
        Fact(
            "levels and handlers of torch's loggers",
            levels,
            warm=Other("TORCH_LOGS is not heard, as above"),
        ),
        Fact(
            "torch's modes: default type, gradients, determinism, precision; CUDA can be used, if"
            " there is any: `torch.cuda.is_available()`",
            modes,
        ),
        Fact(
            "a backward pass, a product of large matrices, a process group of gloo's and an"
            " all-reduce",
            computes,
        ),
        Fact(
            "memory (PSS) of a rank, to a quarter",
            memory,
            within=0.25,
            warm=Other("less: what the import made is shared"),
        ),
        Fact(
            "workers of a DataLoader, and of pools of `multiprocessing`, by fork, spawn and"
            " forkserver",
            lambda: [*map(workers, ("fork", "spawn", "forkserver"))],
            rank=0,
        ),
        Fact("`torch.compile` with a C++ compiler", compiled, rank=1),
    ],
    Part("Chance: no rank of no attempt draws the numbers of another", "script"): [
        Fact(
            "`hash()` of a text",
            lambda: [hash("text")],
            is_drawn=True,
            warm=Other("the same in all ranks and attempts of a host", [1]),
        ),
        Fact(
            "`random`, `numpy.random`, `torch.rand`, `torch.initial_seed()`, `uuid`, temporary"
            " names, `multiprocessing`'s key",
            drawn,
            is_drawn=True,
        ),
        Fact("the same numbers once they are seeded: `random`, `numpy`, `torch`", seeded),
    ],
    Part("In `python -m package.tool`", "module"): [
        Fact(
            "`__main__`, its `__spec__` and `__package__`, `sys.argv`, how its classes are pickled",
            lambda: (main_module(), sys.argv),
        ),
        Fact(
            "calls below its own lines",
            calls_below,
            Other("rank.py's below runpy's"),
            Other("rank.py's and warm.py's below runpy's"),
        ),
        Fact("`sys.path`: the current folder is first", lambda: sys.path),
        Fact("a relative import, and an import of the whole name", relative),
    ],
    Part("Beside a queue.py and a socket.py of the script's own, with PYTHON_EXEC", "odd"): [
        Fact(
            "`import queue` gives the script's own, with its bytecode in `__pycache__`", own_queue
        ),
        Fact(
            "`import socket` gives the script's own",
            lambda: importlib.import_module("socket").__file__,
            Other("Python's, which rank.py has loaded; with its own, no script could import torch"),
        ),
        Fact(
            "options of the program that runs Python",
            lambda: (python(), filters(), os.environ["PYTHON_EXEC"]),
        ),
    ],
    Part(
        "How it ends: exit code, stdout and stderr, exit handlers, objects that are still there",
        "ends",
    ): [
        Fact("the script's last line", lambda: None),
        Fact("`sys.exit(3)`", lambda: sys.exit(3)),
        Fact('`sys.exit("text")`', lambda: sys.exit("text")),
        Fact(
            "an exception that came from another: the traceback has the script's frames alone",
            raises,
        ),
        Fact(
            "a relative import in a script of a package's folder",
            lambda: exec("from . import helper", vars(sys.modules["__main__"])),
        ),
        Fact("`os._exit(4)`", lambda: os._exit(4)),
        Fact("SIGKILL", lambda: os.kill(os.getpid(), 9)),
        Fact("`os.abort()`", os.abort),
    ],
    Part("What the launcher knows of it", "stacks"): [
        Fact(
            "`sm-launch stacks` shows where all ranks are",
            waits_to_be_seen,
            Other("yes", "2 ranks (0-1)"),
        )
    ],
}


def of_job(name):
    """Return the facts of a job, by their names."""
    parts = [part for part in FACTS if part.job == name]
    return {f"{part.title}: {fact.words}": fact for part in parts for fact in FACTS[part]}


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
    for name, fact in of_job(job).items():
        if fact.rank in (None, rank) and (attempt or fact.is_drawn):
            try:
                found[name] = fact.probe()
            except Exception as error:
                found[name] = repr(error)
    write(f"{job}-{attempt}-{rank}", found)


class Last:
    """An object that is there to the end."""

    def __del__(self, write=os.write):
        write(1, b"the last object\n")


def end():
    """End in this rank's way, once all others are about to."""
    global last

    rank, ways = int(os.environ["RANK"]), list(of_job("ends").values())
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
