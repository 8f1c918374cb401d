"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` plans what runs and where, as one `torch.distributed.run` command; `peers` is the channel
between the hosts' launchers; `run` starts the command and ends it; `warm` imports torch once per
host for warm starts; `watch` finds the rank that others wait for; `result` describes how the job
ended; `cli` calls them. `container` is PID 1 and the toolkit's process; `host` has processes,
signals, files and the clock for all of these; `text` has words, lines of JSON, and their sockets.

Where each decision is made: for each question a list of files, in the order in which to open them.
Files that are named only below a list, or in brackets, can stay closed. So can those that only
carry events and messages: run/supervisor.py, the loop, makes events for run/machine.py, and does
what that decides; peers/channel.py carries messages between hosts (on every host but the first,
peers/link.py passes them on). run/keepers.py and run/keeper.py are the two ends of what a launcher
and a rank's keeper tell each other.

How an option gets to its use, such as --launcher-failure-grace:

    job/options.py        its row: name, type, default, parser, help
    job/arguments.py      `parse` reads it, from the command line or its variable, by that row
    run/state.py          its use: `options.failure_grace`, in State.grace

  `_launch` (cli.py) calls `prepare` (job/prepare.py), which calls `parse`; hyperparameters are
  arguments by then (job/toolkit.py). The options are then a field of Job (job/job.py), which all
  parts of the launcher get: so the use of any option is where `options.NAME` stands. run/machine.py
  sends what State.grace returns to the keepers (`_end_ranks`), and gives as long to a torchrun that
  still copies output (`left`). `parse` checks each option by itself, job/plan.py checks some
  against each other, and job/prepare.py warns of those without effect.

How the words of a failure come about:

    run/rank.py           `ended`, in the script's process, sends how it ended: `exit_of`, its
                          exceptions, and what may have caused them (run/clues.py)
    run/keepers.py        `_exit_of`, in the launcher: expands tracebacks in messages, adds what the
                          kernel has counted; `_rank_ended`: the process's end, as the keeper has it
    run/ranks.py          `updated` joins both; `to_count`: when a failure counts; `failure`: with
                          which exception of a thread; run/machine.py calls these
    result/causes.py      `of_rank`, which `failure` calls: the Failure; `headline`: its exceptions
                          in one line; `Failure.text`
    peers/coordinator.py  `_fail`: how long to wait for a better cause; `_cause`: which it is;
                          `_decide`, `_verdict`: what only the first host knows (watch/judge.py,
                          peers/sentences.py); `_settled`: once more, for the final text, when
                          all have cleared

  All hosts get the text with `End`, and the final text with `Leave`. cli.py (`_launch`) has
  result/failure.py write it to the file.

How a message of a rank gets to the log:

    run/rank.py           sends it; watch/in_rank.py sends replies to polls
    run/keepers.py        `_said` reads it
    run/events.py         its fields
    run/machine.py        `rank_reports`: what is logged (run/ranks.py keeps it)
    result/causes.py      `Exit`: the fields of an end; `of_rank`: its words

  A reply to a poll goes to watch/host.py (`replied`) instead; watch/waits.py has its fields, and
  watch/judge.py the words. What a keeper itself has to log, run/keepers.py logs at once.

How a hang is found and ends the job, with --launcher-hang-timeout:

    watch/__init__.py     the theory, and what each file does
    watch/in_rank.py      `_progress`, in each rank: how far its collectives are
    watch/host.py         `poll`, and `reports`: its host's ranks without progress, or without a
                          reply (_watch_ranks of run/supervisor.py carries requests and reports)
    watch/waits.py        the fields of such a report; `stalls_in`: who waits for whom
    watch/judge.py        `time_is_up`: logs it at `notice_at`; at `_fails_at` it sets `hang`, a
                          Failure with 75 that is the job's cause like a rank's own (never
                          without the option); `line_of`, `reason_of`: the words
    peers/coordinator.py  `_watched` gives it to `_fail`, which ends the job as after any failure:
                          `_decide`, `_end_all`

  By default only torch's own timeout ends a rank that waits; then `_decide` puts the judge's
  `reason_of_wait` before the words of that rank's failure.

How a stop gets from PID 1 to each rank, and how the job ends:

    container/init.py     `_stop`: to the launchers, whose loops make an event of it
    run/machine.py        `signalled`, `_end_ranks`: Stop to the coordinator, and at once EndRanks
                          to keepers
    run/keeper.py         `_ending`: the rank's end, until nothing is left of it
    peers/coordinator.py  `host_stopped`: End to all hosts
    run/machine.py        `ended`: the others end their ranks, too; `cleared`, `_if_clear`: when all
                          ranks have ended, Cleared to the coordinator, with the number of its End
    peers/coordinator.py  `host_cleared`: if all hosts have, `_leave`: Leave to the others;
                          `_leave_here`: to this host, when these have left
    run/machine.py        `left`: keepers and torchrun end; `nothing_left`, when the loop finds no
                          more children
    result/causes.py      `of_container`: the container's exit code

  cli.py logs the last lines, and reports the exit code to PID 1 (container/init.py, `run`), which
  waits for that and for its command.

Where an exit code comes from:

    errors.py             the codes, and what they mean for users; when a host chooses for itself
    result/causes.py      the code of each failure and stop, down to `of_launcher`; `of_rank` has
                          the rank's own; `of_container`: PID 1's
    peers/coordinator.py  the choice for all hosts: `_fail` and `_cause` among failures,
                          `host_stopped` between a failure and a stop, `host_succeeded` for 0,
                          `_verdict` whether it restarts instead; `_end_all` sends the result,
                          `_settled` chooses again when all have cleared

  cli.py returns the result that Leave has brought. 126 and 127 come from a program that cannot
  be started (host/processes.py), from a script that its keeper cannot start, and from a rank that
  exits with them. 137 comes from a killed rank and, below PID 1, from a killed launcher.

What happens to ranks if the launcher is killed: run/keeper.py, `loop`.
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
