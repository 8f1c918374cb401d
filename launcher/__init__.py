"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` plans what runs and where, as one `torch.distributed.run` command; `peers` is the channel
between the hosts' launchers; `run` starts the command and ends it; `warm` imports torch once per
host for warm starts; `watch` finds the rank that others wait for; `result` describes how the job
ended; `cli` calls them. `container` is PID 1 and the toolkit's process; `host` has processes,
signals, files and the clock for all of these; `text` has words, lines of JSON, and their sockets.

Where to find each decision: all files of a question, in the order in which to open them. What
happens goes through run/supervisor.py, the loop, to run/machine.py, and what machine.py reports to
peers/coordinator.py, on another host by peers/link.py; to follow a way, these need not be opened.

- How an option gets to its use: its row in job/options.py (name, type, default, help);
  job/arguments.py, `parse`, reads all rows, from arguments and variables, and job/toolkit.py,
  `read_input`, makes arguments of hyperparameters; its use is wherever `options.NAME` stands:
  search for that. A default from another option is in job/job.py. Checks between options:
  job/plan.py, job/prepare.py; job/no_effect.py warns. --launcher-grace and --launcher-failure-grace
  are used by run/state.py, `State.grace`, and as `longest_grace` of all hosts by the coordinator.
  For --launcher-hang-timeout: options.py, watch/judge.py (`_fails_at`, `time_is_up`),
  peers/coordinator.py (`_watched`); result/causes.py, `of_hang`, has the exit code, and job/plan.py
  refuses it with --launcher-watch 0.
- How the words of a failure come about: run/describe.py, `end`, in the rank: its exceptions, with
  what had run out (run/clues.py, `behind`); its keeper passes them on. run/keepers.py, `_said`, in
  its launcher: the event, with what the kernel has counted; run/ranks.py: `to_count`, when they
  count, and `failure`; result/raised.py, `headline`: these in one line; result/causes.py,
  `of_rank`: the `Failure` with its notes, and `Failure.text`; peers/coordinator.py: `_fail`, how
  long to wait for a better cause, `_cause`, which is the cause, `_after_failure` and `_verdict`,
  what only the first host knows, at the end of ranks and once more when all have cleared. All hosts
  get the text with `End`, and the final text with `Leave`; cli.py writes it to the failure file;
  after a stop, nothing.
- How a message of a rank gets to the log: run/rank.py, or watch/in_rank.py, sends it; run/events.py
  has its fields, and run/keepers.py reads them; run/ranks.py keeps them; run/summary.py has the
  words.
- How a hang is found and ends the job: watch/__init__.py has the theory, and names the files:
  watch/in_rank.py, `_progress`, in each rank; watch/host.py, `reports`, on its host (`_Rank.at`,
  `no_reply`: a rank that does not reply); watch/waits.py, `stalls_in`: who waits for whom;
  watch/judge.py, `time_is_up`: when it is logged, and fails the attempt; watch/sentences.py has the
  words. From there on it is a failure.
- How a stop gets from PID 1 to each rank, and back: container/init.py, `_stop`, to the launchers
  that have connected by container/presence.py; run/machine.py, `signalled`, and `_end` for
  `EndRanks`; run/keeper.py, `_ending`, which sends `cleared`; run/machine.py, `cleared`, `left`,
  `nothing_left`; peers/coordinator.py, `host_stopped`, is how it spreads to the other hosts, and
  `_if_cleared`; cli.py logs the last lines (run/summary.py, `lines`); result/causes.py,
  `of_container`, has the exit code.
- Where an exit code comes from: errors.py has the launcher's own, and who chooses; result/causes.py
  makes every result of a job; peers/coordinator.py, `_verdict`, chooses among failures. 126 and 127
  are LaunchErrors (host/processes.py, job/), or a rank's own; 137 below PID 1 is a killed
  launcher's. job/help.py, `EXIT_CODES`, has their meaning for users.
- What happens to ranks if the launcher is killed: `loop` in run/keeper.py.
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
