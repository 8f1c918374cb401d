"""Warn about settings that surely have no effect, or less than they say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from launcher.job.arguments import FIELDS, TARGETS, TWINS
from launcher.job.options import COUNTED, Options
from launcher.job.plan import SAGEMAKER_KILLS_AFTER
from launcher.text.words import flag

_NPROC = "nproc_per_node"
_NUMBER_OF_RANKS = re.compile("|".join((*COUNTED, r"[1-9]\d{0,3}")), re.ASCII)


def without_effect(options: Options, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines for the log."""
    for variable in options.unknown_twins:
        twin = variable.upper().replace("-", "_")
        hint = f"did you mean {twin}?" if twin in TWINS else "see --launcher-help."
        yield f"warning: {variable} is not a launcher option; {hint}"
    yield from _meant_for_the_launcher(options)
    unused = {
        "preload": options.start != "warm"
        and f"{flag('start')} is cold, and each rank imports what it needs",
        "restart_timeout": not options.max_restarts and f"{flag('max_restarts')} is 0",
        "hang_notify": not options.watch and f"{flag('watch')} 0 turns the progress checks off",
    }
    for field, why in unused.items():
        if why and field in options.given:
            yield f"warning: {flag(field)} has no effect: {why}."
    if options.script_dir and not os.path.isdir(options.script_dir):
        yield f"warning: {flag('script_dir')}: there is no folder {options.script_dir}."
    # SageMaker sets it, and so does `sm-launch local`.
    if options.grace > SAGEMAKER_KILLS_AFTER and environ.get("TRAINING_JOB_ARN"):
        yield (
            f"warning: {flag('grace')} is {options.grace} s, but SageMaker kills everything "
            f"{SAGEMAKER_KILLS_AFTER} s after a stop; use less."
        )


def _meant_for_the_launcher(options: Options) -> Iterator[str]:
    """Yield a line for each script argument with the name of an option of ours or of torchrun."""
    ours = {name.lstrip("-"): name for name in (*TARGETS, *FIELDS)}
    for word, following in zip(options.script_args, (*options.script_args[1:], "")):
        name, equals, text = word.partition("=")
        spelled = name.lstrip("-").lower().replace("_", "-")
        passed = f"{name} is passed to the script; the launcher's own option is"
        if name.startswith("-") and spelled in ours:
            yield f"warning: {passed} {ours[spelled]}."
        elif name in ("--nproc-per-node", "--nproc_per_node") and _NPROC not in options.given:
            if _NUMBER_OF_RANKS.fullmatch(text if equals else following):
                yield f"{passed} {flag(_NPROC)}."
