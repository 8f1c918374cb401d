"""A host's log lines as its ranks end, and its last: how the job ended, where time went. Pure."""

from __future__ import annotations

import math
import re
import signal

from launcher.result.causes import NO_RESTART
from launcher.run import ranks
from launcher.run.ranks import Rank
from launcher.run.state import State, Why
from launcher.text.words import lasted, plural, signal_name

# The last line counts all seconds from the launcher's start.
_SINCE_START = re.compile(r", \d+ s after start")


def stopping(state: State, number: int) -> list[str]:
    """Return the lines to log as ranks get a stop, whose signal has this `number`."""
    host, grace = state.job.current_host, state.grace(Why.STOP)
    line = f"{signal_name(number)}: stopping; the ranks of {host} have {grace:g} s to save."
    return [line, *ranks.failed_before(state.ranks.values(), number, host)]


def still_running(state: State, seconds: float) -> str:
    """Return the line about the ranks that run `seconds` before they are killed."""
    running = f"{plural(len(state.alive), 'rank')} still running at the end of the grace period"
    return f"{running}: SIGKILL follows in {seconds:g} s."


def lines(state: State, now: float) -> list[str]:
    """Return the last lines of the log of a job that has a result."""
    host, result = state.job.current_host, state.result
    assert result
    took = f"{_took(state, now)}."
    restarts = [f"after {plural(state.attempt - 1, 'restart')}"] if state.attempt > 1 else []
    if result.stop_signal or not result.exit_code:
        stop = result.stop_signal and f"stopped by {signal_name(result.stop_signal)}"
        how = " ".join([stop or "every rank succeeded", *restarts])
        return [*_unsaved(state), f"{host}: {how}; {took}"]
    details = result.text.splitlines()[1:]
    said = [result.cause] if result.cause != state.cause else []
    if details and details[0].startswith(NO_RESTART):
        said.append(f"{details.pop(0)}.")
    code = [_SINCE_START.sub("", line) for line in details if line.startswith("exit code ")][:1]
    return [*said, f"{host}: " + "; ".join([*code, *restarts, took])]


def says_unsaved(state: State) -> bool:
    """Tell whether all ranks that got a stop died of it, as the log then says."""
    reached, died = _died(state)
    return bool(died) and len(died) == len(reached)


def _unsaved(state: State) -> list[str]:
    """Return the lines of the ranks that died of the stop's signal, or were killed at its end."""
    reached, died = _died(state)
    if not (state.result and reached):
        return []
    name, grace = signal.Signals(state.result.stop_signal).name, state.grace(Why.STOP)
    by = state.times.closes + grace - state.times.started
    late = [rank for rank in reached if rank.exit_code == -signal.SIGKILL and rank.ended_at >= by]
    host, of_all, lines = state.job.current_host, plural(len(reached), "rank"), list[str]()
    if died:
        how = f"had no {name} handler yet: killed without saving"
        lines.append(
            f"{host}: {len(died)} of {of_all} {how}; install one at the top of the script."
        )
    if late:
        lines.append(f"{host}: {len(late)} of {of_all} did not exit within {grace:g} s: killed.")
    return lines


def _died(state: State) -> tuple[list[Rank], list[Rank]]:
    """Return the ranks that got the stop while they ran, and those that died of it."""
    number = state.result.stop_signal if state.result else 0
    reached = ranks.got_signal(state.ranks.values()) if number else []
    return reached, [rank for rank in reached if ranks.died_of_stop(rank, number)]


def _took(state: State, now: float) -> str:
    """Return in words how long the job took on this host, and each part of that."""
    parts = [f"{part} {lasted(seconds)}" for part, seconds in where_time_went(state, now)]
    if math.isinf(state.times.started):
        parts.append("nothing was started")
    return f"{lasted(now - state.times.began)} in total: {', '.join(parts)}"


def where_time_went(state: State, now: float) -> list[tuple[str, float]]:
    """Return the parts of the time from the launcher's start until now; they add up to it.

    All time from the first attempt's start to the last one's counts as lost: only the script knows
    where it resumes. A single host joins nobody: its time before the start counts as joining.
    """
    times, has_peers = state.times, state.job.has_peers
    if math.isinf(times.started):
        return [("joining", now - times.began)] if has_peers else []
    assert state.result
    is_success, is_stop = state.result.exit_code == 0, state.result.stop_signal
    # Otherwise that is torchrun's own end.
    closes = math.inf if is_success and now - times.closes < 1 else times.closes
    reached, died = _died(state)
    ending = "ending" if not is_stop else "saving" if len(died) < len(reached) else "stopping"
    begins = [("joining", times.began)] if has_peers else []
    joined = times.started if has_peers else times.began
    if state.attempt > 1:
        begins.append(("lost to failed attempts", joined))
        joined = times.attempt_began
    begins += [("starting", joined), ("training", times.trains), (ending, closes)]
    begun = [(part, min(at, closes)) for part, at in begins if at < math.inf]
    ends = [*(at for _, at in begun[1:]), now]
    return [(part, end - at) for (part, at), end in zip(begun, ends)]
