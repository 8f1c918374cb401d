"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` plans what runs and where, as one `torch.distributed.run` command; `peers` is the channel
between the hosts' launchers; `run` starts the command and ends it; `warm` imports torch once a host
for warm starts; `watch` finds the rank that others wait for; `result` describes how the job ended;
`cli` calls them. `container` is PID 1 and the toolkit's process; `host` has processes, signals and
sockets for all of these; `text` has words and JSON.

Where to find each decision: the files of a question, in the order in which to open them.

- How an option gets to its use: its row in job/options.py (name, type, default, help);
  job/arguments.py, `parse`, reads all rows; its use is wherever `options.NAME` stands: search for
  that. A default from another option is in job/job.py. Checks between options: job/plan.py,
  job/prepare.py; job/no_effect.py warns.
- How the words of a failure come about: run/describe.py, `end`, in the rank: its exceptions, with
  what had run out (run/clues.py, `behind`); result/raised.py, `headline`: these in one line;
  result/causes.py, `of_rank`: the `Failure` with its notes; peers/coordinator.py, `_after_failure`:
  which failure is the cause, and what only the first host knows; `Failure.text` in causes.py: the
  text, built once. cli.py writes it to the failure file; after a stop, nothing.
- How a hang's sentence comes about: watch/__init__.py has the theory, and the files in order.
- How a stop gets from PID 1 to each rank: container/init.py lists the steps with their functions,
  five files in all; peers/coordinator.py, `host_stopped`, is how it spreads to the other hosts.
- Where an exit code comes from: errors.py has the launcher's own, and who chooses; result/causes.py
  makes every result of a job; peers/coordinator.py, `_verdict`, chooses among failures.
- Which failures count: run/ranks.py; `_count` in run/machine.py reports them.
- What happens to ranks if the launcher is killed: `loop` in run/keeper.py.
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
