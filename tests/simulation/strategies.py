"""Draws plans: a theme says what goes wrong together, and each choice is of a table here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from simulation import faults as kinds
from simulation.faults import AT_ONCE, HELD, KEEPERS, RANKS, STOPS, STORES, Fault, What
from simulation.plan import AtBreak, AtStop, Plan, Script

# All in seconds. When the first fault comes,
JOINING = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 3.0)
STARTING = (0.7, 1.0, 1.3, 1.6, 1.8, 2.0)
TRAINING = (2.5, 3.0, 4.0, 5.0, 7.0, 9.0, 11.0, 13.0)
# and the others after it: most of what is of interest happens close together.
APART = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.6, 3.2, 4.0, 5.0, 6.5, 8.0, 12.0)
SOON = APART[1:10]
MOST = 5  # faults

# What a theme does not choose otherwise. Most mistakes show in jobs of few hosts.
CHOICES: dict[str, Sequence[Any]] = {
    "hosts": (1, 2, 2, 2, 3, 3, 4, 6),
    "nproc": (1, 1, 2),
    "max_restarts": (0, 0, 1, 2),
    "runner": (None,),
    "watch": (0.0,),
    "hang_timeout": (0.0,),
    "start_timeout": (60.0,),
    "is_python": (True,),
    "seconds": (10.0, 3.0, 30.0),
    "at_stop": tuple(AtStop),
    "save": (0.5, 2.0, 6.0, 30.0),
    "save_code": (0, 143),
    "at_break": tuple(AtBreak),
    "upload": (0.0, 0.0, 20.0, 100.0),
    "upload_ignores": (False, True),
    "moments": TRAINING,  # of the first fault
    "apart": APART,
    "amounts": (0.0, 0.2, 1.0, 2.0, 4.0, 6.0, 20.0),
}
AMOUNTS: dict[What, Sequence[float]] = {
    What.DELAY: (0.2, 1.0, 1.5),
    What.LAUNCHER_STOPS: (70.0, 200.0, 90.0),
}
TAKES_AMOUNT = (
    What.RAISES, What.HOOK, What.FORGIVEN, What.LINGERS, What.LEAVES, What.LAUNCHER_PAUSES,
    What.HOST_LATE, What.HOST_SLOW, What.SAVES_LONGER, What.PORT_TAKEN, What.STARTS_SLOWLY,
    What.STORE_SLOW, *HELD,
)  # fmt: skip

START = (
    What.HOST_LATE, What.HOST_ABSENT, What.DIFFERS, What.CANNOT_START, What.PORT_TAKEN,
)  # fmt: skip
TORCHRUN = (What.TORCHRUN_KILLED, What.TORCHRUN_HANGS, What.TORCHRUN_TOLD, *KEEPERS)
LAUNCHER = (What.LAUNCHER_KILLED, What.LAUNCHER_FAILS, What.LAUNCHER_PAUSES)
STOP = What.STOP


class Theme:
    """What goes wrong together: the first faults are of `first`, the others of `faults`."""

    def __init__(
        self, *faults: What, first: Sequence[Sequence[What]] = (), **choices: Sequence[Any]
    ) -> None:
        self.faults, self.first = faults, first
        self.choices = {**CHOICES, **choices}


THEMES = (
    Theme(*RANKS, *STOPS, *TORCHRUN, *LAUNCHER, *kinds.HOSTS, What.DELAY, *START, What.HOST_SLOW,
          What.TORCHRUN_FAILS, What.NO_TORCHRUN, moments=(*JOINING, *STARTING, *TRAINING),
          hosts=(1, 2, 3, *range(2, 17))),
    Theme(*RANKS, *STOPS, *TORCHRUN, *LAUNCHER, moments=(*STARTING, *TRAINING), hosts=(1,)),
    # The start of a job.
    Theme(*START, What.DELAY, STOP, What.LAUNCHER_KILLED, What.LAUNCHER_PAUSES, moments=JOINING),
    # Failures, stops and losses while ranks are restarted.
    Theme(*AT_ONCE, *AT_ONCE, STOP, STOP, STOP, What.LINGERS, What.HOOK, What.TORCHRUN_KILLED,
          What.LAUNCHER_KILLED, What.TORCHRUN_TOLD, max_restarts=(1, 2, 3)),
    # A restart in which hosts are through at different times, and what happens meanwhile.
    Theme(*STOPS, *AT_ONCE, What.LAUNCHER_KILLED, *[What.DELAY] * 4, max_restarts=(1, 2),
          hosts=(2, 2, 3, 4), nproc=(1,), upload=(0.0,), amounts=(4.0, 6.0, 20.0), apart=SOON,
          first=((What.SAVES_LONGER,), AT_ONCE, (STOP, *STOPS, What.LAUNCHER_FAILS))),
    # Restarts that cannot be: no signal ends what is left, hardware is broken, there is no store.
    Theme(*AT_ONCE, *AT_ONCE, *HELD, STOP, max_restarts=(1, 1, 2, 0), upload=(100.0,),
          amounts=(0.0, 0.0, 0.0, 3.0, 6.0, 12.0), first=(HELD, AT_ONCE)),
    Theme(What.GPU_FAILS, *AT_ONCE[:3], max_restarts=(1, 2), nproc=(2,), apart=SOON[:7],
          first=(AT_ONCE, (What.GPU_FAILS,))),
    Theme(*AT_ONCE, *STORES, STOP, What.CTRL_C, What.LINGERS, moments=(*STARTING, *TRAINING),
          max_restarts=(1, 2), amounts=(0.2, 2.0, 20.0, 200.0), first=(STORES, AT_ONCE)),
    # Causes, and what is secondary to them; two failures of one host.
    Theme(*RANKS, What.RAISES, What.RAISES, STOP, What.RESET),
    Theme(*AT_ONCE, What.HOOK, hosts=(1, 1, 2), nproc=(2,), max_restarts=(0,),
          first=((What.HOOK, *AT_ONCE), (What.HOOK, *AT_ONCE))),
    # The end of a job, which not all hosts reach together; a program that runs torchrun.
    Theme(What.HOST_SLOW, *STOPS, What.TORCHRUN_HANGS, What.TORCHRUN_KILLED, What.RAISES),
    Theme(*TORCHRUN, What.RUNNER_KILLED, What.RUNNER_FAILS, STOP, What.CTRL_C_THRICE, *AT_ONCE[:3],
          *LAUNCHER[:2], What.HOST_SLOW, runner=(0.0, 5.0, 1000.0), hosts=(1, 2, 2, 3)),
    # Programs that tell nothing.
    Theme(*STOPS, moments=(*STARTING, *STARTING[2:5]), seconds=(30.0,), is_python=(False,)),
    # Ranks that wait for one that does not come, and are watched; somebody asks where all are.
    Theme(What.HANGS, What.STUCK, What.RAISES, What.STACKS, STOP, What.KILLED,
          watch=(5.0,), hang_timeout=(10.0,), apart=(0.3, 2.0, 6.5, 12.0, 20.0),
          first=((What.HANGS, What.STUCK),)),
    Theme(*[What.STACKS] * 4, What.RAISES, STOP, What.HOST_KILLED, What.CUT, What.LINGERS),
    # Launchers that are stopped, or meet errors of their own.
    Theme(What.LAUNCHER_STOPS, What.LAUNCHER_FAILS, What.NO_FOLDER, *AT_ONCE[:3], STOP, What.STUCK,
          What.LAUNCHER_STOPS, What.LAUNCHER_FAILS, What.HOST_SLOW, start_timeout=(6.0,),
          moments=(*JOINING[4:], *STARTING, *TRAINING), seconds=(10.0, 3.0, 30.0, 100.0)),
    Theme(STOP, What.RAISES, hosts=(1, 1, 2), nproc=(2, 3), amounts=(4.0, 20.0), apart=SOON[:5],
          first=((STOP, What.CTRL_C, *AT_ONCE[:2]), (What.LAUNCHER_PAUSES,))),
    # Torchruns that end, or are killed, while they start ranks, and launchers that stand still.
    Theme(*TORCHRUN, What.KEEPER_HANGS, *AT_ONCE, *STOPS, *LAUNCHER, moments=(*STARTING, *TRAINING),
          nproc=(1, 2, 4), amounts=(0.2, 1.0, 4.0), apart=APART[:9],
          first=((What.STARTS_SLOWLY, *LAUNCHER[1:], STOP),)),
    # Stops amid which torchruns, hosts and launchers are lost.
    Theme(*TORCHRUN, What.CUT, What.HOST_KILLED, What.RESET, What.LAUNCHER_FAILS, STOP,
          What.LAUNCHER_STOPS, first=(STOPS[:3],), at_stop=(AtStop.SAVES, AtStop.IGNORES)),
)  # fmt: skip


def drawn(by: random.Random) -> Plan:
    """Draw a job of 1 to 16 hosts, and up to five things that go wrong in it."""
    theme = by.choice(THEMES)
    chosen = {name: by.choice(values) for name, values in theme.choices.items()}
    script = Script(**{name: chosen[name] for name in Script._fields})
    fields = {name: value for name, value in chosen.items() if name in Plan._fields}
    plan = Plan(script=script, seed=by.randrange(256), **fields)
    faults: list[Fault] = []
    for number in range(max(by.randint(0, MOST), len(theme.first))):
        what = by.choice(theme.first[number] if number < len(theme.first) else theme.faults)
        at = chosen["moments"]
        if faults and faults[-1].what not in kinds.LASTING:
            at = round(faults[-1].at + by.choice(theme.choices["apart"]), 2)
        amounts = theme.choices["amounts"] if what in TAKES_AMOUNT else (0,)
        fault = Fault(
            what,
            0.0 if what in kinds.LASTING else at,
            host=0 if what in STORES else by.randrange(plan.hosts),
            local_rank=by.randrange(plan.nproc),
            amount=float(by.choice(AMOUNTS.get(what, amounts))),
        )
        faults.append(fault)
    return plan._replace(faults=tuple(faults))
