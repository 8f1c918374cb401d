"""The launchers of one job talk: they start together, end together, and give one reason.

Each host's launcher keeps one TCP connection to that of the first host (`--launcher-peer-port`),
which decides for all. What is sent is lines of JSON, each at most 64 KiB, in this order:

    a host                                        the first host
    {"hello": {"job", "host", "fingerprint"}}
                                                  {"welcome": true}   joined; wait for the others
                                                  {"refused": why}    not of this job; hangs up
                                                  {"later": true}     no room now; hangs up
                                                  {"missing": [[host, resolves], ...], "more": n}
                                                                      who is not here, every 30 s
                                                  {"all joined": true}  start torchrun
    {"failure": {"cause", "exit_code", "text"}}   what failed here
    {"stop": 15}       a person or SageMaker stops this host
    {"succeeded": true}  all ranks of this host succeeded
                                                  {"result": {"exit_code", "text", "stop_signal"}}
                                                                      how all hosts end, and why

The fingerprint is what must agree between hosts; a difference is a result, too. A host that cannot
start has none, and sends its failure right behind its hello. A connection that ends before the
result is a lost host, and so is one whose other end answers no packet for 14 s (TCP keep-alive,
tcp(7)): nothing is sent while a job runs. Once all have joined nobody else can connect; before, a
connection that breaks a rule is closed, and changes nothing for the others. The protocol has no
authentication: it is meant for the job's own network. first.py and other.py are the two ends.

Which failure becomes the result: the best cause (causes.Cause). The first host waits a moment for
a better one than it has.

The functions here check what comes in: whoever knows the job's name may have sent it. Each returns
what a message holds, or raises ValueError if it is not valid. Texts are cut, and show control
characters as Python writes them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Union

from launcher.errors import STOPS
from launcher.events import Stop, Succeeded
from launcher.peers.events import Job
from launcher.result.causes import Cause, Failure, Result, stopped
from launcher.result.failure_text import LIMIT
from launcher.text import NAMED, counted, printable

_LINE = 700  # characters of a reason
# What the first host sends beside `refused`, `missing` and `result`.
WELCOME = {"welcome": True}
LATER = {"later": True}
ALL_JOINED = {"all joined": True}

Message = Mapping[str, Any]


# What a host says


class Hello(NamedTuple):
    """Who a host says it is, and what must agree: a text, or a list of texts, for each."""

    job: str
    host: str
    fingerprint: Mapping[str, Any]


def hello(job: Job) -> Message:
    """Return what a host sends first."""
    return {"hello": {"job": job.name, "host": job.current_host, "fingerprint": job.fingerprint}}


def hello_in(message: Message) -> Hello:
    """Return what a host has sent first."""
    hello = _dict(message.get("hello"))
    fingerprint = _dict(hello.get("fingerprint"))
    for value in fingerprint.values():
        # Nothing that is nested: repr() has a limit to how deep that may be.
        if not all(isinstance(v, str) for v in (value if isinstance(value, list) else [value])):
            raise ValueError
    job, host = hello.get("job"), hello.get("host")
    if not isinstance(job, str) or not isinstance(host, str):
        raise ValueError
    return Hello(job, host, fingerprint)


def told(what: Failure | Stop | Succeeded) -> Message:
    """Return what a host sends to tell the first one."""
    if isinstance(what, Failure):
        failure = {"cause": what.cause.name, "exit_code": what.exit_code, "text": what.text}
        return {"failure": failure}
    return {"stop": what.number} if isinstance(what, Stop) else {"succeeded": True}


def told_in(message: Message) -> Failure | Stop | Succeeded:
    """Return what a host that has joined tells: a failure is never a success."""
    if "failure" in message:
        failure = _dict(message["failure"])
        cause = failure.get("cause")
        if not isinstance(cause, str) or cause not in Cause.__members__:
            raise ValueError
        exit_code = _number(failure.get("exit_code"), range(1, 256))
        return Failure(Cause[cause], exit_code, _text(failure.get("text")))
    if "stop" in message:
        return Stop(_number(message["stop"], STOPS))
    if message.get("succeeded") is True:
        return Succeeded()
    raise ValueError


def valid(failure: Failure, host: str) -> Failure:
    """Return this host's own failure as other hosts take it: cut, and never a success."""
    exit_code = failure.exit_code if 0 < failure.exit_code < 256 else 1
    try:
        return failure._replace(exit_code=exit_code, text=_text(failure.text))
    except ValueError:
        return failure._replace(exit_code=exit_code, text=f"{host} failed\n")


# What the first host says


class Welcome(NamedTuple):
    """This host has joined; the others are waited for."""


class Refused(NamedTuple):
    """This host is not one that the first host waits for."""

    why: str


class Later(NamedTuple):
    """The first host has no room for this connection now."""


class Missing(NamedTuple):
    """Who is not here yet, in words."""

    hosts: str


class AllHere(NamedTuple):
    """All hosts have joined."""


class Ends(NamedTuple):
    """The first host has decided how the job ends."""

    result: Result


def result(result: Result) -> Message:
    """Return what the first host sends when it has decided."""
    return {"result": result._asdict()}


def missing(resolve: Mapping[str, bool | None], more: int) -> Message:
    """Return what the first host sends while it waits."""
    return {"missing": list(resolve.items()), "more": more}


FromFirst = Union[Welcome, Refused, Later, Missing, AllHere, Ends]


def first_in(message: Message, hosts: Collection[str], *, succeeded: bool) -> FromFirst:
    """Return what the first host says: that the job succeeded only if this host has."""
    if "welcome" in message:
        return Welcome()
    if "refused" in message:
        if not isinstance(message["refused"], str):
            raise ValueError
        return Refused(printable(message["refused"][:_LINE])[:_LINE])
    if "later" in message:
        return Later()
    if "missing" in message:
        return Missing(_missing_in(message, hosts))
    if "all joined" in message:
        return AllHere()
    return Ends(_result_in(_dict(message.get("result")), succeeded=succeeded))


def _result_in(result: Message, *, succeeded: bool) -> Result:
    exit_code = _number(result.get("exit_code"), range(256))
    stop = result.get("stop_signal")
    if exit_code == 0:
        if not succeeded:
            raise ValueError
        return Result(0)
    if stop != 0:
        return stopped(_number(stop, STOPS))
    return Result(exit_code, _text(result.get("text")))


def _missing_in(message: Message, hosts: Collection[str]) -> str:
    missing = message["missing"]
    if not isinstance(missing, list) or not 0 < len(missing) <= NAMED:
        raise ValueError
    resolve: dict[str, bool | None] = {}
    for entry in missing:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise ValueError
        host, resolves = entry
        if host not in hosts or not (resolves is None or isinstance(resolves, bool)):
            raise ValueError
        resolve[host] = resolves
    return missing_words(resolve, _number(message.get("more"), range(len(hosts))))


def missing_words(resolve: Mapping[str, bool | None], more: int) -> str:
    """Return who is missing, each with whether its name resolves (None: no answer yet)."""
    how = {
        True: "its name resolves",
        False: "its name does not resolve",
        None: "no answer from DNS",
    }
    return counted([f"{host} ({how[resolves]})" for host, resolves in resolve.items()], more)


def _dict(value: Any) -> Message:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _text(value: Any) -> str:
    """Return a text as in the failure file, whose first line is the cause."""
    if not isinstance(value, str):
        raise ValueError
    text = printable(value[:LIMIT], keep="\n").strip("\n")[: LIMIT - 1]
    if not text.strip():
        raise ValueError
    return text + "\n"


def _number(value: Any, allowed: Collection[int]) -> int:
    if type(value) is not int or value not in allowed:  # True is an int, too
        raise ValueError
    return value
