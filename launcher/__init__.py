"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` says what is to be run and where, as one `torch.distributed.run` command; `peers` is the
channel between the hosts' launchers; `run` starts the command and ends it; `watch` finds the rank
that others wait for; `result` says how the job ended; `cli` calls them. `container` is PID 1 and
the toolkit's process; `host` is what all stand on: processes, signals, sockets; `text` is words and
JSON.

Where it is decided:

- an option: its row in job/options.py; a default from another option, job/job.py; checks between
  options, job/plan.py, job/prepare.py and job/no_effect.py; its uses have its name
- what a failed rank leads to: run/ranks.py says which failures count; `_count` in run/machine.py
  reports them; peers/coordinator.py decides for all hosts
- an exit code: errors.py says who chooses it; result/causes.py makes all of them
- the failure file: cli.py writes what the coordinator's result says; after a stop, nothing
- who hears of a stop: container/init.py as PID 1; `signalled` in run/machine.py; run/keeper.py for
  each rank of this host; peers/coordinator.py for the other hosts
- what becomes of ranks if the launcher is killed: `loop` in run/keeper.py
- that a rank hangs, and what comes of it: watch/__init__.py, watch/judge.py, peers/coordinator.py
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
