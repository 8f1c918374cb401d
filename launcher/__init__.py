"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` plans what runs and where, as one `torch.distributed.run` command; `peers` is the channel
between the hosts' launchers; `run` starts the command and ends it; `warm` imports torch once a host
for warm starts; `watch` finds the rank that others wait for; `result` describes how the job ended;
`cli` calls them. `container` is PID 1 and the toolkit's process; `host` has processes, signals and
sockets for all of these; `text` has words and JSON.

Where to find each decision:

- an option: its row in job/options.py; a default from another option: job/job.py; checks
  between options: job/plan.py, job/prepare.py and job/no_effect.py; search its name for uses
- what a failed rank causes: run/ranks.py chooses the failures that count; `_count` in
  run/machine.py reports them; peers/coordinator.py decides for all hosts
- an exit code: errors.py explains who chooses it; result/causes.py makes those of jobs
- the failure file: cli.py writes the text of the coordinator's result; after a stop, nothing
- how a stop spreads: container/init.py as PID 1; `signalled` in run/machine.py; run/keeper.py for
  each rank of this host; peers/coordinator.py for the other hosts
- what happens to ranks if the launcher is killed: `loop` in run/keeper.py
- how a hang is found and reported: watch/__init__.py, watch/judge.py, peers/coordinator.py
"""

import os

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.abspath(__file__))  # the folder of this package
