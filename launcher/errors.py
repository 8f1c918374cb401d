"""The errors that people see, the launcher's own exit codes, and what signals mean. Pure."""

from __future__ import annotations

import enum
import signal

from launcher.text.words import flag, printable, short

# Signals that stop a job.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # a scheduler's
# Other signals that may be sent to a launcher, and would end it silently. Not those of crashes
# (SIGTRAP, SIGSYS), nor those that end nothing by default; Python ignores SIGPIPE and SIGXFSZ.
OTHERS: tuple[int, ...] = (*WARNINGS, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
OTHERS += (signal.SIGXCPU, signal.SIGIO, signal.SIGPWR)
# Container engines stop systemd's images with SIGRTMIN+3.
OTHERS += tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
# The launcher's own exit codes (docs/options.md, "Exit codes"). Only result/causes.py makes results
# of them, and the coordinator decides which result counts (peers/coordinator.py). A host decides
# for itself only
# - without a job (cli.py), or a coordinator (`alone` of run/machine.py);
# - after an error of its own launcher (run/supervisor.py);
# - at the third Ctrl-C, or if the program that runs torchrun fails or is stopped after a success
#   (run/machine.py);
# - below PID 1, for its container: `of_container` of result/causes.py, among the command's code and
#   its launchers'. launcher_tools/local.py chooses among the hosts of `sm-launch local`.
EXIT_USAGE = 2
EXIT_HOST_LOST = 69
EXIT_SOFTWARE = 70  # EX_SOFTWARE: an error of the launcher itself
EXIT_HUNG = 75  # EX_TEMPFAIL: running it again may help
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
# All exit codes, for users: --launcher-help and docs/options.md show this table.
EXIT_CODES = {
    "0": "every rank succeeded",
    "the script's own": "of the failed rank (1 for an exception), or of neuron_parallel_compile",
    "128 + n": "the rank that caused the failure was killed by signal n",
    "143, 130": "the job was stopped by SIGTERM or SIGINT (129, 131: SIGHUP, SIGQUIT)",
    f"{EXIT_USAGE}": "the configuration is wrong; no rank was started",
    f"{EXIT_HOST_LOST}": "a host never joined or was lost, or torchrun failed or was killed",
    f"{EXIT_SOFTWARE}": "the launcher itself failed; see its log",
    f"{EXIT_HUNG}": f"there was no progress for {flag('hang_timeout')} seconds",
    f"{EXIT_CANNOT_EXECUTE}, {EXIT_NOT_FOUND}": "a program, such as torchrun, "
    "cannot be executed, or is missing",
}


class Disposition(enum.Enum):
    """What a process does when it gets a signal."""

    HANDLES = "handles"
    IGNORES = "ignores"
    DEFAULT = "default"


class LaunchError(Exception):
    """An error that a person can fix: what was seen, what was expected, how to fix it.

    It is shown as one line, without a traceback; `exit_code` is the launcher's.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, exit_code: int = 0) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code or self.exit_code


class UnexpectedError(LaunchError):
    """A setting has a value that it cannot have."""

    def __init__(self, where: str, value: object, expected: str) -> None:
        super().__init__(f"{where} is {short(value)}; expected {expected}.")


class CannotExecuteError(LaunchError):
    """The program to start exists, but cannot be executed."""

    exit_code = EXIT_CANNOT_EXECUTE


class NotFoundError(LaunchError):
    """The program to start does not exist, or is not installed."""

    exit_code = EXIT_NOT_FOUND


class NothingToRunError(LaunchError):
    """No script or module is named, and no argument looks like one."""
