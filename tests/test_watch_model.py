"""Watching, on jobs that are only a model: ranks that run random programs of collectives.

The ranks' numbers are made here; what hosts and the coordinator make of them is the launcher's own
code. Three promises: an absent rank is named within `NOTIFY` seconds and one look, nothing is said
of a job that moves, and none is ended of which no stall was as long as its time-out.
"""

import math
import random
import re
from pathlib import Path

import pytest
from simulation.planting import cases, planted

from launcher.job.options import Options
from launcher.text.words import Log
from launcher.watch import judge
from launcher.watch.host import Watch

EVERY, NOTIFY = 15, 60
MOST = 400  # seconds of a job
LONGEST, LONG = 40, 100  # seconds between two steps of a rank, and with the fault "long"


class Op:
    """A collective of a group, by its number in it."""

    def __init__(self, group, number, members):
        self.group, self.number, self.members = group, number, members
        self.begun = set()

    @property
    def has_ended(self):
        return self.begun == self.members


class Rank:
    """One rank: its program, how far it is, and what it says to the launcher."""

    def __init__(self, number, program, job, rng):
        self.number, self.program, self.job, self.rng = number, program, job, rng
        self.next, self.ready_at, self.changed_at = 0, 0.0, 0.0
        self.open = []  # ops that it has begun and that have not ended
        self.state = "runs"
        self.seen = None
        self.since = 0.0
        self.has_missed = False

    def step(self, now):
        ended = [op for op in self.open if op.has_ended]
        if ended:
            self.open = [op for op in self.open if not op.has_ended]
            self.changed_at = now
        if self.state != "runs" or now < self.ready_at or self.next == len(self.program):
            return
        if len(self.open) < self.job.depth:
            op = self.program[self.next]
            op.begun.add(self.number)
            self.open.append(op)
            self.next += 1
            self.ready_at = now + self.rng.choice([0, 1, 5, 20, LONGEST])
            self.changed_at = now

    def misses(self):
        """Tell whether it answers too late, which on a busy machine it does not twice in a row."""
        self.has_missed = not self.has_missed and self.rng.random() < self.job.lateness
        return self.has_missed

    def answer(self, now, groups):
        done = self.program[: self.next]
        said = []
        for name, (members, order) in groups.items():
            if self.number in members:
                text = ",".join(map(str, sorted(members)))
                last = max((op.number for op in done if op.group == name), default=0)
                waits = min((op.number for op in self.open if op.group == name), default=0)
                known = [waits, "all_reduce"]
                if self.job.is_counted:
                    is_open = any((op.group, op.number) == (name, last) for op in self.open)
                    known = [last if is_open and self.job.knows_ends else 0, "", "", True]
                said.append([text, order, "", last, *known])
        if said != self.seen:
            self.seen, self.since = said, now
            return {}
        return {
            "unchanged": now - self.since,
            "threads": [["", ['  File "a.py", line 1 in f'], False]],
            "groups": said,
        }


class Job:
    """Ranks on hosts, two each; `fault` is what becomes of one of them at some time."""

    def __init__(self, seed, fault="", every=EVERY, notify=NOTIFY, timeout=math.inf):
        rng = self.rng = random.Random(seed)
        size = rng.choice([2, 3, 4, 6])
        self.groups = {"all": (frozenset(range(size)), 0), "again": (frozenset(range(size)), 1)}
        for number in range(rng.randrange(3)):
            members = frozenset(rng.sample(range(size), rng.randrange(2, size + 1)))
            same = sum(one == members for one, _ in self.groups.values())
            self.groups[f"sub{number}"] = members, same
        counts, program = dict.fromkeys(self.groups, 0), []
        for _ in range(rng.choice([40, 400])):
            name = rng.choice(list(self.groups))
            counts[name] += 1
            program.append(Op(name, counts[name], self.groups[name][0]))
        self.depth, self.lateness = rng.choice([1, 1, 3]), rng.choice([0, 0.02])
        self.is_counted = rng.random() < 0.5  # as NCCL's are
        self.knows_ends = self.is_counted and rng.random() < 0.5  # with its recorder on
        if self.is_counted:
            self.depth = rng.choice([1, 10])
        self.ranks = [
            Rank(number, [op for op in program if number in op.members], self, rng)
            for number in range(size)
        ]
        self.watches = []
        options = Options(hang_notify=min(notify, timeout), hang_timeout=timeout, watch=every)
        for first in range(0, size, 2):
            start, watch = rng.uniform(0, every), Watch(every, options.hang_notify, lambda pid: 0.0)
            for rank in self.ranks[first : first + 2]:
                watch.started(rank.number, rank.number, rank.number % 2, start)
                watch.connected(rank.number, 0, start)
            self.watches.append(watch)
        self.judge = judge.Stalls(options)
        self.fault, self.victim = fault, self.ranks[rng.randrange(size)]
        self.fault_at = rng.uniform(1, 60)
        self.lines = []  # (time, text)

    def run(self):
        now = 0.0
        while now < MOST:
            if self.fault and now >= self.fault_at and self.victim.state == "runs":
                self.victim.state = self.fault
            if self.fault == "long" and now >= self.fault_at + LONG:
                self.victim.state = "runs"
            for rank in self.ranks:
                rank.step(now)
            for number, watch in enumerate(self.watches):
                self.look(number, watch, now)
            if now >= judge.due(self.judge):
                self.judge, actions = judge.time_is_up(self.judge, (), now)
                self.lines += [(now, one.line) for one in actions if isinstance(one, Log)]
                self.judge = self.judge._replace(gathering=judge.Gathering())  # no stacks
                if self.judge.hang:
                    break
            now += 0.5
        return self

    def look(self, number, watch, now):
        ranks = self.ranks[2 * number : 2 * number + 2]
        if now < watch.due():
            return
        question = watch.poll(now)
        for rank in ranks if question else ():
            if rank.state == "ended":
                watch.disconnected(rank.number)
            elif rank.state != "silent" and not rank.misses():
                watch.replied(rank.number, {**question, **rank.answer(now, self.groups)}, now)
        codes = {rank.number: 0 if rank.state == "ended" else None for rank in ranks}
        for report in watch.reports(codes, lambda _: "T", now):
            host = f"algo-{number + 1}"
            self.judge, _ = judge.reported(self.judge, host, report, (), now)

    @property
    def waiting(self):
        return [rank for rank in self.ranks if rank.open and rank is not self.victim]


NAMES = re.compile(" (?:absent|not begun|no longer takes? part)")


def broken(seed, fault):
    """Return the promise that a job breaks, "" if it keeps both."""
    job = Job(seed, fault).run()
    told = [(at, line) for at, line in job.lines if re.search("no progress.*: ", line)]
    if fault != "silent" and any("does not answer" in line for _, line in told):
        return f"they all answer: {told}"
    if not fault:
        return f"said of a job that moves: {told[0]}" if told else ""
    frozen_at = max(rank.changed_at for rank in job.ranks)
    again = [at for at, line in job.lines if line.startswith("ranks are making progress again")]
    if again and again[-1] > max(frozen_at, job.fault_at) + 2 * EVERY + 12:
        return f"progress was said of what does not move, at {again[-1]}"
    if not job.waiting or job.victim.open:
        return ""  # nobody waits for it, or it was in a collective itself
    name = f"rank {job.victim.number} "
    named = [at for at, line in told if name in NAMES.split(line)[0]]
    others = [line for _, line in told if name not in NAMES.split(line)[0]]
    if job.lateness:
        others = others[1:]  # one of which a look was missed may have gone on
    if others:
        return f"another one was named: {others[0]}"
    if job.is_counted and fault == "ended":
        return ""  # what it had begun is not known then
    looks = 2 if job.lateness else 1
    by = max(frozen_at, job.fault_at, EVERY) + NOTIFY + looks * EVERY + 3
    if by < MOST and (not named or named[0] > by):
        return f"named at {named[:1]}, not by {by}"
    return ""


def broken_by_the_end(seed, fault):
    """Return the promise that a job with a time-out breaks, "" if it keeps it."""
    rng = random.Random(seed)
    longest = LONGEST + (LONG if fault == "long" else 0)
    every = rng.choice([1, 2, 5, 15])
    timeout = longest + rng.choice([0.5, 5, 30])
    job = Job(seed, fault, every, rng.choice([2, 4]) * every, timeout).run()
    return f"ended: {job.judge.hang}" if job.judge.hang else ""


MISTAKES = cases(Path(__file__).with_name("watch_mistakes.txt"))
FAULTS = ("", "absent", "silent", "ended")


@pytest.mark.parametrize("fault", FAULTS)
def test_both_promises_hold(fault):
    for seed in range(60):
        assert not broken(seed, fault), f"{fault or 'no fault'}, seed {seed}"


@pytest.mark.parametrize("fault", ["", "long"])
def test_no_job_is_ended_that_moves(fault):
    for seed in range(60):
        assert not broken_by_the_end(seed, fault), f"{fault or 'no fault'}, seed {seed}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_planted_mistake_is_found(mistake):
    with planted(mistake):
        if mistake.promise == "no job is ended that moves":
            tried = (broken_by_the_end(seed, one) for seed in range(300) for one in ("", "long"))
        else:
            tried = (broken(seed, fault) for seed in range(60) for fault in FAULTS)
        assert any(tried)
