"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` plans what runs and where, as one `torch.distributed.run` command; `peers` is the channel
between the hosts' launchers; `run` starts the command and ends it; `warm` imports torch once per
host for warm starts; `watch` finds the rank that others wait for; `result` describes how the job
ended; `cli` calls them. `container` is PID 1 and the toolkit's process; `host` has processes,
signals, files and the clock for all of these; `text` has words, lines of JSON, and their sockets.

Where each decision is made: for each question the files to open, in that order. Files that are
named only to the right, or below a list, can stay closed. So can those that only carry events and
messages: run/supervisor.py, the loop, makes events for run/machine.py, and does what that decides;
peers/channel.py carries messages between hosts (on every host but the first, peers/link.py passes
them on). run/keepers.py and run/keeper.py are the two ends of what a launcher and a rank's keeper
tell each other.

How an option gets to its use:

    job/arguments.py      `parse` reads it by its row, from the command line or its variable
    job/options.py        the row: name, type, default, help

  The use is wherever `options.NAME` stands. State.grace (run/state.py) chooses the grace or the
  failure grace; `_end_ranks` (run/machine.py) tells it to keepers. Before `parse`,
  hyperparameters become arguments (job/toolkit.py). job/job.py has defaults that depend on other
  options; job/plan.py checks options against each other, and job/prepare.py warns of those without
  effect.

How the words of a failure come about:

    run/rank.py           `ended`, in the script's process, sends how it ended: `exit_of`, its
                          exceptions, and what may have caused them (run/clues.py)
    run/keepers.py        `_exit_of`, in the launcher: adds what the kernel has counted;
                          `_rank_ended`: the exit code and the last words, as the keeper has them
    run/ranks.py          `to_count`: when a failure counts; `failure`: which exception of a thread
                          goes with it; run/machine.py calls both (_count, _failure)
    result/causes.py      `of_rank`: the Failure; `headline`: its exceptions in one line;
                          `Failure.text`
    peers/coordinator.py  `_fail`: how long to wait for a better cause; `_cause`: which it is;
                          `_decide`, `_verdict`: what only the first host knows; `_settled`: once
                          more, for the final text, when all have cleared
    result/failure.py     `write_failure`: the file; cli.py calls it after a failure

  All hosts get the text with `End`, and the final text with `Leave`.

How a message of a rank gets to the log:

    run/rank.py           sends it; watch/in_rank.py sends replies to polls
    run/keepers.py        `_said` reads it
    run/ranks.py          `updated` keeps it
    result/causes.py      `Exit`: the fields of an end; `of_rank`: its words
    watch/waits.py        `StalledRank`: the fields of a reply; watch/judge.py has the words
    run/events.py         the fields of other messages

How a hang is found and ends the job:

    watch/__init__.py     the theory, and what each file does
    watch/in_rank.py      `_progress`, in each rank: how far its collectives are
    watch/host.py         `reports`: its host's ranks without progress, or without a reply
                          (_watch_ranks of run/supervisor.py carries requests and reports)
    watch/waits.py        the fields of such a report; `stalls_in`: who waits for whom
    watch/judge.py        `time_is_up`: logs it at `notice_at`; from `_fails_at` on (by default
                          never) `hang` is a Failure with 75; `line_of`, `reason_of`: the words
    peers/coordinator.py  `_watched`: `_fail` counts it at once, as a rank's own

  By default only torch's own timeout ends a rank that waits; `_decide` puts `reason_of_wait` of the
  judge before its words.

How a stop gets from PID 1 to each rank, and how the job ends:

    container/init.py     `_stop`: to the launchers, whose loops make an event of it
    run/machine.py        `signalled`, `_end_ranks`: Stop to the coordinator, and at once EndRanks
                          to keepers
    peers/coordinator.py  `host_stopped`: End to all hosts
    run/machine.py        `ended`: other hosts end their ranks, too
    run/keeper.py         `_ending`: the rank's end, until nothing is left of it
    run/machine.py        `cleared`: Cleared to the coordinator, when all its ranks have ended
    peers/coordinator.py  `host_cleared`: if all hosts have, `_leave`: Leave to all, here last
    run/machine.py        `left`, then `nothing_left`, when the loop finds no more children
    cli.py                `_launch` logs the last lines; `main` reports the exit code to PID 1
    container/init.py     `run` waits for that, and for its command
    result/causes.py      `of_container`: the container's exit code

Where an exit code comes from:

    errors.py             the launcher's own codes; who chooses a code, also without a coordinator;
                          `EXIT_CODES`: what all codes mean for users
    result/causes.py      makes results of failures and stops; `of_container`: PID 1's
    peers/coordinator.py  `_cause` chooses among failures, `_verdict` between a restart and its
                          result, `host_stopped` between a failure and a stop; `_end_all` ends all
                          ranks; `_leave`: the final result
    cli.py                `_launch` returns the result that Leave has brought; `main` its code

  A rank's own code travels with the words of its failure. The comment above the codes (errors.py)
  says when a host decides for itself.

  126 and 127 are LaunchErrors (host/processes.py, job/), a rank's own, or its keeper's for a script
  that it cannot start. 137 is that of a killed rank or, below PID 1, of a killed launcher.

What happens to ranks if the launcher is killed: run/keeper.py, `loop`.
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
