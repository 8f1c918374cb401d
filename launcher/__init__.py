"""A torchrun-style launcher for PyTorch training jobs on SageMaker.

One arrow of values, pure until the process starts: `options` and `cluster` say what was
asked for and where we are, `plan` turns that into one `torch.distributed.run` command,
`supervise` runs it, `failure` says what went wrong, and `cli` wires them together.
`agent` and `rank` run in the child processes only.
"""

__version__ = "0.1.0"
