"""The errors that people see, the launcher's own exit codes, and what signals mean. Pure."""

from __future__ import annotations

import enum
import signal

from launcher.text.words import printable, short

# What stops a job.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# What else may be sent to a launcher, and would end it without a word. Not those of crashes
# (SIGTRAP, SIGSYS), nor what ends nothing by default; Python ignores SIGPIPE and SIGXFSZ.
# SIGUSR1 and SIGUSR2 are a scheduler's early warning.
OTHERS: tuple[int, ...] = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM)
OTHERS += (signal.SIGPROF, signal.SIGXCPU, signal.SIGIO, signal.SIGPWR)
# Container engines stop systemd's images with SIGRTMIN+3.
OTHERS += tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
# The launcher's own (docs/options.md, "Exit codes"). Who chooses: result/causes.py alone makes
# results of these, and which counts is the coordinator's decision (peers/coordinator.py). A host
# decides by itself where it is alone: without a job (cli.py), without a coordinator
# (peers/link.py), after an error of its own (run/supervisor.py), at the third Ctrl-C, and without
# a command as it departs (run/machine.py). Of the command and the launchers below PID 1, it is
# `of_container`; of the hosts of `sm-launch local`, launcher_tools/local.py.
EXIT_USAGE = 2
EXIT_HOST_LOST = 69
EXIT_SOFTWARE = 70  # EX_SOFTWARE: an error of the launcher itself
EXIT_HUNG = 75  # EX_TEMPFAIL: running it again may help
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127


class Disposition(enum.Enum):
    """What a process does when a signal comes."""

    HANDLES = "handles"
    IGNORES = "ignores"
    DEFAULT = "default"


class LaunchError(Exception):
    """An error that a person can fix: what was seen, what was expected, how to fix it.

    It is shown as one line, without a traceback; with which exit code, result/causes.py says.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class UnexpectedError(LaunchError):
    """A setting has a value that it cannot have."""

    def __init__(self, where: str, value: object, expected: str) -> None:
        super().__init__(f"{where} is {short(value)}; expected {expected}.")


class CannotExecuteError(LaunchError):
    """What is to be started is there, but cannot be executed."""


class NotFoundError(LaunchError):
    """What is to be started is not there, or not installed."""


class NothingToRunError(LaunchError):
    """Neither a script nor a module is named, nor anything that may have been meant as one."""


class CommandFailedError(LaunchError):
    """The command below an init has failed, with this exit code, and no launcher knows why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
