"""Facts of the job in, findings out: how a stop travels, times, settings, the plan. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.text import flag, shortened
from launcher_tools import doctor_judge_devices, doctor_judge_machine, doctor_judge_network
from launcher_tools.doctor_facts import Facts, StopFacts
from launcher_tools.doctor_finding import Finding, ok, problem, warning

_SAGEMAKERS_LIMIT = 120  # seconds from SIGTERM to SIGKILL
_TO_END = 10  # seconds that torchrun and the launcher need after the ranks
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "busybox")
_INITS = ("tini", "tini-static", "dumb-init", "docker-init", "catatonit")
_SYSTEMS = ("systemd", "init", "launchd")
_EXEC_FORM = 'use the exec form, ENTRYPOINT ["sm-launch"] or ["sm-launch", "init", ...] '
_SEE = "(docs/image.md)"
_PUT_INIT = (
    "put the launcher's `init` in front of it: in an image of your own, or in any image with the "
    "estimator's container_entry_point and a channel that holds launcher.py (docs/guide.md)"
)


def judge(facts: Facts) -> list[Finding]:
    """Return all that is found, in the order of the report."""
    if not facts.job.takes_part:
        return [ok("job", facts.job.summary)]
    return [
        *doctor_judge_network.judge(facts),
        *doctor_judge_devices.judge(facts),
        *doctor_judge_machine.judge(facts),
        _stop(facts.stop),
        *_times(facts),
        *_settings(facts),
        _plan(facts),
    ]


def _stop(stop: StopFacts) -> Finding:
    """Find whether SIGTERM to PID 1 would reach the ranks of a job that runs in this place."""
    words = stop.pid_1
    name = _base(words[0]) if words else ""
    shown = shortened(" ".join(words), 80)
    pids = [pid for pid, _ in stop.ancestors]
    if any(_is_launcher(above) and "local" in above for _, above in stop.ancestors):
        return ok("stop", "`sm-launch local` passes stops on")
    if stop.own_pid == 1:
        return ok("stop", "the launcher would be PID 1: a stop reaches every rank")
    if stop.init_answers or (_is_launcher(words) and "init" in words):
        return ok("stop", "`sm-launch init` is above: a stop reaches every rank")
    if _is_launcher(words):
        return ok("stop", f"PID 1 is a launcher, `{shown}`: a stop reaches its ranks")
    if any("start_with_right_hostname" in word for word in words):
        return warning("stop", "PID 1 is AWS's start script: a stop reaches no rank", _PUT_INIT)
    if _runs(words, "train"):
        seen = "PID 1 is SageMaker's toolkit, which ignores stops: none reaches a rank"
        return warning("stop", seen, _PUT_INIT)
    if name in _SHELLS:
        seen = f"PID 1 is a shell (`{shown}`), which by itself passes no stop on"
        return warning("stop", seen, _EXEC_FORM + _SEE)
    if name in _INITS:
        if stop.ancestors and pids[0] == 1:
            return ok("stop", f"{name} is PID 1 and passes a stop on to the launcher")
        seen = f"{name} is PID 1 and passes a stop on to its own child alone"
        return warning("stop", seen, f"{_EXEC_FORM}in place of {name} {_SEE}")
    if not words:
        return ok("stop", "PID 1 cannot be seen: stop the launcher itself (SIGTERM)")
    if name in _SYSTEMS or 1 not in pids:
        return ok("stop", "no container's PID 1 is above: stop the launcher itself (SIGTERM)")
    return ok("stop", f"PID 1 is `{shown}`: a stop works if it passes SIGTERM on to the launcher")


def _is_launcher(words: Sequence[str]) -> bool:
    """Tell whether a process is the launcher: by its name, as a module, by its path."""
    return _runs(words, "sm-launch", "launcher", "launcher.py") or any(
        word.endswith("launcher/__main__.py") for word in words[:3]
    )


def _runs(words: Sequence[str], *names: str) -> bool:
    """Tell whether a process is one of these programs, or a Python that runs it."""
    if words and not _base(words[0]).startswith("python"):
        words = words[:1]
    program = [word for word in words[1:] if not word.startswith("-")][:1]
    return any(_base(word) in names for word in (*words[:1], *program))


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _times(facts: Facts) -> list[Finding]:
    job = facts.job
    if not job.hosts:
        return []
    seen = f"{job.grace} s to save after a stop, {job.failure_grace} s after a failure elsewhere"
    if job.nnodes > 1:
        seen += f"; hosts may be missing for {job.start_timeout} s"
    if job.grace > _SAGEMAKERS_LIMIT - _TO_END:
        return [
            warning(
                "times",
                f"{seen}; SageMaker kills everything {_SAGEMAKERS_LIMIT} s after a stop",
                f"use {flag('grace')} {_SAGEMAKERS_LIMIT - _TO_END} at most",
            )
        ]
    return [ok("times", seen)]


def _settings(facts: Facts) -> list[Finding]:
    job = facts.job
    found = []
    if job.distribution:
        judged = problem if facts.versions.toolkit else warning
        found.append(
            judged(
                "settings",
                f"the estimator's distribution= is set ({', '.join(job.distribution)}): "
                "SageMaker's toolkit would start another launcher",
                "remove distribution= from the estimator",
            )
        )
    pet = [name for name in job.pet if not any(name in line for line in job.said)]
    if pet:
        found.append(ok("settings", f"{', '.join(pet)}: for torchrun, as you set it"))
    for name in job.unknown:
        seen = f"{name} is not a launcher option"
        found.append(warning("settings", seen, "correct it (--launcher-help), or remove it"))
    for line in job.said:
        if not any(name in line for name in job.unknown):
            found.append(ok("settings", line.rstrip(".")))
    return found


def _plan(facts: Facts) -> Finding:
    job = facts.job
    if job.error:
        return problem("job", job.error.rstrip("."), "")  # the launcher's message says what to do
    if facts.torch.refused:
        to_do = f"correct {flag('torchrun_args')}"
        return problem("job", f"torchrun would fail: {facts.torch.refused}", to_do)
    summary = job.summary.rstrip(".")
    if not job.names_script:
        return ok("job", f"no script is named, so only this host was checked; {summary}")
    return ok("job", summary)
