"""What the fault matrix is made of: a job that runs until something befalls it, and its table."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from cluster.hosts import ALONE, SLACK, Job

# Every rank says that it runs, and goes on until it is told to do its part of the plan.
SCRIPT = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
step = lambda: time.sleep(0.02)
if {training}:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    step = lambda: (dist.all_reduce(torch.ones(1)), time.sleep(0.02))
step()
sys.stdout.write(f"rank {{rank}} runs\\n")
sys.stdout.flush()
while not os.path.exists("/opt/ml/input/now"):
    step()
exec({plan}.get(rank, "while True: step()"))
"""


class Fault:
    """What befalls a job, from its preparation to its end."""

    def __init__(self, job: Job, name: str, table: list[tuple[str, ...]]):
        self.job = job
        self._name = name
        self._table = table
        self._ranks = 0
        self._at = 0.0

    def prepare(
        self,
        plan: Mapping[int, str] | None = None,
        *,
        training: bool = False,
        ranks: int = 1,
        hosts: int = 2,
        how: str = ALONE,
        first: str = "",
        memory: str = "",
        **options: object,
    ) -> None:
        """Make a job whose ranks do what plan says, by rank, when they are told to.

        training: they import torch, and go on with all-reduces until then.
        first: shell script that each container runs before its launcher.
        memory: limit of the last host.
        """
        self.job.add(*(f"algo-{number}" for number in range(1, hosts + 1)))
        script = SCRIPT.format(training=training, plan=plan or {})
        self._ranks = ranks
        self.job.will_run(script, how, launcher_nproc_per_node=ranks, **options)
        for host in self.job.values() if first else ():
            host.will_first(first)
        if memory:
            host = list(self.job.values())[-1]
            host.options.update(mem_limit=memory, memswap_limit=memory)

    def begins(self, *names: str) -> None:
        """Start the hosts named, or all; the seconds count from now on."""
        self.job.start(*names)
        self.happens()

    def start(self) -> None:
        """Start the job; when all ranks run, the seconds count from now on."""
        self.job.start()
        for host in self.job.values():
            host.wait_for(" runs\n", count=self._ranks, timeout=300)
        self.happens()

    def strike(self) -> None:
        """Tell all ranks to do their part."""
        for host in self.job.values():
            host.write("input/now", "")
        self.happens()

    def runs(self, plan: Mapping[int, str] | None = None, **job: object) -> None:
        """Prepare a job and start it; the seconds count from now on."""
        self.prepare(plan, **job)
        self.start()

    def strikes(self, plan: Mapping[int, str], **job: object) -> None:
        """Prepare a job, start it, and have its ranks do their part."""
        self.runs(plan, **job)
        self.strike()

    def happens(self) -> None:
        """From now on the seconds count."""
        self._at = time.time()

    def ends(
        self,
        code: int,
        says: str | re.Pattern[str] | None,
        within: float,
        *,
        lost: tuple[str, ...] = (),
        unwritten: tuple[str, ...] = (),
    ) -> None:
        """All hosts but those lost end with code, in time, with one text that begins so.

        says: None if there is to be no failure file. within: seconds.
        unwritten: hosts that cannot write theirs.
        """
        left = {name: host for name, host in self.job.items() if name not in lost}
        for host in left.values():
            assert host.wait(self._at + within + SLACK + 5 - time.time()) == code, self.job.logs()
        seconds = max(host.ended_at for host in left.values()) - self._at
        assert seconds < within + SLACK, f"{seconds:.1f} s\n{self.job.logs()}"
        texts = {host.failure for name, host in left.items() if name not in unwritten}
        assert len(texts) == 1, texts
        (text,) = texts
        assert (text is None) == (says is None), self.job.logs()
        begins = re.escape(says) if isinstance(says, str) else says or ""
        assert re.match(begins, text or ""), f"{text}\n{self.job.logs()}"
        for host in left.values():
            assert list(host.tmp.rglob("*")) == []
        first = text.splitlines()[0] if text else "no failure file"
        self._table.append((self._name, str(code), f"{within:g}", f"{seconds:.1f}", first))
