"""Reads `sm-launch local [OPTION ...] -- [LAUNCHER'S OPTION ...] SCRIPT [ARGUMENT ...]`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from launcher.errors import LaunchError
from launcher.job import arguments, target
from launcher.job.options import OPTIONS, Options, checked, whole
from launcher.text.words import flag
from launcher_tools.parser import Parser

_MOST_HOSTS = 100
LATE, STOP, KILL = "late", "stop", "kill"  # actions on a host: to start it, perhaps late
_ACTS = (LATE, STOP, KILL)  # at the same time, in this order
_TARGETS = ("--train-script", "--train-module")


class Event(NamedTuple):
    """An action on a host: `at` seconds since the start; `host` is "" for all hosts."""

    at: float
    act: str  # LATE, STOP or KILL
    host: str

    @property
    def typed(self) -> str:
        """As on the command line: `--kill algo-2@20`."""
        return f"--{self.act} {self.host}@{self.at:g}"


class Choices(NamedTuple):
    """The checked options and arguments."""

    hosts: tuple[str, ...]  # algo-1 ...
    channels: Mapping[str, str]  # name: folder
    run_dir: str  # "": one named after the time
    events: tuple[Event, ...]
    target: Sequence[str]  # --train-script or --train-module, and its value; () if among the words
    words: Sequence[str]  # the launchers' own
    script_args: Sequence[str]
    options: Options  # the launchers'
    doctor: bool  # run doctor on each host; there may be no target


HELP = """\
usage: sm-launch local [OPTION ...] -- SCRIPT [ARGUMENT ...]
       sm-launch local [OPTION ...] -- -m MODULE [ARGUMENT ...]

Run a training job on this machine as if on several SageMaker hosts. Each host has its own launcher,
its own folder in place of /opt/ml, and its share of this machine's cores and GPUs. Arguments reach
the script as SDK v2 passes hyperparameters: sorted, and `--flag true` becomes `--flag True`; SDK v3
leaves such words and the order.

  --hosts N                number of hosts, algo-1 to algo-N (default: 2)
  --nproc-per-node auto|N  processes per host (default: auto, one per GPU, else 1)
  --channel NAME=DIR       an input channel (train=DIR is SM_CHANNEL_TRAIN on every host)
  --run-dir DIR            where to create the hosts' folders (default: runs/local-DATE-TIME); if
                           DIR is not empty, DIR-2 and so on
  --kill HOST@SECONDS      kill all of a host's processes this many seconds after the start
  --stop [HOST]@SECONDS    send SIGTERM to one host or to all, as SageMaker does to stop a job
  --late HOST@SECONDS      start a host this many seconds later than the others
  --doctor                 run sm-launch doctor on each host instead of a job
  -h, --help               show this help

--channel, --kill, --stop and --late may be repeated. --launcher-... options go anywhere after --;
they apply to every host. Ctrl-C stops the job as SageMaker would; a second Ctrl-C kills it. The
exit code is that of the job."""
# Values that a script's own argument of that name would hardly have.
_AT = r"(algo-\d+)?@[\d.]+"
_ONLY_OURS = {"--hosts": r"\d{1,3}", "--kill": _AT, "--stop": _AT, "--late": _AT}


def _parser() -> Parser:
    parser = Parser("local")
    for option, default in (("--hosts", "2"), ("--nproc-per-node", None), ("--run-dir", "")):
        parser.add_argument(option, default=default)
    for option in ("--channel", *(f"--{act}" for act in _ACTS)):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--doctor", action="store_true")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Choices:
    """Return the checked options and arguments.

    Raises LaunchError for any mistake, before anything is created or started.
    """
    own = argv[: list(argv).index("--")] if "--" in argv else argv
    values, unknown = _parser().parse_known_args(own)
    if unknown:
        script = next((word for word in unknown if not word.startswith("-")), "")
        if script and len(own) == len(argv):
            raise LaunchError(
                f"-- is missing before {script}; expected sm-launch local [OPTION ...] -- {script}."
            )
        what = "goes after --" if unknown[0].startswith(flag("")) else "is not an option"
        raise LaunchError(f"{unknown[0]} {what}; see sm-launch local --help.")
    count = checked("--hosts", values.hosts, whole(1, _MOST_HOSTS))
    hosts = tuple(f"algo-{number}" for number in range(1, count + 1))
    events = schedule(hosts, vars(values))
    words, rest = arguments.split(argv[len(own) + 1 :])
    is_named = any(word.partition("=")[0] in _TARGETS for word in words)
    named, script_args = ((), rest) if is_named or (values.doctor and not rest) else _target(rest)
    if values.nproc_per_node is not None:
        checked("--nproc-per-node", values.nproc_per_node, OPTIONS["nproc_per_node"].parse)
        words.append(f"{flag('nproc_per_node')}={values.nproc_per_node}")
    channels = _channels(values.channel)
    return Choices(
        hosts=hosts,
        channels=channels,
        run_dir=values.run_dir,
        events=events,
        target=named,
        words=words,
        script_args=script_args,
        options=_of_launchers([*named, *words], environ) if is_named or named else Options(),
        doctor=values.doctor,
    )


def _target(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the script or module as the launcher's option, and the script's arguments."""
    if words[:1] == ["-m"] and len(words) > 1:
        return (_TARGETS[1], words[1]), words[2:]
    if not words or words[0].startswith("-"):
        seen = f"found {words[0]}" if words else "found no script"
        raise LaunchError(
            f"{seen} after --; expected a script, or -m and a module: "
            "sm-launch local --hosts 3 -- train.py --epochs 3."
        )
    return (_TARGETS[0], words[0]), words[1:]


def meant_for_local(script_args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of the script that look like options of `sm-launch local`."""
    for word, value in zip(script_args, [*script_args[1:], ""]):
        name, equals, text = word.partition("=")
        if re.fullmatch(_ONLY_OURS.get(name, "(?!)"), text if equals else value, re.ASCII):
            yield word if equals else f"{word} {value}"


def _channels(typed: Sequence[str]) -> dict[str, str]:
    channels: dict[str, str] = {}
    for text in typed:
        name, _, folder = text.partition("=")
        if not (folder and re.fullmatch(r"(?!\.\.?$)[\w.-]+", name, re.ASCII)):
            raise LaunchError(f"--channel is {text!r}; expected NAME=DIR such as train=data/train.")
        if name in channels:
            raise LaunchError(f"--channel {name} is given twice; expected one folder per channel.")
        if not os.path.isdir(folder):
            problem = "is a file" if os.path.exists(folder) else "does not exist"
            raise LaunchError(f"--channel {name}: {folder} {problem}; expected a folder.")
        channels[name] = folder
    return channels


def _of_launchers(words: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the launchers' options. Raises LaunchError, as each of them would."""
    chosen = arguments.parse(words, environ)
    try:
        return target.located(chosen, (chosen.script_dir,))
    except LaunchError as error:
        name, _, rest = str(error).partition(" ")  # an option's name that the user did not type
        raise LaunchError(rest if name in _TARGETS else str(error)) from None


def schedule(hosts: Sequence[str], typed: Mapping[str, Sequence[str]]) -> tuple[Event, ...]:
    """Return the events in their order, from the values typed for --late, --stop and --kill.

    Raises LaunchError for a value that is not HOST@SECONDS, for a host that does not exist, for a
    host that is late twice, and for a host that would be stopped or killed before it starts.
    """
    starts = {host: Event(0.0, LATE, host) for host in hosts}
    others = []
    for event in [_parsed(act, text, hosts) for act in _ACTS for text in typed[act]]:
        start = starts.get(event.host)
        if event.act != LATE:
            others.append(event)
            if start and 0 < start.at >= event.at:
                raise LaunchError(
                    f"{event.typed} is due before {start.typed} starts that host; expected a later "
                    "time."
                )
        elif start and start.at:
            raise LaunchError(f"--late is given twice for {event.host}; expected once per host.")
        else:
            starts[event.host] = event
    return tuple(sorted([*starts.values(), *others], key=lambda event: event.at))


def _parsed(act: str, text: str, hosts: Sequence[str]) -> Event:
    host, at, seconds = text.rpartition("@")
    is_number = re.fullmatch(r"\d+(\.\d*)?|\.\d+", seconds, re.ASCII)
    if not at or not is_number or math.isinf(float(seconds)):
        form = "HOST@SECONDS such as algo-1@30" + (", or @30" if act == STOP else "")
        raise LaunchError(f"--{act} is {text!r}; expected {form}.")
    if not host and act != STOP:
        raise LaunchError(
            f"--{act} {text} names no host; expected, for example, {hosts[-1]}{text}."
        )
    if host and host not in hosts:
        span = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
        raise LaunchError(f"--{act} {text} names {host!r}; the hosts are {span}.")
    return Event(float(seconds), act, host)
