"""In a child process: imports torch and prints what it has, a JSON object a line.

Executed as text (`python -c`). It imports nothing of the launcher's. What may hang comes last: a
line that was printed counts.
"""

import json
import sys
from typing import Any, NoReturn


def say(**found: object) -> None:
    """Print what was found."""
    print("\n" + json.dumps(found), flush=True)


class ArgumentsRefused(Exception):
    """torchrun does not take its arguments."""


def refused(words: list[str]) -> str:
    """Return why torchrun would not take these arguments, "" if it would."""
    from torch.distributed import run

    def refuse(message: str) -> NoReturn:
        raise ArgumentsRefused(message)

    parser: Any = run.get_args_parser()
    parser.error = refuse
    parser.print_help = lambda *_: None
    parser.exit = lambda *_: refuse("its arguments ask for its help text, not for a job")
    try:
        script = parser.parse_args(words).training_script
    except ArgumentsRefused as error:
        return str(error)
    return "" if script == words[words.index("--") + 1] else f"unrecognized arguments: {script}"


def look_at_torch() -> None:
    """Print the version, then the backends, then what CUDA has."""
    try:
        import torch
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        say(missing=missing, problem=f"{type(error).__name__}: {error}")
        return
    cuda = getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None) or ""
    say(version=str(torch.__version__), cuda=cuda)
    import torch.distributed as dist

    if not dist.is_available():
        say(distributed=False)
        return
    have = {
        name: getattr(dist, f"is_{name}_available", lambda: False)()
        for name in ("nccl", "gloo", "mpi")
    }
    say(backends=[name for name, there in have.items() if there])
    if sys.argv[1:]:
        say(refused=refused(sys.argv[1:]))
    if have["nccl"]:
        say(nccl=".".join(map(str, torch.cuda.nccl.version())))
    if not cuda:
        return
    try:
        say(devices=torch.cuda.device_count())
        torch.cuda.init()
    except Exception as error:
        say(cuda_problem=str(error))


if __name__ == "__main__":
    look_at_torch()
