"""The watch: find the rank that others wait for when nothing makes progress, and report it.

How a hang is found, and who may end the job
============================================

    in_rank.py      in each rank, a thread: replies how far its collectives are, and where it is
    host.py         on each host: polls its ranks every --launcher-watch seconds, and reports to
                    the coordinator those without progress for half of --launcher-hang-notify
    judge.py        in the coordinator: takes reports; when a stall is logged, in which words, and
                    when it is a failure
    waits.py        what hosts report; for judge.py: who waits for whom, and who is at the root
    stacks.py       the stacks of all ranks

run/supervisor.py carries requests to the ranks and reports to the coordinator. For the coordinator
`Stalls.hang` is a failure like any other, with exit code 75; a restart may follow. The watch ends
ranks in no other way. When torch's own time-out or a broken connection has ended a rank, the
coordinator also asks the watch why: all ranks are then polled at once, because there may be no
notice yet.

Theory
======

Sequence. All ranks of a process group begin the same collectives in the same order, which torch
numbers from 1 in each group. So the number of the last collective that a rank has begun says how
far it is in that group. A rank makes progress when any of its numbers changes.

Wait. A rank waits in the first of its collectives that has not ended. Of a group in which ranks
wait, those members that have begun least are absent. If all have begun the collective, none is
absent: it does not complete because the network or a GPU fails, or because their calls differ. Of
NCCL's groups it may be unknown which collectives have ended: then ranks that have begun more than
others count as waiting, and a rank that does not reply as one that has begun less.

Root. An absent rank may itself wait, in another group. The ranks at the root are absent somewhere
and wait nowhere; the log names them. If there are none, a collective does not complete, or ranks
wait for each other. A rank that does not reply may have moved on, and begun more: the log names it
as the root only if no other rank is there.

Before the first collective. A rank inside init_process_group or new_group waits for the others that
make the group, as in a collective. A rank stands still if its stack is the same in all polls, and
its process tree uses almost no CPU. Both are logged (unless --launcher-notes is false), and
end nothing: --launcher-hang-timeout counts collectives.

Stall. A wait is stuck if no member of its group makes progress, and no absent rank waits in another
group for one that does: it may still arrive. All stuck waits of a job are one stall, which began
with the last progress of any of their ranks. If several groups that share no rank hang at once, the
log names the root of the wait in which most ranks are; the others' once that is over.

Certainty. The coordinator's knowledge is old: by one poll and the time to report. So a late rank
keeps its last known state until it has missed two polls; a report is analysed 1 s later, with the
other hosts' reports of the same moment; and a time-out counts only after two more polls, which
would have shown progress. If no waiting rank of a wait replies, the wait is uncertain: all may have
continued. Then nothing is logged about it, and nothing is ended.

Notices. A stall is not an error: rank 0 may evaluate for minutes while the others wait. So the log
reports it as a fact, after --launcher-hang-notify seconds (or --launcher-hang-timeout, if that is
less) and after each doubling of its age: often enough to be seen, too seldom to fill the log. The
first notice waits until ranks were polled once after the stall began: a report that was made for
stacks also lists ranks that have just moved. The log also reports a stall's end.

Only --launcher-hang-timeout may fail an attempt, and only the user sets it. It does so when a stall
that is sure has lasted so long; and when a rank's script has ended, its process still runs, and for
so long no rank of the job has been working: all wait, run on after their scripts, or have ended. In
the second case there is no restart, nor after a stall with such a rank at its root: the rank may be
making its last save. No attempt fails because a rank does not reply, because a wait is long, or
because the state is unknown.
"""
