"""A rank of the launcher's, beside one of plain torchrun's: the rows of the page equality.md.

Behind a row's words is an expression, of which equality.py reports the value in a rank. Where the
page does not say that a start is equal, it says how it differs, and maybe which value it has.

The first test runs all jobs. The reference is plain torchrun itself, with the arguments that the
launcher gives it; for what needs no torch, `python -u`, as torchrun starts its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import equality
import psutil
import pytest
from conftest import LAUNCHER, REPO, poll

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    # One process of `make test` runs the jobs, that of the tests with `sm-launch stacks`: it asks
    # all jobs on this machine (tests/test_hangs.py).
    pytest.mark.xdist_group("stacks"),
]

PAGE = REPO / "docs" / "development" / "equality.md"
PLAIN, STARTS = "plain", ("cold", "warm")  # values of --launcher-start: the page's columns
PART = re.compile(r"\*\*(.*)\*\* <!-- (\w+) -->")
ROW = re.compile(r"\| (.*?) <!-- (?:(drawn|within|rank) ?(\S*): )?(.*?) --> \| (.*) \| (.*) \|")


class Fact(NamedTuple):
    """A row: what ranks of a job report is the value of `code`; `cells` say how starts differ.

    how: of what is "drawn" counts how many values differ, over two ranks and two attempts; numbers
    "within" a share of each other are equal; one "rank" alone reports what takes long.
    """

    job: str
    code: str
    how: str
    number: float
    cells: tuple[str, ...]


def facts() -> dict[str, Fact]:
    """Return the page's rows, by the title and the words of each."""
    found, title, job = {}, "", ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if part := PART.fullmatch(line):
            title, job = part.groups()
        elif line.startswith("| ") and not line.startswith("| fact |"):
            row = ROW.fullmatch(line)
            assert row, f"a row without an expression: {line}"
            words, how, number, code, *cells = row.groups()
            found[f"{title}: {words}"] = Fact(job, code, how or "", float(number or 0), (*cells,))
    return found


FACTS = facts()
JOBS = {fact.job for fact in FACTS.values()}


def of_job(job: str) -> dict[str, Fact]:
    return {name: fact for name, fact in FACTS.items() if fact.job == job}


TORCHRUN = "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0"
TORCHRUN += " --local-addr=localhost --max-restarts=1 --rdzv-id=job"
OURS = "--launcher-nproc-per-node 2 --launcher-max-restarts 1"
# How a shell may start a job: all of this has to reach the ranks as torchrun passes it on.
SHELL = """
import os, resource, signal, sys
os.umask(0o27)
os.nice(1)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, for itself
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.execvp(sys.argv[1], sys.argv[1:])
"""
VARIABLES = {
    "OMP_NUM_THREADS": "1",  # else how many the launcher gives each rank is its own matter
    "TZ": "Asia/Kolkata",
    "PYTHONWARNINGS": "ignore::UserWarning",
    "PYTHONIOENCODING": "latin-1:backslashreplace",
    "PYTHONINTMAXSTRDIGITS": "5000",
    "PYTHONUTF8": "1",
    # torch.compile() in half the time: it does not try which instructions the CPU has, and compiles
    # no headers for later.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
THING = "\nclass Thing:\n    def __init__(self, value):\n        self.value = value\n"
TOOL = f"""from . import helper
from package import helper as again
import equality
{THING}
equality.tell("module")
"""
ODD = "import equality\nequality.tell('odd')\n"
WRAPPER = f'#!/bin/sh\nexec {sys.executable} -W error::FutureWarning -X dev "$@"\n'


class Jobs(contextlib.ExitStack):
    """Runs the jobs of one start after another, in folders of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._base = folder
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        temporary = self.enter_context(tempfile.TemporaryDirectory(prefix="test-"))
        self._environ = {**kept, **VARIABLES, "TMPDIR": temporary}
        # 0 to 2 of all jobs, the same for each: a terminal, a pipe that is read, a file.
        ends = *os.openpty(), os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for end in ends:
            self.callback(os.close, end)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        reader = self.enter_context(subprocess.Popen(["cat"], **pipes))
        self._files = {"stdin": ends[1], "stdout": reader.stdin, "stderr": ends[2]}

    def facts(self, start: str) -> dict[str, list[Any]]:
        """Return each fact's values, of all attempts and ranks that have it."""
        self._start, self._folder = start, self._base / start
        self._write_scripts()
        found: dict[str, list[Any]] = {}
        codes = [*self._script(found), *self._run("module", "package.tool", "x")]
        codes += self._run("script", "odd/script.py", PYTHON_EXEC=str(self._folder / "odd/python"))
        assert not any(codes), self._log()
        self._ends(found)
        for path in sorted(self._folder.glob("*-[01]-[0-9].json")):
            text = path.read_text().replace(str(self._folder), "FOLDER")
            for name, value in json.loads(text).items():
                found.setdefault(name, []).append(value)
        return found

    def _write_scripts(self) -> None:
        rows = {job: {name: fact[1:4] for name, fact in of_job(job).items()} for job in JOBS}
        package, odd = self._folder / "package", self._folder / "odd"
        for folder in (package, odd):
            folder.mkdir(parents=True)
            shutil.copy(equality.__file__, folder.parent)
        shutil.copy(equality.__file__, odd)
        shutil.copy(equality.__file__, package / "script.py")
        (self._folder / "facts.json").write_text(json.dumps(rows))
        (package / "__init__.py").touch()
        (package / "helper.py").touch()
        (package / "tool.py").write_text(TOOL)
        (odd / "script.py").write_text(ODD)
        (odd / "socket.py").touch()
        (odd / "queue.py").touch()
        (odd / "python").write_text(WRAPPER)
        (odd / "python").chmod(0o755)

    def _log(self) -> str:
        return (self._base / "log").read_text(errors="replace")[-8000:]

    def _begin(self, *words: str, **environ: str) -> psutil.Popen:
        command = [sys.executable, "-c", SHELL, *words]
        environ = {**self._environ, **environ}
        process = psutil.Popen(command, cwd=self._folder, env=environ, **self._files)
        self.callback(self._end, process)
        return process

    def _end(self, process: psutil.Popen) -> None:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()

    def _run(self, *words: str, count: int = 2, **environ: str) -> list[int]:
        """Run ranks of `script` PATH or `module` NAME; return all exit codes, or the job's."""
        kind, *target = words
        if self._start == PLAIN:
            words = (environ.get("PYTHON_EXEC", sys.executable), "-u")
            words += ("-m", *target) if kind == "module" else tuple(target)
            of_ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        else:
            options = ("--launcher-verbose", "--launcher-nproc-per-node", str(count))
            words = (*LAUNCHER, "--launcher-start", self._start, *options, f"--train-{kind}")
            words, of_ranks = (*words, *target), [{}]
        begun = [self._begin(*words, **environ, **one) for one in of_ranks]
        return [process.wait(100) for process in begun]

    def _script(self, found: dict[str, list[Any]]) -> list[int]:
        """Run the script with torch, which fails once: ranks have a second attempt."""
        if self._start == PLAIN:
            words = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN.split(), "--"]
        else:
            words = [*LAUNCHER, "--launcher-start", self._start, *OURS.split(), "--train-script"]
        job = self._begin(*words, "equality.py", *equality.ARGUMENTS)
        ready = [self._folder / f"script-1-{rank}.json" for rank in (0, 1)]
        poll(lambda: job.poll() is not None or all(map(Path.exists, ready)), 300)
        assert job.poll() is None, self._log()
        (name,) = of_job("stacks")
        found[name] = [self._seen()]
        (self._folder / "seen").touch()
        return [job.wait(60)]

    def _seen(self) -> str:
        """Return of which ranks `sm-launch stacks` shows that they are in waits_to_be_seen."""
        if self._start == PLAIN:
            return ""
        words = [*LAUNCHER, "stacks"]
        options = {"capture_output": True, "text": True, "timeout": 60}
        for _ in range(10):  # one of them may be amid its poll
            shown = subprocess.run(words, env=self._environ, **options).stdout
            before = shown.partition("in waits_to_be_seen")[0]  # of all jobs on this machine
            if seen := re.findall(r"2 ranks \(.*?\)", before):
                return seen[-1]
        return shown

    def _ends(self, found: dict[str, list[Any]]) -> None:
        """Run as many ranks as there are ways to end: exit codes as the launcher has seen them."""
        ways = list(of_job("ends"))
        codes = self._run("script", "package/script.py", "ends", count=len(ways))
        if self._start != PLAIN:
            log = (self._base / "log").read_text(errors="replace")
            ended = dict(re.findall(r"RankEnded\(rank=(\d+), end=Exit\(exit_code=(-?\d+)", log))
            codes = [int(ended[str(rank)]) for rank in range(len(ways))]
        for rank, (name, code) in enumerate(zip(ways, codes)):
            texts = [(self._folder / f"ends-{rank}.{one}").read_text() for one in ("out", "err")]
            found[name] = [[code, *(text.replace(str(self._folder), "FOLDER") for text in texts)]]


@pytest.fixture(scope="session")
def told(tmp_path_factory):
    """Return what gives a start's facts. All jobs run once, in the first test's environment."""
    kept: dict[str, dict[str, list[Any]]] = {}

    def told(start: str) -> dict[str, list[Any]]:
        if not kept:
            for name in (PLAIN, *STARTS):
                kept[name] = {}  # should it fail
            with Jobs(tmp_path_factory.mktemp("equality")) as jobs:
                kept.update((name, jobs.facts(name)) for name in (PLAIN, *STARTS))
        assert kept[start], "a job has failed: the test that ran first says how"
        return kept[start]

    return told


def counted(values: list[list[Any]]) -> list[int]:
    """Return how many values differ, for each place of a fact that is drawn."""
    return [len(set(column)) for column in zip(*values)]


@pytest.mark.parametrize("number", range(len(STARTS)), ids=STARTS)
@pytest.mark.parametrize("name", FACTS)
def test_a_rank_is_as_plain_torchruns_or_as_the_page_says(name, number, told):
    fact, start = FACTS[name], STARTS[number]
    plain, ours = told(PLAIN)[name], told(start)[name]
    if fact.how == "drawn":
        plain, ours = ([counted(values)] for values in (plain, ours))
        assert set(plain[0]) == {4}
    if fact.how == "within":
        is_equal = all(abs(a - b) <= fact.number * a for a, b in zip(plain, ours))
    else:
        is_equal = plain == ours
    words, _, value = fact.cells[number].partition(" <!-- ")
    if words == "equal":
        assert is_equal, f"plain: {plain}\n{start}: {ours}"
    elif value:
        assert plain != ours == [json.loads(value.removesuffix(" -->"))] * len(ours)
    else:
        assert not is_equal, "it is equal now: the page does not have to say more"
        assert fact.how != "within" or all(b < a for a, b in zip(plain, ours))  # said to be less
