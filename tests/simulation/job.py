"""One simulated job: everything that a plan asks for, on one clock."""

from __future__ import annotations

import random
import signal
from typing import Any, Callable

from simulation.clock import Clock
from simulation.keeper import of as keeper_of
from simulation.launcher import Launcher
from simulation.machine import Machine, Process
from simulation.network import Network
from simulation.pipe import Pipe
from simulation.plan import Fault, Plan, What
from simulation.ranks import Rank, World
from simulation.store import Meeting
from simulation.strangers import Stranger
from simulation.watch import Watch

LONGEST = 3600.0  # seconds, after which a job that still runs is left alone

# What is a property of the job from its start, not a moment of it.
_FROM_THE_START = (
    What.HOST_LATE, What.HOST_ABSENT, What.HOST_SLOW, What.DELAY,
    What.DIFFERS, What.CANNOT_START, What.NO_TORCHRUN, What.PORT_TAKEN, What.TORCHRUN_FAILS,
    What.TOO_FEW_FILES, What.RUNNER_FAILS, What.SAVES_LONGER, What.NO_FOLDER,
    What.STARTS_SLOWLY, What.STORE_FAILS, What.STORE_SLOW,
)  # fmt: skip


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
        self.meeting = Meeting(self)
        self.worlds: dict[int, World] = {}  # by attempt
        self.ports: list[int] = []  # of the ranks' stores
        self.processes: dict[int, Process] = {}  # all that were ever started
        self._pid = 100

    def next_pid(self) -> int:
        """Return a pid that no other process of the job has had."""
        self._pid += 1
        return self._pid

    def run(self) -> Watch:
        """Let everything happen; return what was seen."""
        late = {}
        for fault in self.plan.faults:
            if fault.what is What.HOST_LATE:
                late[fault.host] = fault.amount
            if fault.what is What.HOST_ABSENT:
                late[fault.host] = LONGEST
            if fault.what is What.DELAY:
                self.machines[fault.host].delay = fault.amount
            if fault.what is What.PORT_TAKEN:
                self.network.taken_until = fault.amount
            if fault.what not in _FROM_THE_START:
                self.clock.at(fault.at, self._happens, fault)
        for machine in self.machines:
            at = late.get(machine.number, self.random.uniform(0, 0.5))
            if at < LONGEST:
                self.clock.at(at, self._start_launcher, machine)
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
        if not machine.is_up:
            return
        machine.has_started = True
        machine.launcher = Launcher(self, machine)
        machine.launcher.begin()

    def world(self, attempt: int) -> World:
        """Return all ranks of an attempt, on all hosts."""
        return self.worlds.setdefault(attempt, World(self.plan.nproc * self.plan.hosts))

    def loses_store(self, attempt: int) -> None:
        """The store of an attempt's ranks is gone, 0: that of torchrun, of those which use it."""
        for world in self.worlds.values():
            for rank in world.ranks:
                if rank.attempt == attempt if attempt else not rank.port:
                    rank.loses_store()

    def lose_store(self, machine: Machine) -> None:
        """A machine is gone, or out of reach: so is the store that it holds."""
        if machine.torchrun:
            self.meeting.ends(machine.torchrun)
        if machine.store:
            machine.store.on_end()

    # Faults

    def _happens(self, fault: Fault) -> None:
        machine = self.machines[fault.host % len(self.machines)]
        self.watch.note(f"FAULT: {fault.what.value}", machine.name)
        if fault.what not in _TO_A_PROCESS:
            _FAULTS.get(fault.what, Job._to_rank)(self, fault, machine)
            return
        whose, act = _TO_A_PROCESS[fault.what]
        process = _process(whose, machine, fault)
        if process and process.runs:
            self.watch.fault(fault, machine)
            act(process, fault)

    def _to_rank(self, fault: Fault, machine: Machine) -> None:
        for process in list(machine.processes.values()):
            if isinstance(process, Rank) and process.local_rank == fault.local_rank:
                is_held = fault.what in (What.STUCK, What.LEFT_STUCK)
                process.get_stuck(fault) if is_held else process.fail(fault)

    def _hold_torchrun(self, fault: Fault, machine: Machine) -> None:
        torchrun = machine.torchrun
        if torchrun and torchrun.runs and not torchrun.is_held:
            self.watch.fault(fault, machine)
            torchrun.hangs = True
            torchrun.hold(fault.amount)

    def _pause_launcher(self, fault: Fault, machine: Machine) -> None:
        if machine.launcher:
            machine.launcher.stand_still(fault.amount)

    def _fail_launcher(self, fault: Fault, machine: Machine) -> None:
        failed = {one.machine for one in self.watch.faults if one.fault.what is fault.what}
        if machine.launcher and machine.launcher.runs and machine not in failed:
            self.watch.fault(fault, machine)
            machine.launcher.system.raises()

    def _kill_host(self, fault: Fault, machine: Machine) -> None:
        if not machine.is_up or not machine.launcher:
            return
        self.watch.fault(fault, machine)
        machine.die(told=fault.what is What.HOST_KILLED)
        if fault.what is What.HOST_VANISHES:
            self.network.give_up(machine)
        machine.has_started = False
        self.lose_store(machine)

    def _cut(self, fault: Fault, machine: Machine) -> None:
        if machine.is_up and not machine.is_cut and self.plan.hosts > 1:
            self.watch.fault(fault, machine)
            machine.is_cut = True
            self.network.give_up(machine)
            self.lose_store(machine)
            if machine.number and machine.torchrun:
                self.meeting.breaks_for(machine.torchrun)

    def _break_connection(self, fault: Fault, machine: Machine) -> None:
        for end in self.network.of(machine) if machine.number else ():
            self.watch.fault(fault, machine)
            self.network.break_(end, fault.what)

    def _stop(self, fault: Fault, machine: Machine) -> None:
        interrupt = fault.what in (What.CTRL_C, What.CTRL_C_THRICE)
        number = signal.SIGINT if interrupt else signal.SIGTERM
        for one in self.machines if fault.what is What.STOP_ALL else [machine]:
            for again in range(3 if fault.what is What.CTRL_C_THRICE else 1):
                self.clock.after(0.3 * again, self._signal_launcher, one, number, fault)

    def _signal_launcher(self, machine: Machine, number: int, fault: Fault) -> None:
        if machine.launcher and machine.launcher.runs:
            self.watch.fault(fault, machine)
            machine.launcher.signal(number)

    def _ask_for_stacks(self, fault: Fault, machine: Machine) -> None:
        if machine.launcher and machine.launcher.runs and machine.launcher.torchrun:
            self.watch.asks_for_stacks(machine)
            gives_up = Pipe(machine)
            gives_up.say({"want_stacks": True})
            self.clock.after(fault.amount, gives_up.close)

    def _connect_stranger(self, fault: Fault, machine: Machine) -> None:
        for number in range(300 if int(fault.amount) == 0 else 1):
            self.clock.after(0.1 * (number // 100), Stranger, self, int(fault.amount), machine)


_FAULTS: dict[What, Callable[[Job, Fault, Machine], Any]] = {
    What.TORCHRUN_STUCK: Job._hold_torchrun,
    What.LAUNCHER_PAUSES: Job._pause_launcher,
    What.LAUNCHER_FAILS: Job._fail_launcher,
    **dict.fromkeys((What.HOST_KILLED, What.HOST_VANISHES), Job._kill_host),
    What.CUT: Job._cut,
    **dict.fromkeys((What.RESET, What.HALF_OPEN, What.STOPS_READING), Job._break_connection),
    **dict.fromkeys((What.STOP, What.STOP_ALL, What.CTRL_C, What.CTRL_C_THRICE), Job._stop),
    What.STACKS: Job._ask_for_stacks,
    What.STRANGER: Job._connect_stranger,
}


def _kill(process: Process, _: Fault) -> None:
    process.signal(signal.SIGKILL)


def _hang(process: Any, _: Fault) -> None:
    process.hangs = True


# What happens to one process of a host, if that runs.
_TO_A_PROCESS: dict[What, tuple[str, Callable[[Any, Fault], None]]] = {
    What.TORCHRUN_KILLED: ("torchrun", _kill),
    What.TORCHRUN_HANGS: ("torchrun", _hang),
    What.TORCHRUN_TOLD: ("torchrun", lambda torchrun, _: torchrun.signal(signal.SIGTERM)),
    What.RUNNER_KILLED: ("runner", _kill),
    What.STORE_KILLED: ("store", _kill),
    What.KEEPER_KILLED: ("keeper", _kill),
    What.KEEPER_HANGS: ("keeper", _hang),
    What.STUB_KILLED: ("stub", _kill),
    What.LAUNCHER_KILLED: ("launcher", lambda launcher, _: launcher.die()),
    What.LAUNCHER_STOPS: ("launcher", lambda launcher, fault: launcher.stand_still(fault.amount)),
}


def _process(whose: str, machine: Machine, fault: Fault) -> Any:
    if whose in ("keeper", "stub"):
        keeper = keeper_of(machine, fault.local_rank)
        return keeper.parent if keeper and whose == "stub" else keeper
    return getattr(machine, whose)
