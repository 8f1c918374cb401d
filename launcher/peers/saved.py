"""Log lines about a job's files for SageMaker: that there are none, or how a stop went. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from launcher.peers.messages import Cleared
from launcher.result.causes import SUCCESS, Result
from launcher.text.words import all_ranks, plural, signal_name

CHECKPOINTS = "/opt/ml/checkpoints"
NOTHING = (
    "SageMaker will upload nothing: /opt/ml/model, /opt/ml/output/data and /opt/ml/checkpoints are "
    "empty on all hosts; a model is saved in SM_MODEL_DIR."
)


def lines(result: Result, hosts: Collection[Cleared]) -> list[str]:
    """Return the lines when all hosts have cleared; nothing about unknown facts."""
    files = -1 if any(host.files < 0 for host in hosts) else sum(host.files for host in hosts)
    if result == SUCCESS:
        return [] if files else [NOTHING]
    if not result.stop_signal:
        return []
    exits, saved = "", _saved(files)
    ranks = sum(host.handled for host in hosts)
    if ranks and all(host.handled >= 0 for host in hosts):
        seconds = math.ceil(max(host.seconds for host in hosts))
        who = all_ranks(ranks) if ranks > 1 else "the rank"
        name = signal_name(result.stop_signal).partition(" ")[0]
        exits = f"{who} exited by themselves within {seconds} s of {name}"
        exits = exits if ranks > 1 else exits.replace("themselves", "itself")
    return [f"{'; '.join(filter(None, (exits, saved)))}."] if exits or saved else []


def _saved(files: int) -> str:
    if files < 0:
        return ""
    if not files:
        return f"nothing was saved below {CHECKPOINTS} (checkpoint_s3_uri not set?)"
    return f"{plural(files, 'file')} {'is' if files == 1 else 'are'} new below {CHECKPOINTS}"
