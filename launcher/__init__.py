"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

`job` says what is to be run and where, as one `torch.distributed.run` command; `peers` is the
channel between the hosts' launchers; `run` starts the command and ends it; `result` says how the
job ended; `cli` calls them. CONTRIBUTING.md has the map.
"""

__version__ = "0.1.0"
