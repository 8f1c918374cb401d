"""The transitions of a host's run, as rows: how-it-works.md prints its table from them.

They are data and decide nothing: machine.EVENTS has the functions that do. Each step in tests and
in simulated jobs is checked against them (launcher/transitions.py); a job does not read them.
"""

from __future__ import annotations

from launcher.peers.events import AllKnow
from launcher.peers.messages import End, NoRanksAnywhere, Restart, Start
from launcher.run.events import (
    CannotStart,
    ChildEnded,
    CloseRequested,
    GpusChecked,
    LauncherFailed,
    LeftoversFound,
    OrphanEnded,
    PlacesReported,
    RankEnded,
    RankExits,
    RankNotStarted,
    RankRuns,
    ReachedRendezvous,
    ScriptEnded,
    Signal,
    Signalled,
    StartRequested,
    ThreadRaised,
    Time,
    TorchrunEnded,
    TorchrunRuns,
)
from launcher.run.state import (
    CONFIRM_FAILURE_SECONDS,
    DEPART_SECONDS,
    EXIT_BARRIER_SECONDS,
    LAST_INTERRUPT,
    MARGIN_SECONDS,
    PART_OF_STOP_SECONDS,
    Departing,
    Done,
    Ending,
    Failing,
    Joining,
    Restarting,
    Running,
    Waiting,
)
from launcher.transitions import Row

OF_A_RANK = (RankNotStarted, ThreadRaised, RankExits, ScriptEnded, RankEnded)

ROWS = (
    Row((Joining,), (Start,), (Running,), "start torchrun"),
    Row((Joining,), (End,), (Departing,), "start nothing: the job ends before all have joined"),
    Row((Joining, Running, Departing), (CannotStart,), (Departing,), "report `Failed`"),
    Row(
        (Joining,),
        (LauncherFailed,),
        (Departing,),
        "an error of the launcher itself: report `Failed`",
    ),
    Row((Running, Ending), (LauncherFailed,), (Failing,), "report `Failed`"),
    Row(
        (Failing, Ending, Restarting, Waiting),
        (LauncherFailed,),
        (),
        "report `Failed`, unless it is known how the job ends",
    ),
    Row(
        (Joining, Departing, Restarting),
        (Signal,),
        (),
        "report `Stop`; the `End` that follows ends this host",
    ),
    Row((Departing,), (End,), (), "note it"),
    Row(
        (Departing,),
        (AllKnow, Time),
        (Done,),
        f"end: the other hosts know why, or {DEPART_SECONDS:g} s are over",
    ),
    Row((Running,), (ReachedRendezvous,), (), "after a restart: report `AtRendezvous`"),
    Row(
        (Running,),
        (StartRequested,),
        (),
        "let torchrun start the ranks; after a restart, report `AtRendezvous`",
    ),
    Row((Running,), (TorchrunRuns,), (), "note it"),
    Row((Running,), (RankRuns,), (), "let its script run"),
    Row((Failing, Ending, Restarting, Waiting), (RankRuns,), (), "have it end: it comes too late"),
    Row(
        (Running,),
        OF_A_RANK,
        (Failing, Ending),
        "note it; of the first that has ended with 0 report `RanksSucceeded`, and of all of"
        " them before what follows: if a failure counts, report `Failed`; if all have ended"
        " with 0, report `Succeeded`",
        may_stay=True,
    ),
    Row(
        (Running,),
        (Time,),
        (Failing,),
        f"a rank said what it raised {CONFIRM_FAILURE_SECONDS:g} s ago, or torchrun was told to "
        f"end by somebody else {PART_OF_STOP_SECONDS:g} s ago: report `Failed`",
        may_stay=True,
    ),
    Row(
        (Running,),
        (CloseRequested,),
        (Failing,),
        "have torchrun wait; report `Failed` if it ends for a reason of its own",
        may_stay=True,
    ),
    Row(
        (Running,),
        (TorchrunEnded, ChildEnded),
        (Failing,),
        "it was not to end yet: report `Failed`",
    ),
    Row((Running,), (Signal,), (Ending,), "report `Stop`, and stop the ranks"),
    Row(
        (Running, Failing),
        (End, Restart),
        (Ending,),
        "end the ranks, for a stop, a failure or a restart",
    ),
    Row(
        (Running,),
        (Restart,),
        (Failing,),
        "somebody else has told torchrun to end, which no restart fixes: report `Failed`",
    ),
    Row(
        (Failing,),
        (*OF_A_RANK, TorchrunEnded),
        (),
        "report `Failed` of what counts now: it may be a better cause; report `RanksSucceeded`; "
        "once there can be no better one, end the other ranks",
    ),
    Row((Failing,), (TorchrunRuns, CloseRequested, ChildEnded, Signalled), (), "note it"),
    Row((Failing,), (Signal,), (), "report `Stop`: it counts if ranks are to be restarted"),
    Row(
        (Failing,),
        (Time,),
        (Ending,),
        "report `Failed` of what counts now; without a command from the coordinator in its "
        f"wait and {MARGIN_SECONDS:g} s, end the ranks",
        may_stay=True,
    ),
    Row(
        (Running, Failing, Ending),
        (Signal,),
        (Ending, Done),
        f"the {LAST_INTERRUPT}: kill the whole job; end if the driver alone was waited for",
    ),
    Row(
        (Ending,),
        (
            *OF_A_RANK,
            Signalled,
            CloseRequested,
            TorchrunRuns,
            TorchrunEnded,
            ChildEnded,
            OrphanEnded,
            NoRanksAnywhere,
            LeftoversFound,
            GpusChecked,
            Time,
        ),
        (Restarting, Waiting, Done),
        "do what can be done now (below); once nothing remains, go on",
        may_stay=True,
    ),
    Row(
        (Ending,),
        (TorchrunRuns,),
        (Running,),
        "a program that runs torchrun does so again after a success",
    ),
    Row((Ending,), (PlacesReported,), (), "note where ranks are, for the log when they are killed"),
    Row(
        (Ending,),
        (Signal,),
        (Waiting,),
        "while ranks are ended for a restart: report `Stop`, and stop them",
        may_stay=True,
    ),
    Row((Ending,), (Signal,), (), "after this host's success: report `Stop`"),
    Row(
        (Ending,),
        (Signal,),
        (),
        "else the log says it; unless it is known how the job ends, report `Stop`",
    ),
    Row(
        (Ending,),
        (End, Restart),
        (Done,),
        "end them for this reason from now on; a stop leaves the later deadline; all have"
        f" succeeded: torchrun has {EXIT_BARRIER_SECONDS:g} s",
        may_stay=True,
    ),
    Row(
        (Ending,),
        (TorchrunEnded, ChildEnded),
        (Failing,),
        "this host had succeeded, but they failed: report `Failed`",
    ),
    Row(
        (Restarting,),
        (Start,),
        (Running,),
        "start a new torchrun: nothing of the last attempt remains on any host",
    ),
    Row((Restarting, Waiting), (RankEnded,), (), "note it: it had survived SIGKILL"),
    Row((Restarting, Waiting), (End,), (Done,), "end"),
    Row(
        (Waiting,),
        (Restart,),
        (Ending,),
        "nothing has to be ended, but the GPUs' driver is asked as on other hosts",
    ),
    Row((Waiting,), (Signal,), (), "this host has succeeded and others go on: report `Stop`"),
    Row((Done,), (Signal,), (), "only the log says it"),
    Row(
        (Restarting, Waiting),
        (TorchrunEnded, ChildEnded),
        (),
        "note it: it had survived SIGKILL, or what ran it was killed before",
    ),
    Row((Done,), (TorchrunEnded,), (), "note it: what ran it was killed before"),
    Row(
        (Restarting, Waiting, Done),
        (NoRanksAnywhere,),
        (),
        "note it: nothing waits for it any more",
    ),
    Row(
        (Joining, Departing, Restarting, Waiting),
        (Signal,),
        (Done,),
        f"the {LAST_INTERRUPT}: end at once",
    ),
)
