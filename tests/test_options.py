"""What people type."""

import re

import pytest

from launcher.errors import LaunchError
from launcher.job import options
from launcher.job.arguments import parse, split, wants_help
from launcher.job.help import help_text
from launcher.job.options import OPTIONS
from launcher.result.causes import of_error
from launcher.text.words import flag

RUN = ["--train-script", "t.py"]


def refusal(argv, environ=None):
    with pytest.raises(LaunchError) as caught:
        parse(argv, environ or {})
    assert of_error(caught.value).exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_scripts_arguments_keep_their_order_and_bytes():
    args = ["--t", "1", "--train", "x", "--", "", "--help", "-m", "a b", "$x", "--t", "1", "local"]
    assert parse([*args[:4], *RUN, *args[4:]], {}).script_args == tuple(args)


@pytest.mark.parametrize("name", ["t", "train", "nproc-per-node", "help", "m", "local", "launcher"])
def test_hyperparameters_like_torchruns_own_options_reach_the_script(name):
    assert parse([*RUN, f"--{name}", "1"], {}).script_args == (f"--{name}", "1")


def test_values_as_two_words_or_with_an_equals_sign():
    assert parse([*RUN, "--launcher-grace", "5"], {}).grace == 5
    assert parse(["--train-script=a=b.py", "--launcher-grace=5"], {}).train_script == "a=b.py"


@pytest.mark.parametrize(
    "words",
    [
        ["--launcher_nproc_per_node", "2"],  # as the toolkit passes a hyperparameter
        ["--launcher-nproc_per_node", "2"],
        ["--launcher_nproc-per-node=2"],
    ],
)
def test_options_may_have_underscores_as_torchruns(words):
    seen = parse([*RUN, *words, "--launcher", "x"], {})
    assert (seen.nproc_per_node, seen.script_args) == (2, ("--launcher", "x"))
    assert split([*RUN, *words, "x"]) == ([*RUN, *words], ["x"])


def test_an_unknown_option_with_underscores_is_refused_too():
    assert "Did you mean --launcher-grace?" in refusal([*RUN, "--launcher_garce", "1"])
    assert "--launcher_ is not a launcher option" in refusal([*RUN, "--launcher_", "1"])
    assert wants_help([*RUN, "--launcher_help"])


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


@pytest.mark.parametrize(
    ("words", "value", "left"),
    [
        (["--launcher-dry-run"], True, ()),
        (["--launcher-dry-run", "true"], True, ()),
        (["--launcher-dry-run", "False"], False, ()),  # as the toolkit renders a bool
        (["--launcher-dry-run=false"], False, ()),
        (["--launcher-dry-run", "--x", "y"], True, ("--x", "y")),
    ],
)
def test_switches_need_no_value_or_take_true_and_false(words, value, left):
    seen = parse([*RUN, *words], {})
    assert (seen.dry_run, seen.script_args) == (value, left)


def test_every_option_has_a_twin_and_the_command_line_wins():
    assert parse(RUN, {"LAUNCHER_GRACE": "7"}).grace == 7
    assert parse([*RUN, "--launcher-grace", "8"], {"LAUNCHER_GRACE": "7"}).grace == 8
    assert parse(RUN, {"LAUNCHER_GRACE": ""}).grace == 100  # empty: not set
    assert parse(RUN, {"LAUNCHER_GARCE": "7"}).unknown_twins == ("LAUNCHER_GARCE",)


@pytest.mark.parametrize("variable", ["launcher_grace", "Launcher_Grace", "LAUNCHER-GRACE"])
def test_a_twin_in_another_spelling_is_none(variable):
    seen = parse(RUN, {variable: "7", "launcher_gracious": "7", "grace": "7"})
    assert (seen.unknown_twins, seen.grace) == ((variable,), 100)


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("nproc-per-node", "0"),
        ("nproc-per-node", "two"),
        ("nproc-per-node", ""),
        ("nproc-per-node", "\uff19"),  # a digit, but not one of ours
        ("rdzv-port", "0"),
        ("rdzv-port", "65536"),
        ("peer-port", "x"),
        ("start-timeout", "0"),
        ("grace", "-1"),
        ("grace", "1e3"),
        ("failure-grace", "99999999999"),
        ("max-restarts", "-1"),
        ("instance-groups", "a,,b"),
        ("bools", "yes"),
        ("torchrun-args", "'unclosed"),
        ("log-prefix", "maybe"),
        *(
            ("log-ranks", text)
            for text in ("", "-1", "3-1", "0,", "1-2-3", "a", "0-", "1e3", "0..3")
        ),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(option, bad):
    message = refusal([*RUN, f"--launcher-{option}={bad}"])
    assert f"--launcher-{option} is {bad!r}; expected " in message
    if bad:
        twin = "LAUNCHER_" + option.upper().replace("-", "_")
        assert f"{twin} is {bad!r}; expected " in refusal(RUN, {twin: bad})


def test_errors_in_what_to_run():
    assert "nothing to run" in refusal([])
    twin = {"LAUNCHER_TRAIN_SCRIPT": "t.py"}
    assert "nothing to run (LAUNCHER_TRAIN_SCRIPT is not a launcher option)" in refusal([], twin)
    assert "--train-script t.py and --train-module m" in refusal([*RUN, "--train-module", "m"])
    assert "--train-script needs a value" in refusal(["--train-script"])
    assert "--train-script is empty" in refusal(["--train-script", ""])
    assert "--launcher-grace needs a value" in refusal([*RUN, "--launcher-grace"])


def test_an_unknown_option_suggests_a_known_one():
    assert "Did you mean --launcher-nproc-per-node?" in refusal([*RUN, "--launcher-nproc_per_nod"])
    assert "is not a launcher option. See" in refusal([*RUN, "--launcher-zzz", "1"])
    assert "Did you mean --launcher-nproc-per-node? See" in refusal([*RUN, "--launcher-nproc", "2"])
    of_hangs = "Did you mean --launcher-hang-notify or --launcher-hang-timeout?"
    assert of_hangs in refusal([*RUN, "--launcher-hang", "2"])
    assert "is not a launcher option" in refusal([*RUN, "--launcher-gra", "1"])  # no abbreviations


def test_bools_as_flags():
    words = ["--a", "True", "--b", "False", "--c", "true", "--d", "false", "--e", "1", "True"]
    seen = parse([*RUN, "--launcher-bools", "flag", *words], {}).script_args
    assert seen == ("--a", "--c", "--e", "1", "True")
    assert parse([*RUN, *words], {}).script_args == tuple(words)


def test_help_is_complete_and_only_asked_for_alone():
    text = help_text()
    for name in OPTIONS:
        assert f"  {flag(name)}" in text
    assert set(re.findall(r"^  (--launcher-\S+)", text, re.MULTILINE)) == {
        *map(flag, OPTIONS),
        "--launcher-help",
    }
    assert max(map(len, text.splitlines())) < 120
    assert wants_help(["--help"]) and wants_help([*RUN, "--launcher-help"])
    assert not wants_help([*RUN, "--help"])


def test_the_internal_variable_is_not_a_twin():
    assert options.RUN_DIR.removeprefix("LAUNCHER_").lower() not in OPTIONS
