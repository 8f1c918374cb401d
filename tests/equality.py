"""What docs/development/equality.md says of a rank, looked up in it; test_equality.py compares.

The page's rows have expressions, of which each rank reports the value: of names that are here.
"""
# ruff: noqa: E402, F401

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
from typing import Any

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


def command_line():
    return short(own_file("cmdline").split("\0"))


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


def of_job(name):
    """Return the rows of a job, by their words: an expression, and what else the row has of it."""
    with open("facts.json") as file:
        return json.load(file)[name]


def value(code):
    """Return an expression's value; its frame is one of this file's."""
    return eval(compile(code, __file__, "eval"), globals())


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
    for name, (code, how, number) in of_job(job).items():
        if (how != "rank" or number == rank) and (attempt or how == "drawn"):
            try:
                found[name] = value(code)
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
    value(ways[rank][0])


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
