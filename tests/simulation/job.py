"""One simulated job: everything that a plan asks for, on one clock."""

from __future__ import annotations

import random
import signal
from typing import Any, Callable

from simulation.clock import Clock
from simulation.faults import LASTING, PAUSES, Fault, What
from simulation.launcher import Launcher
from simulation.machine import Machine, Process
from simulation.network import Network
from simulation.plan import Plan
from simulation.ranks import Rank, World
from simulation.system import Pipe
from simulation.watch import Watch

LONGEST = 3600.0  # seconds, after which a job that still runs is left alone


class Job:
    """All hosts of a job, and who watches them."""

    def __init__(self, plan: Plan, *, trace: bool = False) -> None:
        self.plan = plan
        self.names = plan.names()
        self.clock = Clock()
        self.random = random.Random(plan.seed)
        self.watch = Watch(self, trace=trace)
        self.machines: list[Machine] = []
        self.machines += [Machine(self, number) for number in range(plan.hosts)]
        self.network = Network(self)
        self.worlds: dict[int, World] = {}  # by attempt
        self.processes: dict[int, Process] = {}  # all that were ever started, by pid

    def run(self) -> Watch:
        """Let everything happen; return what was seen."""
        for machine in self.machines:
            late, delay = self.of(machine, What.HOST_LATE), self.of(machine, What.DELAY)
            machine.delay = delay.amount if delay else 0.0
            at = late.amount if late else self.random.uniform(0, 0.5)
            if not self.of(machine, What.HOST_ABSENT):
                self.clock.at(at, self._start_launcher, machine)
        for fault in self.plan.faults:
            if fault.what is What.PORT_TAKEN:
                self.network.taken_until = fault.amount
            hosts = range(self.plan.hosts) if fault.what is What.STOP_ALL else [fault.host]
            for host in hosts if fault.what not in LASTING else ():
                for again in range(3 if fault.what is What.CTRL_C_THRICE else 1):
                    self.clock.at(fault.at + 0.3 * again, self._happens, fault, self.machines[host])
        with self.watch.over_steps():
            self.clock.run(LONGEST)
        return self.watch

    def of(self, machine: Machine, what: What) -> Fault | None:
        """Return the fault of a kind that a host has from its start, if it has."""
        for fault in self.plan.faults:
            if fault.what is what and fault.host == machine.number:
                return fault
        return None

    def _start_launcher(self, machine: Machine) -> None:
        if machine.is_up:
            machine.has_started = True
            machine.launcher = Launcher(self, machine)
            machine.launcher.begin()

    def world(self, attempt: int) -> World:
        """Return all ranks of an attempt, on all hosts."""
        return self.worlds.setdefault(attempt, World(self.plan.nproc * self.plan.hosts))

    def loses_store(self, holder: object) -> None:
        """Who holds a store of ranks is gone."""
        for world in self.worlds.values():
            for rank in world.ranks:
                if rank.store is holder:
                    rank.loses_store()

    def _lose_stores(self, machine: Machine) -> None:
        """A machine is gone, or out of reach: so are the stores that it holds."""
        if machine.torchrun:
            machine.torchrun.is_out_of_reach()
        if machine.store:
            self.loses_store(machine.store)

    # Faults

    def _happens(self, fault: Fault, machine: Machine) -> None:
        self.watch.note(f"FAULT: {fault.what.value}", machine.name)
        whose, act = _TO_A_PROCESS.get(fault.what, ("", None))
        running = {one.local_rank: one for one in machine.keepers if one.runs}
        keeper = running.get(fault.local_rank)
        of_rank = {"keeper": keeper, "stub": keeper and keeper.parent}
        process: Any = of_rank[whose] if whose in of_rank else getattr(machine, whose, None)
        if act is None:
            _FAULTS.get(fault.what, Job._to_rank)(self, fault, machine)
        elif process and process.runs:
            self.watch.fault(fault, machine)
            act(process, fault)

    def _to_rank(self, fault: Fault, machine: Machine) -> None:
        for process in list(machine.processes.values()):
            if isinstance(process, Rank) and process.local_rank == fault.local_rank:
                is_held = fault.what in (What.STUCK, What.LEFT_STUCK)
                process.get_stuck(fault) if is_held else process.fail(fault)

    def _kill_host(self, fault: Fault, machine: Machine) -> None:
        if machine.is_up and machine.launcher:
            self.watch.fault(fault, machine)
            machine.die(told=fault.what is What.HOST_KILLED)
            if fault.what is What.HOST_VANISHES:
                self.network.give_up(machine)
            machine.has_started = False
            self._lose_stores(machine)

    def _cut(self, fault: Fault, machine: Machine) -> None:
        if machine.is_up and not machine.is_cut and self.plan.hosts > 1:
            self.watch.fault(fault, machine)
            machine.is_cut = True
            self.network.give_up(machine)
            self._lose_stores(machine)
            if machine.number and machine.torchrun:
                machine.torchrun.loses_first()

    def _break_connection(self, fault: Fault, machine: Machine) -> None:
        for end in self.network.of(machine) if machine.number else ():
            self.watch.fault(fault, machine)
            end.times_out()
            end.peer.times_out()

    def _ask_for_stacks(self, fault: Fault, machine: Machine) -> None:
        if machine.launcher and machine.launcher.runs and machine.launcher.torchrun:
            self.watch.asks_for_stacks(machine)
            gives_up = Pipe(machine)
            gives_up.say({"want_stacks": True})
            self.clock.after(fault.amount, gives_up.close)


_FAULTS: dict[What, Callable[[Job, Fault, Machine], Any]] = {
    **dict.fromkeys((What.HOST_KILLED, What.HOST_VANISHES), Job._kill_host),
    What.CUT: Job._cut,
    What.RESET: Job._break_connection,
    What.STACKS: Job._ask_for_stacks,
}


def _signal(number: int) -> Callable[[Any, Fault], None]:
    return lambda process, fault: process.signal(number)


def _hang(process: Any, _: Fault) -> None:
    process.hangs = True


def _hold(torchrun: Any, fault: Fault) -> None:
    torchrun.hangs = True
    torchrun.hold(fault.amount)


# What happens to one process of a host, if that runs.
_TO_A_PROCESS: dict[What, tuple[str, Callable[[Any, Fault], None]]] = {
    What.TORCHRUN_KILLED: ("torchrun", _signal(signal.SIGKILL)),
    What.TORCHRUN_HANGS: ("torchrun", _hang),
    What.TORCHRUN_STUCK: ("torchrun", _hold),
    What.TORCHRUN_TOLD: ("torchrun", _signal(signal.SIGTERM)),
    What.RUNNER_KILLED: ("runner", _signal(signal.SIGKILL)),
    What.STORE_KILLED: ("store", lambda store, _: store.die()),
    What.KEEPER_KILLED: ("keeper", _signal(signal.SIGKILL)),
    What.KEEPER_HANGS: ("keeper", _hang),
    What.STUB_KILLED: ("stub", _signal(signal.SIGKILL)),
    What.LAUNCHER_KILLED: ("launcher", lambda launcher, _: launcher.die()),
    **dict.fromkeys(PAUSES, ("launcher", lambda one, fault: one.stand_still(fault.amount))),
    What.LAUNCHER_FAILS: ("launcher", lambda launcher, _: launcher.fail()),
    **dict.fromkeys((What.STOP, What.STOP_ALL), ("launcher", _signal(signal.SIGTERM))),
    **dict.fromkeys((What.CTRL_C, What.CTRL_C_THRICE), ("launcher", _signal(signal.SIGINT))),
}
