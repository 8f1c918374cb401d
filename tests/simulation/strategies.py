"""Draws plans: each choice is of a table here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from simulation.plan import AtBreak, AtStop, Fault, Plan, Script, What
from simulation.strangers import KINDS

OF_RANKS = (
    What.RAISES, What.EXITS, What.KILLED, What.ENDS, What.CRASHES,
    What.HOOK, What.FORGIVEN, What.LINGERS, What.HANGS, What.LEAVES,
)  # fmt: skip
OF_PEOPLE = (What.STOP, What.STOP_ALL, What.CTRL_C, What.CTRL_C_THRICE)
OF_ONE_HOST = (
    What.TORCHRUN_KILLED, What.TORCHRUN_HANGS, What.TORCHRUN_FAILS, What.NO_TORCHRUN,
    What.TORCHRUN_TOLD, What.KEEPER_KILLED, What.STUB_KILLED,
    What.LAUNCHER_PAUSES, What.HOST_SLOW,
)  # fmt: skip
OF_HOSTS = (
    What.LAUNCHER_KILLED, What.HOST_KILLED, What.HOST_VANISHES, What.CUT,
    What.RESET, What.HALF_OPEN, What.STOPS_READING, What.DELAY,
)  # fmt: skip
FROM_THE_START = (
    What.STARTS_SLOWLY,
    What.HOST_SLOW,
    What.SAVES_LONGER,
    What.STORE_FAILS,
    What.STORE_SLOW,
)
OF_THE_START = (
    What.HOST_LATE, What.STRANGER, What.HOST_ABSENT, What.DIFFERS, What.CANNOT_START,
    What.PORT_TAKEN, What.TOO_FEW_FILES,
)  # fmt: skip

# All in seconds. When the first fault comes,
JOINING = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 3.0)
STARTING = (0.7, 1.0, 1.3, 1.6, 1.8, 2.0)
TRAINING = (2.5, 3.0, 4.0, 5.0, 7.0, 9.0, 11.0, 13.0)
# and the others after it: most of what is of interest happens close together.
APART = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 2.6, 3.2, 4.0, 5.0, 6.5, 8.0, 12.0)
# How long some of them take.
AMOUNTS = (0.0, 0.2, 1.0, 2.0, 4.0, 6.0, 20.0, 20.0)


class Theme(NamedTuple):
    """What is drawn together: faults, when the first one comes, and for which jobs."""

    faults: Sequence[What]
    moments: Sequence[float]
    restarts: Sequence[int] = (0, 0, 0, 1)
    hosts: Sequence[int] = (2, 3, *range(2, 17))
    nproc: Sequence[int] = (1, 2)
    uploads: Sequence[float] = (0.0, 0.0, 20.0, 100.0)  # seconds that they take
    amounts: Sequence[float] = AMOUNTS
    apart: Sequence[float] = APART
    trains: Sequence[float] = (10.0, 3.0, 30.0)  # seconds
    is_python: bool = True
    # Seconds that what runs torchrun works after it, if something does.
    runners: Sequence[float] = ()
    first: Sequence[Sequence[What]] = ()  # what the first faults are, each one of some
    at_stop: Sequence[AtStop] = tuple(AtStop)
    watch: Sequence[float] = (0.0,)
    hang_timeout: float = 0.0
    start_timeout: float = 60.0


ANYTHING = (*OF_RANKS, *OF_PEOPLE, *OF_ONE_HOST, *OF_HOSTS, *OF_THE_START)
AT_ONCE = OF_RANKS[:5]  # what needs no time of its own
HELD = (What.STUCK, What.LEFT_STUCK, What.TORCHRUN_STUCK)
FEW = (2, 2, 3, 4, 6)
KEEPERS = (What.KEEPER_KILLED, What.STUB_KILLED)
STORES = (What.STORE_FAILS, What.STORE_SLOW, What.STORE_KILLED)
THEMES = (
    Theme(ANYTHING, (*JOINING, *STARTING, *TRAINING), (0, 1, 2)),
    Theme((*OF_RANKS, *OF_PEOPLE, *OF_ONE_HOST), (*STARTING, *TRAINING), hosts=(1,)),
    # Failures, stops and losses while ranks are restarted.
    Theme((*AT_ONCE, *AT_ONCE, What.STOP, What.STOP, What.STOP, What.LINGERS, What.HOOK,
           What.TORCHRUN_KILLED, What.LAUNCHER_KILLED, What.TORCHRUN_TOLD), TRAINING, (1, 2, 3),
          (1, *FEW), uploads=(0.0, 0.0, 20.0)),
    # The start of a job, and who else connects.
    Theme((*OF_THE_START, What.STRANGER, What.STRANGER, What.STRANGER, What.HOST_LATE, What.DELAY,
           *OF_PEOPLE[:2], What.LAUNCHER_KILLED, What.LAUNCHER_PAUSES), JOINING, hosts=(*FEW, 12)),
    Theme((What.STRANGER, What.DELAY, What.STRANGER), JOINING[:6], hosts=FEW),
    # The end of a job, which not all hosts reach together.
    Theme((What.HOST_SLOW, What.STOP, *OF_PEOPLE, What.TORCHRUN_HANGS, What.TORCHRUN_KILLED,
           What.RAISES), TRAINING, hosts=FEW),
    # Programs that tell nothing.
    Theme(OF_PEOPLE, (*STARTING, *STARTING[2:5]), hosts=FEW, trains=(30.0,), is_python=False),
    # What ranks leave behind.
    Theme((What.LAUNCHER_PAUSES, What.STOP, What.RAISES, What.TORCHRUN_HANGS, What.KILLED),
          TRAINING, hosts=(1, 1, 2), uploads=(20.0, 100.0)),
    # Two failures of one host.
    Theme((*AT_ONCE, What.HOOK, What.HOOK, What.HOOK), TRAINING, (0,), (1, 1, 1, 2), (2,),
          amounts=(1.0, 2.0, 4.0), first=((What.HOOK, *AT_ONCE), (What.HOOK, *AT_ONCE))),
    # Causes, and what is secondary to them.
    Theme((*OF_RANKS, What.RAISES, What.RAISES, What.STOP, What.RESET), TRAINING),
    # Somebody asks where all ranks are, again and again.
    Theme((*[What.STACKS] * 4, What.RAISES, What.STOP, What.HOST_KILLED, What.CUT, What.LINGERS),
          TRAINING, (0, 1, 2), (1, *FEW)),
    # Launchers that are stopped, or meet errors of their own.
    Theme((What.LAUNCHER_STOPS, What.LAUNCHER_FAILS, What.NO_FOLDER, *AT_ONCE[:3], What.STOP,
           What.LAUNCHER_STOPS, What.LAUNCHER_FAILS, What.HOST_SLOW, What.STUCK),
          (*JOINING[4:], *STARTING, *TRAINING), (0, 1, 2), (1, *FEW),
          trains=(10.0, 3.0, 30.0, 100.0), start_timeout=6.0),
    # Hardware that breaks.
    Theme((What.GPU_FAILS, *AT_ONCE[:3]), TRAINING, (1, 2), (1, *FEW), (2,), apart=APART[:7],
          at_stop=(AtStop.IGNORES, AtStop.SAVES), first=(AT_ONCE, (What.GPU_FAILS,))),
    # A program that runs torchrun.
    Theme((What.TORCHRUN_KILLED, What.RUNNER_KILLED, What.RUNNER_FAILS, What.STOP, What.RAISES,
           What.ENDS, What.TORCHRUN_KILLED, What.LAUNCHER_KILLED, What.CTRL_C_THRICE,
           What.HOST_SLOW, What.KILLED, What.TORCHRUN_HANGS, What.LAUNCHER_FAILS),
          (*STARTING[:3], *TRAINING), (0, 0, 1), (1, 2, 2, 3), runners=(0.0, 5.0, 1000.0)),
    # Keepers that are killed, and stores that ranks do not get.
    Theme((*KEEPERS, *KEEPERS, What.KEEPER_HANGS, *AT_ONCE, What.STOP, What.CTRL_C,
           What.TORCHRUN_TOLD, What.LAUNCHER_KILLED, What.LAUNCHER_FAILS),
          (*STARTING, *TRAINING), (0, 1, 2), (1, *FEW)),
    Theme((*AT_ONCE, *STORES, What.STOP, What.CTRL_C, What.LINGERS), (*STARTING, *TRAINING),
          (1, 2), (1, *FEW), amounts=(0.2, 2.0, 20.0, 200.0), first=(STORES, AT_ONCE)),
    # What no signal ends.
    Theme((*AT_ONCE, *AT_ONCE, *HELD, What.STOP), TRAINING, (1, 1, 2, 0), (1, 2, 2, 3),
          uploads=(100.0,), amounts=(0.0, 0.0, 0.0, 3.0, 6.0, 12.0), first=(HELD, AT_ONCE)),
    # A restart in which hosts are through at different times, and what happens meanwhile.
    Theme((*OF_PEOPLE, *AT_ONCE, What.LAUNCHER_KILLED, *[What.DELAY] * 4),
          TRAINING, (1, 2), (2, 2, 3, 4), (1,), uploads=(0.0,), amounts=(4.0, 6.0, 20.0),
          apart=(0.5, 1.0, 1.5, 2.0, 2.6, 3.2, 3.8), at_stop=(AtStop.SAVES, AtStop.FAILS),
          first=((What.SAVES_LONGER,), AT_ONCE,
                 (What.STOP, What.STOP, *OF_PEOPLE, What.LAUNCHER_FAILS))),
    # Ranks that wait for one that does not come, and are watched.
    Theme((What.HANGS, What.STUCK, What.RAISES, What.STACKS, What.STOP, What.KILLED), TRAINING,
          (0, 0, 1), (1, 2, 2, 3), amounts=(0.0, 20.0), watch=(5.0,), hang_timeout=10.0,
          apart=(0.3, 2.0, 6.5, 12.0, 20.0), first=((What.HANGS, What.STUCK),)),
    # Start and stop at the same time.
    Theme((What.STOP, What.RAISES, What.LAUNCHER_KILLED, What.CTRL_C_THRICE), STARTING, (0, 1),
          (2, 3), amounts=(1.0, 2.0), apart=(0.02, 0.1, 0.3, 0.6), trains=(3.0,),
          first=((What.LAUNCHER_PAUSES,), (What.STOP, What.CTRL_C_THRICE))),
    # Torchruns that end, or are killed, while they start ranks, and launchers that stand still.
    Theme((*KEEPERS, What.RAISES, What.STOP, What.CTRL_C, What.CTRL_C_THRICE, What.TORCHRUN_KILLED,
           What.TORCHRUN_TOLD, What.TORCHRUN_HANGS, What.LAUNCHER_KILLED, What.LAUNCHER_PAUSES,
           What.LAUNCHER_FAILS),
          (*STARTING, *STARTING, 3.0, 5.0), (0, 0, 1, 2), (1, 1, *FEW), (1, 2, 3, 4),
          uploads=(0.0, 20.0), amounts=(0.2, 1.0, 4.0), apart=APART[:9], trains=(3.0, 10.0),
          first=((What.STARTS_SLOWLY, What.STARTS_SLOWLY, What.LAUNCHER_PAUSES),)),
    # Stops of 100 s in all, amid which torchruns, hosts and launchers are lost.
    Theme((What.TORCHRUN_KILLED, What.TORCHRUN_TOLD, What.CUT, What.HOST_KILLED, What.HALF_OPEN,
           What.LAUNCHER_FAILS, *KEEPERS, What.STOP, What.LAUNCHER_STOPS), TRAINING, (0, 1),
          (1, *FEW), uploads=(0.0, 100.0), at_stop=(AtStop.SAVES, AtStop.IGNORES),
          first=((What.STOP, What.STOP_ALL, What.CTRL_C),)),
    # A launcher that stands still while its ranks end, past their time.
    Theme((What.STOP, What.RAISES), TRAINING, (0, 0, 1), (1, 1, 2), (2, 3), amounts=(4.0, 20.0),
          apart=APART[1:6], at_stop=(AtStop.SAVES, AtStop.DIES, AtStop.FAILS),
          first=((What.STOP, What.CTRL_C, *AT_ONCE[:2]), (What.LAUNCHER_PAUSES,))),
    # Ctrl-C three times of a host whose messages take long, while another one is missing.
    Theme((What.STOP, What.RAISES), (0.0,), (0, 1), (2, 3, 3), (1,), amounts=(4.0,),
          apart=(2.0, 3.0, 3.8, 4.0, 4.2, 4.4, 4.6, 4.8),
          first=((What.DELAY,), (What.HOST_LATE,), (What.CTRL_C_THRICE,))),
    # A host that cannot start, nor listen.
    Theme((What.LAUNCHER_PAUSES, What.STOP), (0.2, 0.3, 0.4, 0.5), (0,), (2,), (1,),
          amounts=(4.0, 6.0, 20.0),
          first=((What.PORT_TAKEN,), (What.CANNOT_START,), (What.LAUNCHER_PAUSES,))),
)  # fmt: skip

DELAYS = (0.2, 1.0, 1.5)
STOPPED = (70.0, 200.0, 90.0)
STRANGERS = (*range(KINDS), *[0] * 6, *[KINDS - 1] * 4)
TAKES_AMOUNT = (
    What.RAISES, What.HOOK, What.FORGIVEN, What.LINGERS, What.LEAVES, What.LAUNCHER_PAUSES,
    What.HOST_LATE, What.HOST_SLOW, What.SAVES_LONGER, What.PORT_TAKEN,
    What.STUCK, What.LEFT_STUCK, What.TORCHRUN_STUCK, What.STARTS_SLOWLY, What.STORE_SLOW,
)  # fmt: skip
SAVES = (0.5, 2.0, 6.0, 30.0)


MOST = 5  # faults


def fault(by: random.Random, plan: Plan, theme: Theme, before: Sequence[Fault]) -> Fault:
    """Draw what goes wrong, a while after what went wrong before."""
    kinds = theme.first[len(before)] if len(before) < len(theme.first) else theme.faults
    what = by.choice(kinds)
    if what in OF_THE_START:
        at = by.choice(JOINING)
    elif what in FROM_THE_START:
        at = 0.0
    elif not before or before[-1].what in FROM_THE_START:
        at = by.choice(theme.moments)
    else:
        at = round(before[-1].at + by.choice(theme.apart), 2)
    takes = {What.STRANGER: STRANGERS, What.DELAY: DELAYS, What.LAUNCHER_STOPS: STOPPED}
    takes |= dict.fromkeys(TAKES_AMOUNT, theme.amounts)
    has_rank = what in (*OF_RANKS, *HELD[:2], What.GPU_FAILS, What.KEEPER_HANGS, *KEEPERS)
    return Fault(
        what,
        at,
        host=0 if what in STORES else by.randrange(plan.hosts),
        local_rank=by.randrange(plan.nproc) if has_rank else 0,
        amount=float(by.choice(takes.get(what, (0,)))),
    )


def drawn(by: random.Random) -> Plan:
    """Draw a job of 1 to 16 hosts, and up to five things that go wrong in it."""
    theme = by.choice(THEMES)
    upload = by.choice(theme.uploads)
    script = Script(
        is_python=theme.is_python,
        seconds=by.choice(theme.trains),
        at_stop=by.choice(theme.at_stop),
        save=by.choice(SAVES),
        save_code=by.choice((0, 143)),
        at_break=by.choice(tuple(AtBreak)),
        upload=upload,
        upload_ignores=bool(upload) and by.choice((False, True)),
    )
    plan = Plan(
        hosts=by.choice(theme.hosts),
        nproc=by.choice(theme.nproc),
        script=script,
        max_restarts=by.choice(theme.restarts),
        seed=by.randrange(256),
        runner=by.choice(theme.runners) if theme.runners else None,
        watch=by.choice(theme.watch),
        hang_timeout=theme.hang_timeout,
        start_timeout=theme.start_timeout,
    )
    faults: list[Fault] = []
    for _ in range(max(by.randint(0, MOST), len(theme.first))):
        faults.append(fault(by, plan, theme, faults))
    return plan._replace(faults=tuple(faults))
