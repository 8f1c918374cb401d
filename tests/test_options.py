"""What people type."""

import re

import pytest

from launcher import cli
from launcher.errors import LaunchError
from launcher.job import options
from launcher.job.arguments import parse, split, wants_help
from launcher.job.help import help_text
from launcher.job.options import OPTIONS
from launcher.result.causes import of_error
from launcher.text.words import flag
from launcher_tools import local_options

RUN = ["--train-script", "t.py"]


def refusal(argv, environ=None):
    with pytest.raises(LaunchError) as caught:
        parse(argv, environ or {})
    assert of_error(caught.value).exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


BOOLS = "--a True --b False --c true --d false --e 1 True"
AS_FLAGS = ("--a", "--c", "--e", "1", "True")
PARSED = [
    # the words behind the script's name; the environment; what is seen
    ("--launcher-grace=5", {}, {"grace": 5}),
    ("--launcher-grace 0", {}, {"grace": 0}),  # SIGKILL at once
    ("--train-script=a=b.py", {}, {"train_script": "a=b.py"}),
    ("--launcher_nproc_per_node 2 x", {}, {"nproc_per_node": 2, "script_args": ("x",)}),  # toolkit
    ("--launcher-nproc_per_node 2", {}, {"nproc_per_node": 2}),
    ("--launcher x", {}, {"script_args": ("--launcher", "x")}),
    # switches
    ("--launcher-dry-run", {}, {"dry_run": True}),
    ("--launcher-dry-run true", {}, {"dry_run": True, "script_args": ()}),
    ("--launcher-dry-run False", {}, {"dry_run": False}),  # as the toolkit renders a bool
    ("--launcher-dry-run --x y", {}, {"dry_run": True, "script_args": ("--x", "y")}),
    # variables
    ("", {"LAUNCHER_GRACE": "7"}, {"grace": 7}),
    ("--launcher-grace 8", {"LAUNCHER_GRACE": "7"}, {"grace": 8}),
    ("", {"LAUNCHER_GRACE": ""}, {"grace": 100}),  # empty: not set
    # torchrun's variables
    ("", {"PET_MAX_RESTARTS": "3"}, {"max_restarts": 3}),
    ("", {"PET_SHUTDOWN_TIMEOUT": "7"}, {"grace": 7}),
    ("", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, {"grace": 7}),
    ("--launcher-grace 9", {"PET_SHUTDOWN_TIMEOUT": "x"}, {"grace": 9}),  # replaced
    # the script's booleans
    (BOOLS, {}, {"script_args": tuple(BOOLS.split())}),
    (f"--launcher-bools flag {BOOLS}", {}, {"script_args": AS_FLAGS}),
    # a hang is logged before it ends the job
    ("--launcher-hang-timeout 30", {}, {"hang_notify": 30, "hang_timeout": 30}),
]


@pytest.mark.parametrize(("words", "environ", "seen"), PARSED)
def test_what_options_are_seen(words, environ, seen):
    parsed = parse([*RUN, *words.split()], environ)._asdict()
    assert {name: parsed[name] for name in seen} == seen


def test_the_scripts_arguments_keep_their_order_and_bytes():
    """Also those that are torchrun's own options, or our commands."""
    args = ["--t", "1", "--train", "x", "--", "", "--help", "-m", "a b", "$x", "--t", "1", "local"]
    args += ["--nproc-per-node", "1", "--m", "1", "--launcher", "1"]
    assert parse([*args[:4], *RUN, *args[4:]], {}).script_args == tuple(args)
    ours = ["--launcher_grace", "2"]
    assert split([*RUN, *ours, *args]) == ([*RUN, *ours], args)


REFUSED = [
    ("", {}, "nothing to run"),
    ("--train-script t.py --train-module m", {}, "--train-script t.py and --train-module m"),
    ("--train-script", {}, "--train-script needs a value"),
    ("--train-script=", {}, "--train-script is empty"),
    ("--launcher-grace", {}, "--launcher-grace needs a value"),
    ("--launcher-nproc_per_nod", {}, "Did you mean --launcher-nproc-per-node?"),
    ("--launcher_garce 1", {}, "Did you mean --launcher-grace?"),
    ("--launcher-zzz 1", {}, "is not a launcher option. See"),
    ("--launcher-hang 2", {}, "Did you mean --launcher-hang-notify or --launcher-hang-timeout?"),
    ("--launcher-gra 1", {}, "is not a launcher option"),  # no abbreviations
]


@pytest.mark.parametrize(("words", "environ", "says"), REFUSED)
def test_what_is_refused(words, environ, says):
    assert says in refusal(words.split(), environ)


SWITCHES = [name for name, option in OPTIONS.items() if option.parse is options.switch]


@pytest.mark.parametrize("word", ["no", "0", "None", "", "perhaps", "fit", "train.py"])
@pytest.mark.parametrize("name", map(flag, SWITCHES))
def test_a_word_after_a_switch_is_its_value_and_no_argument_of_the_script(name, word):
    for words in ([name, word], [name, word, "t.py"], [f"{name}={word}"]):
        assert f"{name} is {word!r}; expected true or false" in refusal([*RUN, *words])
    assert parse([*RUN, f"{name}=true", word], {}).script_args == (word,)


@pytest.mark.parametrize("name", ["--launcher-log-dir", "--launcher_script_dir", "--train-script"])
def test_an_option_is_no_path(name):
    message = refusal([*RUN, name, "--epochs", "3"])
    assert message.startswith(f"{name} needs a value, but is followed by --epochs; ")
    assert f"{name}=--epochs" in message
    parse([*RUN, f"{name}=--epochs"], {})


BAD = {
    "nproc-per-node": ["0", "1025", "two", "", "\uff19"],  # the last is no digit of ours
    "rdzv-port": ["0", "65536"],
    "peer-port": ["x"],
    "start-timeout": ["0"],
    "host-timeout": ["4"],
    "grace": ["-1", "1e3"],
    "failure-grace": ["99999999999"],
    "max-restarts": ["-1"],
    "instance-groups": ["a,,b"],
    "bools": ["yes"],
    "torchrun-args": ["'unclosed"],
    "log-ranks": ["", "-1", "3-1", "0,", "1-2-3", "a", "0-", "1e3", "0..3"],
}


@pytest.mark.parametrize(
    ("option", "bad"), [(option, bad) for option, values in BAD.items() for bad in values]
)
def test_a_bad_value_is_named_with_what_was_expected(option, bad):
    message = refusal([*RUN, f"--launcher-{option}={bad}"])
    assert f"--launcher-{option} is {bad!r}; expected " in message
    if bad:
        twin = "LAUNCHER_" + option.upper().replace("-", "_")
        assert f"{twin} is {bad!r}; expected " in refusal(RUN, {twin: bad})


def test_help_is_complete_and_only_asked_for_alone():
    text = help_text()
    ours = {*map(flag, OPTIONS), "--launcher-help"}
    assert set(re.findall(r"^  (--launcher-\S+)", text, re.MULTILINE)) == ours
    assert max(map(len, text.splitlines())) < 120
    assert wants_help(["--help"]) and wants_help([*RUN, "--launcher_help"])
    assert not wants_help([*RUN, "--help"])


def test_the_helps_have_every_command_and_every_option_of_local():
    for command in ("init", *cli._TOOLS):
        assert re.search(rf"^  {command}\b", help_text(), re.MULTILINE)
    for action in local_options._parser()._actions:
        (option,) = action.option_strings
        assert re.search(rf"^  {option}\b", local_options.HELP, re.MULTILINE)
