"""Every promise is kept in thousands of simulated jobs, and every planted mistake breaks one.

What a failing test prints replays it: `make simulate PLAN='Plan(...)'`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
from conftest import REPO
from jobs import job_of
from launcher.transitions import NoRow

from launcher.peers.channel import Channel
from launcher.peers.messages import Start
from launcher.result.causes import Result
from launcher.run import machine as run_machine
from launcher.run import state
from launcher.run.events import Time
from launcher.run.supervisor import Supervisor
from simulation import launcher, mistakes, rows, watch
from simulation.facts import PROMISES, broken
from simulation.job import Job
from simulation.plan import AtBreak, AtStop, Fault, Plan, Script, What, read, written
from simulation.planting import MISTAKES, planted
from simulation.search import report, search
from simulation.strategies import RARE

JOBS = 500  # of one seed
SEEDS = range(20)  # 10,000 jobs in all
MANY = sum(map(len, rows.ROWS.values()))

assert mistakes.MISTAKES is MISTAKES  # it has registered what it plants


@pytest.mark.parametrize("seed", SEEDS)
def test_all_promises_are_kept(seed: int) -> None:
    found = search(seed, JOBS)
    assert found is None, report(found, seed)


# Jobs that broke a promise once, or with a planted mistake that few others find.
ONCE_BROKEN = [
    Plan(  # neither starts nor listens, and stands still in between
        faults=(
            Fault(What.LAUNCHER_PAUSES, 0.4, amount=4.0),
            Fault(What.CANNOT_START, 0.4),
            Fault(What.PORT_TAKEN, host=1, amount=20.0),
        ),
        seed=222,
    ),
    Plan(  # Ctrl-C between a restart's SIGTERM and the ranks' end
        hosts=9,
        script=Script(at_stop=AtStop.DIES, upload=20.0),
        max_restarts=1,
        faults=(Fault(What.CRASHES, 3.1, host=2), Fault(What.CTRL_C, 3.4, host=5)),
        seed=53,
    ),
    Plan(  # of a program and the torchrun that it has run the ends are heard of together
        script=Script(seconds=3.0),
        faults=(Fault(What.HOST_SLOW, amount=1.0), Fault(What.LAUNCHER_PAUSES, 12.4, amount=2)),
        seed=237,
        runner=0.0,
        runs=2,
    ),
    Plan(  # the kernel holds a rank; what another one has left is not to wait for that
        hosts=3,
        nproc=2,
        script=Script(upload=100.0),
        faults=(Fault(What.STUCK, 5.3, 2, 1, amount=20.0), Fault(What.KILLED, 5.6)),
        seed=25,
    ),
    Plan(  # what a rank has left has ended when torchrun has: no rank is left is told before
        hosts=1,
        max_restarts=1,
        faults=(Fault(What.HOOK, 9.0, amount=4.0), Fault(What.TORCHRUN_KILLED, 11.6)),
        seed=225,
    ),
    Plan(  # a stop is heard of with the end of what runs torchrun, and before torchrun's
        script=Script(seconds=3.0),
        faults=(
            Fault(What.HOST_SLOW, host=1, amount=2.0),
            Fault(What.STOP, 7.0),
            Fault(What.LAUNCHER_PAUSES, 7.0, amount=1.0),
        ),
        seed=150,
        runner=0.0,
    ),
    Plan(  # at Ctrl-C a rank is on its way that nobody knows yet
        hosts=1,
        nproc=2,
        script=Script(upload=20.0),
        faults=(Fault(What.STARTS_SLOWLY, amount=4.0), Fault(What.CTRL_C_THRICE, 4.2)),
        seed=100,
    ),
    Plan(  # a host alone has nobody to be cut off from
        hosts=1,
        script=Script(at_break=AtBreak.WAITS),
        faults=(Fault(What.CUT, 5.0), Fault(What.RAISES, 7.0, amount=20.0)),
        seed=129,
    ),
    Plan(  # a program runs torchrun again: the first one's ranks are not those that fail
        nproc=2,
        script=Script(seconds=3.0),
        faults=(Fault(What.RAISES, 7.2, 1, 1, amount=2.0), Fault(What.STOP, 8.2, 1)),
        seed=1,
        runner=5.0,
        runs=2,
    ),
    Plan(  # torchrun may not reap a rank before the launcher knows that it ended with 0
        hosts=4,
        nproc=2,
        faults=(Fault(What.FORGIVEN, 3.0, 2, 1), Fault(What.STOP, 4.1, 2)),
        seed=96,
    ),
    Plan(  # torchrun's end is reaped, and not taken in, when a stop kills it
        hosts=1,
        script=Script(at_stop=AtStop.DIES),
        faults=(Fault(What.CTRL_C, 4.0), Fault(What.LAUNCHER_PAUSES, 4.1, amount=20.0)),
        seed=104,
    ),
    Plan(  # so is a rank's, when the launcher gives its state machine up
        hosts=1,
        script=Script(save=30.0),
        start_timeout=6.0,
        faults=(
            Fault(What.LAUNCHER_FAILS, 1.8),
            Fault(What.LAUNCHER_STOPS, 3.82, amount=200.0),
        ),
        seed=51,
    ),
    Plan(  # a torchrun that a program runs is reaped before its first report is read
        faults=(
            Fault(What.LAUNCHER_PAUSES, 0.5, 1, amount=2.0),
            Fault(What.STOP, 1.5),
            Fault(What.STOP, 1.6, 1),
        ),
        seed=34,
        runner=0.0,
    ),
    Plan(  # the host that keeps the ranks' store fails before its ranks, once others' run
        script=Script(save=2.0),
        max_restarts=1,
        faults=(Fault(What.ENDS, 7.0, 1), Fault(What.LAUNCHER_FAILS, 10.2, 1)),
        seed=159,
    ),
    Plan(  # a launcher stands still as others' torchruns request a start
        hosts=6,
        start_timeout=60.0,
        faults=(Fault(What.LAUNCHER_PAUSES, 1.8, host=1, amount=1.0),),
        seed=177,
    ),
    Plan(  # a launcher that stood still gives up at once, and reaps what has ended meanwhile
        hosts=1,
        start_timeout=6.0,
        faults=(
            Fault(What.LAUNCHER_FAILS, 4.02),
            Fault(What.LAUNCHER_STOPS, 4.32, amount=70.0),
            Fault(What.LAUNCHER_FAILS, 4.92),
        ),
        seed=193,
    ),
    Plan(  # what was to become a rank dies behind one that is slow
        nproc=4,
        faults=(
            Fault(What.STARTS_SLOWLY, amount=4.0),
            Fault(What.DIES_STARTING, 0.7, local_rank=3, amount=1),
        ),
        seed=169,
    ),
    Plan(  # a rank has broken its connections, and is stuck in the kernel before it says why
        faults=(
            Fault(What.RAISES, 2.8, host=1),
            Fault(What.STUCK, 2.8, host=1, amount=12.0),
        ),
        seed=30,
    ),
    # What follows are the smallest jobs that show a mistake which the search needs long to find.
    Plan(hosts=4, faults=(Fault(What.FORGIVEN, 9.0, amount=1.0),), seed=51),
    Plan(
        hosts=1,
        faults=(
            Fault(What.NURSERY_DIES, 0.2, amount=2),
            Fault(What.LAUNCHER_PAUSES, 0.8, amount=1.0),
            Fault(What.STOP, 1.8),
        ),
        seed=205,
        is_warm=True,
    ),
    Plan(
        hosts=1,
        max_restarts=1,
        faults=(Fault(What.DRIVER_HANGS, 11.0), Fault(What.RAISES, 11.02, amount=6.0)),
        seed=184,
    ),
    Plan(faults=(Fault(What.CUT, 5.0, host=1), Fault(What.STACKS, 8.2)), seed=105),
    Plan(
        hosts=4,
        script=Script(save=30.0),
        max_restarts=1,
        faults=(Fault(What.ENDS, 9.0), Fault(What.CTRL_C_THRICE, 10.0, host=3)),
        seed=35,
    ),
    Plan(
        hosts=1,
        nproc=2,
        faults=(Fault(What.CRASHES, 3.1, local_rank=1), Fault(What.KILLED, 3.1)),
        seed=170,
        is_warm=True,
    ),
    Plan(max_restarts=1, faults=(Fault(What.CUT, 5.0),), seed=177),
    Plan(
        hosts=3,
        faults=(
            Fault(What.STARTS_SLOWLY, host=1, amount=1.0),
            Fault(What.NURSERY_DIES, 3.0, host=1, amount=7),
        ),
        seed=34,
        is_warm=True,
    ),
    Plan(
        max_restarts=1,
        faults=(Fault(What.TORCHRUN_STUCK, 2.5, host=1), Fault(What.EXITS, 3.1, host=1)),
        seed=162,
    ),
]


@pytest.mark.parametrize("plan", ONCE_BROKEN)
def test_a_job_that_once_broke_a_promise_keeps_all(plan: Plan) -> None:
    assert broken(Job(plan).run()) == []


@pytest.mark.parametrize("what", MISTAKES)
def test_a_planted_mistake_is_found(what: str) -> None:
    with planted(MISTAKES[what]):
        known = any(broken(Job(plan).run()) for plan in ONCE_BROKEN)
        assert known or any(search(seed, JOBS) for seed in SEEDS)


def test_a_thousand_hosts_end_together() -> None:
    plan = Plan(hosts=1000, nproc=2, faults=(Fault(What.RAISES, 5.0, host=600),))
    job = Job(plan)
    seen = job.run()
    assert not broken(seen)
    results = [machine.launcher.result for machine in job.machines]
    assert results == [results[0]] * 1000
    assert results[0].text.startswith("algo-0601, rank 1200 (local rank 0) failed with ValueError")


def test_a_thousand_hosts_succeed() -> None:
    job = Job(Plan(hosts=1000, nproc=2))
    assert not broken(job.run())
    assert all(machine.launcher.result == Result(0) for machine in job.machines)


def test_promises_are_those_of_the_pages() -> None:
    pages = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
    text = " ".join(" ".join(page.read_text() for page in pages).split())
    named = [*PROMISES, watch.QUIET, watch.LEFT, watch.IN_ORDER, watch.IN_ROWS]
    named += [watch.KNOWN, watch.TOLD, watch.REAPED, watch.ONE]
    assert [promise for promise in named if promise not in text] == []


def test_steps_are_those_of_the_rows() -> None:
    rows.TAKEN.clear()
    for seed in SEEDS[:3]:
        search(seed, JOBS)
    changes = {(step.machine, step.phase, step.next) for step in rows.TAKEN}
    assert {machine for machine, *_ in changes} == set(rows.MACHINES)
    assert len(changes) > 40
    assert rows.ambiguous(rows.TAKEN) == []
    assert len(rows.not_taken(rows.TAKEN)) < MANY / 2


@pytest.mark.parametrize("kind", [Supervisor, Channel])
def test_all_actions_of_a_step_are_done_before_the_next(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """Though a report brings commands about, a command reports, and a search what it finds."""
    acting: list[Any] = []
    nested: list[Any] = []
    do, decide = kind._do, kind._decide

    def acts(one: Any, action: Any) -> None:
        acting.append(one)
        do(one, action)
        acting.remove(one)

    def decides(one: Any, event: Any) -> Any:
        nested.extend([event] if one in acting else [])
        return decide(one, event)

    monkeypatch.setattr(kind, "_do", acts)
    monkeypatch.setattr(kind, "_decide", decides)
    plan = Plan(max_restarts=1, script=Script(upload=20.0), faults=(Fault(What.RAISES, 3.0),))
    assert broken(Job(plan).run()) == [] and nested == []


def test_what_no_row_has_breaks_a_promise() -> None:
    """A change of phase, an event, an action."""
    host = state.State(job_of("a", ("a",)), state.Times(0.0))
    went = host._replace(phase=state.Running())
    for event, after, actions in (
        (Start(1), went, (object(),)),
        (object(), host, ()),
        (Time(), went, ()),
    ):
        with pytest.raises((NoRow, AssertionError)):
            rows.check("run", host, event, after, actions)
    rows.check("run", host, Start(1), went, ())
    after, (log,) = run_machine.step(host, object(), 0.0)
    assert after == host and "does not know" in log.line


@pytest.mark.parametrize("step", RARE)
def test_rows_that_chance_seldom_takes_are_taken(step: rows.Step) -> None:
    rows.TAKEN.clear()
    assert broken(Job(RARE[step]).run()) == [] and step in rows.TAKEN


def test_rows_that_no_job_has_taken_are_named() -> None:
    """With the events and the next phases of the others."""
    assert len(rows.not_taken(Counter())) == MANY
    joining = rows.Step("run", "Joining", "CannotStart", "Departing")
    missing = rows.not_taken(Counter([joining]))
    assert len(missing) == MANY + 1
    name = "run: Joining, Running, Departing on CannotStart: report `Failed`"
    assert [line for line in missing if line.startswith(name)] == [
        f"{name}: Running on CannotStart",
        f"{name}: Departing on CannotStart",
    ]
    assert rows.ambiguous(Counter([joining._replace(next="Failing")])) == [
        "run: Joining on CannotStart to Failing, 1 times"
    ]


@pytest.mark.parametrize("what", [What.STUCK, What.LEFT_STUCK, What.TORCHRUN_STUCK])
@pytest.mark.parametrize(("seconds", "starts"), [(0.0, 2), (7.0, 4), (20.0, 2)])
def test_there_is_no_restart_if_a_process_survives_sigkill(
    what: What, seconds: float, starts: int
) -> None:
    """For 5 s: one that the kernel lets go before is none."""
    plan = Plan(
        script=Script(upload=20.0),
        max_restarts=1,
        faults=(Fault(what, 3.0, amount=seconds), Fault(What.RAISES, 3.5, host=1)),
    )
    job = Job(plan)
    seen = job.run()
    assert broken(seen) == []
    results = {machine.launcher.result for machine in job.machines if machine.launcher}
    assert [result.exit_code for result in results] == [0 if starts == 4 else 1]
    assert len(seen.started) == starts


FAILS_AND_STOPS = Plan(
    hosts=3,
    script=Script(at_stop=AtStop.FAILS, at_break=AtBreak.ABORTS, upload=20.0),
    faults=(Fault(What.RAISES, 3.0, host=1, amount=1.0), Fault(What.STOP, 3.2)),
    seed=7,
)


def test_a_plan_gives_the_same_job_again() -> None:
    assert read(written(FAILS_AND_STOPS)) == FAILS_AND_STOPS
    first, second = (Job(FAILS_AND_STOPS, trace=True).run().trace for _ in range(2))
    assert first == second


def test_a_verbose_job_says_every_step_and_is_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the phases of every machine, one after the other, to the end."""
    quiet = Job(FAILS_AND_STOPS, trace=True).run()
    monkeypatch.setattr(launcher, "Options", functools.partial(launcher.Options, verbose=True))
    verbose = Job(FAILS_AND_STOPS, trace=True).run()
    log = r"^ *\S+ +(\S+) .* log: \d+\.\d{3} s: "
    step = re.compile(log + r"(run|hosts) ([\w ()]+?)(?: to ([\w ()]+?))? on \w")
    steps = [found for line in verbose.trace if (found := step.search(line))]
    assert [line for line in verbose.trace if not step.search(line)] == quiet.trace
    phases: dict[tuple[str, str], str] = {}
    for host, machine, before, after in (found.groups() for found in steps):
        assert phases.setdefault((host, machine), before) == before
        phases[host, machine] = after or before
    assert sorted(phases.values()) == ["Done"] * 3 + ["Ended"] * 2 + ["JobEnded"]
