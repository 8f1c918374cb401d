"""What comes in from other hosts, checked: whoever knows the job's name may have sent it.

Each function returns what a message holds, or raises ValueError where it is not valid. Texts are
cut, and show control characters as Python writes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from launcher.errors import printable
from launcher.peers.addresses import NAMED, counted
from launcher.result.failure import ECHO, LIMIT, OWN, Verdict
from launcher.signals import STOPS

_LINE = 700  # characters of a reason
_DIGITS = 18  # of a number: Python takes its time for long ones


class Hello(NamedTuple):
    """Who a host says it is, and what has to agree: a text, or a list of texts, for each."""

    job: str
    host: str
    alike: Mapping[str, Any]


def decoded(line: bytes) -> dict[str, Any]:
    """Return the message of one line; it is an object without endless or huge numbers."""
    try:
        message = _DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError from None
    if not isinstance(message, dict):
        raise ValueError
    return message


def hello_in(message: Mapping[str, Any]) -> Hello:
    """Return what a host says first."""
    hello = message.get("hello")
    if not isinstance(hello, dict):
        raise ValueError
    alike = hello.get("alike")
    if not isinstance(alike, dict):
        raise ValueError
    for value in alike.values():
        # Nothing that is nested: repr() has a limit to how deep that may be.
        if not all(isinstance(v, str) for v in (value if isinstance(value, list) else [value])):
            raise ValueError
    job, host = hello.get("job"), hello.get("host")
    if not isinstance(job, str) or not isinstance(host, str):
        raise ValueError
    return Hello(job, host, alike)


def case_in(case: Any) -> tuple[int, Verdict]:
    """Return the kind of a failure, and the result that it makes: never success."""
    if not isinstance(case, dict):
        raise ValueError
    kind = _number(case.get("kind"), range(OWN, ECHO + 1))
    return kind, Verdict(_number(case.get("exit_code"), range(1, 256)), _text(case.get("text")))


def stop_in(number: Any) -> int:
    """Return the number of a signal that stops a job."""
    return _number(number, STOPS)


def verdict_in(verdict: Any, *, done: bool) -> Verdict:
    """Return how the job ends: as a success only where this host is done."""
    if not isinstance(verdict, dict):
        raise ValueError
    exit_code = _number(verdict.get("exit_code"), range(256))
    stop = verdict.get("stop_signal")
    if exit_code == 0:
        if not done:
            raise ValueError
        return Verdict(0)
    if stop != 0:
        return Verdict(128 + stop_in(stop), "", stop_in(stop))
    return Verdict(exit_code, _text(verdict.get("text")))


def missing_in(message: Mapping[str, Any], hosts: Collection[str]) -> str:
    """Return who is missing, in words."""
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


def reason_in(reason: Any) -> str:
    """Return why a host was refused, in one line."""
    if not isinstance(reason, str):
        raise ValueError
    return printable(reason[:_LINE])[:_LINE]


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


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError
    return number


def _refuse(constant: str) -> None:
    raise ValueError


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
