"""What a simulated launcher does: it carries out what the state machines decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable

from launcher.errors import EXIT_NOT_FOUND
from launcher.events import Log
from launcher.peers import events as channel
from launcher.protocol import decoded, encoded
from launcher.result.causes import Cause, Failure, Result
from launcher.run import events as own
from simulation.plan import What
from simulation.ranks import Rank

if TYPE_CHECKING:
    from simulation.launcher import Launcher

_REACHES = (0.0005, 0.01)  # seconds that a connection takes, where it comes to be
_NO_ANSWER = 4.0  # seconds, until one that does not is given up

# On this host


def start(launcher: Launcher, action: own.Start) -> None:
    """Start torchrun, if it can be executed."""
    launcher.torchrun = launcher.job.start_torchrun(launcher.machine)
    if launcher.torchrun is None:
        text = f"launcher: {launcher.machine.name}: cannot execute python: no such file\n"
        failure = Failure(Cause.OWN, EXIT_NOT_FOUND, text)
        if launcher.host.peers is None:
            launcher.end(failure.result)  # by a LaunchError
        else:
            launcher.learn(own.CannotStart(failure))


def note_responses(launcher: Launcher, action: own.NoteResponses) -> None:
    """See what each rank that runs does at a signal."""
    at_stop = {}
    for rank in launcher.host.run.alive:
        process = launcher.machine.processes.get(rank.pid)
        runs = isinstance(process, Rank)
        at_stop[rank.pid] = process.response(action.number) if runs else own.AtSignal.DIES
    launcher.learn(own.Responses(at_stop))


def signal_torchrun(launcher: Launcher, action: own.SignalTorchrun) -> None:
    """Send torchrun a signal, or the program that runs it."""
    assert launcher.torchrun
    if launcher.machine.runner:
        launcher.machine.runner.told(action.number)
    else:
        launcher.torchrun.signal(action.number)


def signal_processes(launcher: Launcher, action: own.SignalProcesses) -> None:
    """Send processes a signal; they may be gone."""
    for pid in action.pids:
        process = launcher.machine.processes.get(pid)
        if process:
            process.signal(action.number)


def signal_group(launcher: Launcher, action: own.SignalGroup) -> None:
    """Send a signal to what a rank has started."""
    for process in list(launcher.machine.processes.values()):
        if process.session == action.pid != process.pid:
            process.signal(action.number)


def answer(launcher: Launcher, action: own.Answer) -> None:
    """Let torchrun go on."""
    torchrun = launcher.machine.torchrun
    if torchrun:
        seconds = launcher.job.random.uniform(0.0005, 0.003)
        launcher.clock.after(seconds, torchrun.answered, launcher.asked, action.timeout)


def look(launcher: Launcher, action: own.Look) -> None:
    """Find what runs: all of it, or what is neither torchrun nor below it."""
    found = []
    for process in launcher.machine.processes.values():
        if not (action.behind and process.is_below(launcher.torchrun)):
            found.append((process.pid, process.session))
    launcher.learn(own.Remaining(tuple(found)))


# On the network


def listen(launcher: Launcher, action: channel.Listen) -> None:
    """Listen, if that is possible."""
    if launcher.job.of(launcher.machine, What.TOO_FEW_FILES):
        launcher.hear_channel(channel.TooFewFiles(64, len(launcher.job.names) + 16))
    launcher.job.network.listen(launcher)


def stop_listening(launcher: Launcher, action: channel.StopListening) -> None:
    """Take no more connections."""
    launcher.job.network.stop_listening()


def accept(launcher: Launcher, action: channel.Accept) -> None:
    """Take connections again."""
    launcher.job.network.accept()


def connect(launcher: Launcher, action: channel.Connect) -> None:
    """Connect to the first host, after a wait."""
    launcher.clock.after(action.wait, reach, launcher)


def reach(launcher: Launcher) -> None:
    """Connect to the first host now."""
    if not launcher.runs:
        return
    end = launcher.job.network.connect(launcher)
    if isinstance(end, str):
        slow = end == "it does not answer"
        seconds = _NO_ANSWER if slow else launcher.job.random.uniform(*_REACHES)
        launcher.clock.after(seconds, launcher.hear_channel, channel.Unreachable(end))
    else:
        launcher.hear_channel(channel.Connected(end.conn, launcher.job.names[0], "10.0.0.2"))


def look_up(launcher: Launcher, action: channel.LookUp) -> None:
    """Look names up: those of hosts that have started resolve."""
    for name in action.hosts:
        resolves = launcher.job.machine(name).has_started
        seconds = launcher.job.random.uniform(0.01, 3)
        launcher.clock.after(seconds, launcher.hear_channel, channel.LookedUp(name, resolves))


def send(launcher: Launcher, action: channel.Send) -> None:
    """Send a message."""
    launcher.ends[action.conn].send(_over_the_wire(action.message))


def send_all(launcher: Launcher, action: channel.SendAll) -> None:
    """Send a message on several connections."""
    message = _over_the_wire(action.message)
    for conn in action.conns:
        launcher.ends[conn].send(message)


def close(launcher: Launcher, action: channel.Close) -> None:
    """Close a connection."""
    launcher.ends[action.conn].close()


def fail(launcher: Launcher, action: channel.Fail) -> None:
    """End by a LaunchError."""
    launcher.end(Result(action.exit_code, f"launcher: {action.text}\n"))


def log(launcher: Launcher, action: Log) -> None:
    """Nothing: the trace has it."""


def _over_the_wire(message: Mapping[str, Any]) -> dict[str, Any]:
    return decoded(encoded(message))


DO: dict[type, Callable[..., None]] = {
    Log: log,
    own.Start: start,
    own.NoteResponses: note_responses,
    own.SignalTorchrun: signal_torchrun,
    own.SignalProcesses: signal_processes,
    own.SignalGroup: signal_group,
    own.Answer: answer,
    own.Look: look,
    channel.Listen: listen,
    channel.StopListening: stop_listening,
    channel.Accept: accept,
    channel.Connect: connect,
    channel.LookUp: look_up,
    channel.Send: send,
    channel.SendAll: send_all,
    channel.Close: close,
    channel.Fail: fail,
}
