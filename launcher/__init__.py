"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` says what is to be run and where, as one `torch.distributed.run` command; `peers` is the
channel between the hosts' launchers; `run` starts the command and ends it; `watch` finds the rank
that others wait for; `result` says how the job ended; `cli` calls them. `container` is PID 1 and
the toolkit's process; `host` is what all stand on: processes, signals, sockets; `text` is words and
JSON.
"""

__version__ = "0.1.0"
