"""Warn about settings that surely have no effect."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from launcher.job.options import COUNTED, MOST_RANKS, OPTIONS, Options
from launcher.job.plan import SAGEMAKER_KILLS_AFTER
from launcher.text.words import PREFIX, flag

_NPROC = "nproc-per-node"


def without_effect(options: Options, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines for the log."""
    for variable in options.unknown_twins:
        twin = variable.upper().replace("-", "_")
        is_misspelt = twin.removeprefix("LAUNCHER_").lower() in OPTIONS
        hint = f"did you mean {twin}?" if is_misspelt else "see --launcher-help."
        yield f"warning: {variable} is not a launcher option; {hint}"
    yield from _meant_for_the_launcher(options)
    if "preload" in options.given and options.start != "warm":
        yield (
            f"warning: {flag('preload')} has no effect: {flag('start')} is cold, and each rank "
            "imports what it needs."
        )
    if options.restart_timeout and not options.max_restarts:
        yield f"warning: {flag('restart_timeout')} has no effect: {flag('max_restarts')} is 0."
    if "hang_notify" in options.given and not options.watch:
        yield (
            f"warning: {flag('hang_notify')} has no effect: {flag('watch')} 0 turns the "
            "progress checks off."
        )
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
    own_names = {field.replace("_", "-"): flag(field) for field in OPTIONS}
    words = [*options.script_args, ""]
    for word, value in zip(words, words[1:]):
        name, equals, text = word.partition("=")
        spelled = name.lstrip("-").lower().replace("_", "-")
        option = own_names.get(spelled.removeprefix(PREFIX.lstrip("-")))
        if option and name.startswith("-") and spelled.startswith(PREFIX.lstrip("-")):
            yield (
                f"warning: {name} is passed to the script; the launcher's own option is {option}."
            )
        elif name[:2] == "--" and spelled == _NPROC and "nproc_per_node" not in options.given:
            if _is_number_of_ranks(text if equals else value):
                yield (
                    f"{name} is passed to the script; the launcher's own option is {flag(_NPROC)}."
                )


def _is_number_of_ranks(text: str) -> bool:
    return text in COUNTED or (text.isdecimal() and 0 < int(text[:5]) <= MOST_RANKS)
