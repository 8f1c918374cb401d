"""The watch: which rank the others wait for while nothing makes progress, and what comes of it.

How a hang is found, and who may end the job
============================================

    in_rank.py      in each rank, a thread: replies how far its collectives are, and where it is
    host.py         on each host: polls its ranks every --launcher-watch seconds, and has the
                    coordinator know which have made no progress for half the time to a notice
    waits.py        in the coordinator: who waits for whom, and who is at the root; as plain values
    sentences.py    those values in words
    judge.py        in the coordinator: when a stall is logged, and when it is a failure
    overview.py     what the coordinator hands reports to: lines and messages come back
    progress.py     what ranks reply and hosts report, checked; stacks.py, the stacks of all ranks

run/supervisor.py carries requests to the ranks and reports to the coordinator, which makes a
failure of `Stalls.hang`, with exit code 75, after which there may be a restart. The watch ends
ranks in no other way. The coordinator also asks it why a rank had waited whose own time-out
(torch's) has ended it: all ranks are then polled at once, since that may be before any notice.

Theory
======

Sequence. All ranks of a process group begin the same collectives in the same order, which torch
numbers from 1 in each group. So the number of the last collective that a rank has begun says how
far it is in that group. A rank makes progress when any of its numbers changes.

Wait. A rank waits in the first collective that it has begun and that has not ended. A member of the
group that has not begun it is absent, and is what the rank waits for. If all have begun it, none is
absent: it does not complete, since the network or a GPU fails, or since they did not call the same.

Root. An absent rank may itself wait, in another group. The ranks at the root of the wait are absent
somewhere and wait nowhere; they are named. If there are none, a collective does not complete, or
ranks wait for each other. Of a rank that does not reply, the wait may have ended or another rank
may be at the root: it is named only where no other is at the root.

Before the first collective. A rank inside init_process_group or new_group waits for the others that
make the group, as in a collective. A rank stands still whose stack is the same in all polls, while
it and all below it use next to no CPU. Both are logged, and end nothing: --launcher-hang-timeout
counts collectives.

Stall. Ranks belong together that are members of groups in which one of them waits, directly or
through others. They stall when none of them makes progress; the stall began with the last progress
of any. While one of them makes progress nothing is logged: it may arrive yet.

When one is sure. What the coordinator knows is old: by one poll and the time to report. So a rank
whose reply is late counts as it was until it has missed two polls, a report is analysed 1 s later,
with the other hosts' of the same moment, and a time-out counts as over only after two more polls,
which would have shown progress. Of a wait of which none of the waiting ranks replies one is
not sure: all may have continued. Nothing is logged of it then, and nothing is ended.

Notices. A stall is no fault: rank 0 may evaluate for minutes while the others wait. So it is logged
as a fact, after --launcher-hang-notify seconds and after each doubling of its age: often enough to
be seen, too seldom to fill the log. That it is over is logged too.

What may fail an attempt: --launcher-hang-timeout, which only the user sets, and nothing else. It
does so when one is sure of a stall that has lasted so long; and when the script of a rank has
ended, its process runs on, and for so long no rank of the job has done anything but to wait, to run
on so, or to have ended. In the second case there is no restart, nor after a stall with such a rank
at its root: what it does may be its last save. Never does one fail because a rank does not reply,
because a wait is long, or because nothing is known.
"""
