"""The transitions of the coordinator and of a member, as rows: how-it-works.md prints them.

They are data and decide nothing: EVENTS, MESSAGES and COMMANDS have the functions that do. Each
step in tests and in simulated jobs is checked against them (launcher/transitions.py); a job does
not read them. A message is shown as itself, not as `Received`.
"""

from __future__ import annotations

from launcher.peers.coordinator import LOG_MISSING_SECONDS
from launcher.peers.events import (
    Arrived,
    CannotListen,
    Connected,
    Lost,
    Time,
    TooFewFiles,
    Unreachable,
)
from launcher.peers.member import (
    AT_ONCE_SECONDS,
    MOST_RETRY_SECONDS,
    RETRY_SECONDS,
    WELCOME_SECONDS,
    Connecting,
    Ended,
    Greeting,
    Joined,
)
from launcher.peers.messages import (
    AllStacks,
    AtRendezvous,
    Cleared,
    CollectStacks,
    End,
    Failed,
    HostStacks,
    Later,
    Missing,
    NoProgressReport,
    NoRanksAnywhere,
    NoRanksHere,
    RanksSucceeded,
    Refused,
    Restart,
    StacksRequest,
    Start,
    Stop,
    Succeeded,
    Welcome,
)
from launcher.peers.state import JobEnded, JobFailing, JobJoining, JobRestarting, JobRunning
from launcher.result.causes import Cause
from launcher.transitions import Row
from launcher.watch.stacks import GATHER_SECONDS

_PATIENCE = [cause.patience for cause in Cause]
_STARTED = (JobRunning, JobFailing, JobRestarting, JobEnded)

COORDINATOR = (
    Row(
        (JobJoining,),
        (Arrived,),
        (JobRunning, JobFailing, JobEnded),
        "refuse a stranger; `Welcome` a host; `End` if it does not agree; `Start` if it was the "
        "last; if it cannot start, wait for why",
        may_stay=True,
    ),
    Row(
        (JobFailing,),
        (Arrived,),
        (JobEnded,),
        "before the start the same, but for `Start`",
        may_stay=True,
    ),
    Row(
        (JobJoining, JobFailing),
        (CannotListen, TooFewFiles),
        (JobEnded,),
        "`End`: the hosts cannot all meet here",
    ),
    Row(
        (JobJoining,),
        (Time,),
        (JobEnded,),
        f"each {LOG_MISSING_SECONDS:g} s `Missing`; after the start timeout `End`, with 69",
        may_stay=True,
    ),
    Row(
        (JobJoining, JobRunning),
        (Failed, Lost),
        (JobFailing,),
        f"wait for a better cause, {_PATIENCE[0]:g} s to {_PATIENCE[-1]:g} s by the cause",
    ),
    Row((JobJoining, JobRunning, JobRestarting), (Stop,), (JobEnded,), "`End`: stopped"),
    Row(
        (JobRunning, JobFailing),
        (RanksSucceeded,),
        (),
        "note which ranks have ended with 0, and when: a failure that only says that a connection "
        "broke is told with the first of them",
    ),
    Row((JobRunning,), (NoProgressReport,), (), "note of which ranks nothing moves"),
    Row(
        (JobRunning,),
        (Time,),
        (JobFailing,),
        "say who waits for whom, and `CollectStacks` when that is new; say which ranks run on "
        "though their script has ended; after `--launcher-hang-timeout`, fail",
        may_stay=True,
    ),
    Row(
        (JobRunning,),
        (AtRendezvous,),
        (),
        "after a restart: note whose torchrun waits in the rendezvous, or that all have arrived",
    ),
    Row(
        (JobRunning, JobRestarting),
        (Time,),
        (JobEnded,),
        "a restart has taken longer than the restart timeout: `End`, with 69",
    ),
    Row(
        _STARTED,
        (StacksRequest,),
        (),
        f"`CollectStacks` to all hosts, and wait for {GATHER_SECONDS:g} s",
    ),
    Row(
        _STARTED,
        (HostStacks, Time),
        (),
        f"when all hosts have reported so, or {GATHER_SECONDS:g} s are over: `AllStacks` to those "
        "that want them, or the log",
    ),
    Row(
        (JobRunning, JobFailing),
        (Succeeded,),
        (JobEnded,),
        "count the host; when all have succeeded, `End`",
        may_stay=True,
    ),
    Row(
        (JobFailing,), (Failed, Lost), (), "keep the better cause, and the earlier end of the wait"
    ),
    Row(
        (JobFailing,),
        (Stop,),
        (JobEnded,),
        "`End`, stopped, if ranks would be restarted; else the failure came first",
    ),
    Row(
        (JobRestarting,),
        (Failed,),
        (JobEnded,),
        "of a rank: nothing, it belongs to the same restart; of torchrun: `End` with the failure; "
        "of a launcher itself: `End` with that",
    ),
    Row(
        (JobFailing,),
        (Time,),
        (JobRestarting, JobEnded),
        "`Restart` if only ranks have failed or hang, none of broken hardware, and restarts are "
        "left; else `End`",
    ),
    Row((JobRestarting,), (Lost,), (JobEnded,), "`End`, with 69"),
    Row(
        (JobRestarting,),
        (Cleared,),
        (JobRunning, JobEnded),
        "`Start` the next attempt when all hosts have reported so; `End` with the failure if a "
        "process survives SIGKILL, or hardware is broken",
        may_stay=True,
    ),
    Row(_STARTED, (NoRanksHere,), (), "when all hosts have reported so, `NoRanksAnywhere`"),
    Row(
        (JobEnded,),
        (Arrived,),
        (),
        "before the start: `Welcome` a host, and tell it the `End`; refuse a stranger",
    ),
    Row((JobEnded,), (Lost,), (), "do not wait for its `NoRanksHere`"),
)

MEMBER = (
    Row(
        (Connecting,),
        (Unreachable,),
        (Ended,),
        f"try again, after {RETRY_SECONDS:g} s at first and after {MOST_RETRY_SECONDS:g} s in the "
        "end; after it closed one: end, with 69",
        may_stay=True,
    ),
    Row(
        (Connecting,),
        (Connected,),
        (Greeting,),
        f"`Hello`, and what this host has to report; wait {WELCOME_SECONDS:g} s for the reply",
    ),
    Row(
        (Connecting, Greeting),
        (Time,),
        (Ended,),
        f"log each {LOG_MISSING_SECONDS:g} s who is waited for; end, with 69, without a reply or "
        "after the start timeout",
        may_stay=True,
    ),
    Row((Connecting, Greeting), (Failed,), (), "say it with each `Hello` until there is a reply"),
    Row((Connecting, Greeting), (Stop,), (), "the same, and end this host"),
    Row(
        (Greeting,),
        (Later,),
        (Connecting,),
        f"disconnect, and try again in {MOST_RETRY_SECONDS:g} s",
    ),
    Row((Greeting,), (Welcome,), (Joined,), "wait for the other hosts"),
    Row((Greeting,), (Refused,), (Ended,), "end: the coordinator waits for no such host"),
    Row(
        (Greeting,),
        (Lost,),
        (Connecting, Ended),
        f"without a reply and within {AT_ONCE_SECONDS:g} s: try once more, to tell a launcher that "
        "has ended from another program; else end, with 69",
    ),
    Row((Joined,), (Missing,), (), "log which hosts are missing"),
    Row((Joined,), (Start,), (), "start the ranks of an attempt"),
    Row((Joined,), (Restart,), (), "command this host's run"),
    Row((Joined,), (End,), (Ended,), "end; a success only if this host has succeeded"),
    Row(
        (Joined,),
        (Lost,),
        (Ended,),
        "end, with 69, or 128+N after a stop here: nobody decides any more",
    ),
    Row(
        (Joined, Ended),
        (NoRanksAnywhere, CollectStacks, AllStacks),
        (),
        "command this host",
    ),
    Row(
        (Joined,),
        (Failed, Stop, RanksSucceeded, Succeeded, Cleared, AtRendezvous),
        (),
        "report to the coordinator",
    ),
    Row(
        (Joined, Ended),
        (NoRanksHere, NoProgressReport, StacksRequest, HostStacks),
        (),
        "report to the coordinator",
    ),
)
