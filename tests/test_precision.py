"""How train_hymenoptera.py chooses between bf16 and float32; test_hymenoptera.py has a job."""

import argparse
import time

import pytest

pytestmark = pytest.mark.torch

ARGS = {"bf16": None, "image_size": 32, "batch_size": 2}


@pytest.fixture
def hymenoptera(reference):
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # none waits for another that a busy machine holds up
    yield reference("precision")
    torch.set_num_threads(threads)


@pytest.fixture
def choose(hymenoptera, capsys):
    """Return what is chosen and said: choose(told, in the checkpoint) -> (bool, str)."""
    import torch

    def choose(told=None, before=None):
        args = argparse.Namespace(**{**ARGS, "bf16": told}, layout=torch.channels_last)
        precision = hymenoptera.Precision(told)
        if before is not None:
            precision.load_state_dict({"bf16": before})
        precision.choose(args, torch.device("cpu"))
        assert precision.state_dict() == {"bf16": precision.bf16}
        return precision.bf16, capsys.readouterr().out

    return choose


@pytest.fixture
def slow_in(monkeypatch):
    """Make a processor that is slow in one type of number: slow_in("bf16")."""
    import torch

    conv2d = torch.nn.functional.conv2d

    def slow_in(name):
        def slow(*args, **options):
            if torch.is_autocast_enabled("cpu") == (name == "bf16"):
                time.sleep(0.2)
            return conv2d(*args, **options)

        monkeypatch.setattr(torch.nn.functional, "conv2d", slow)

    return slow_in


@pytest.mark.parametrize(("name", "bf16"), [("bf16", False), ("float32", True)])
def test_auto_is_what_is_faster_here(choose, slow_in, name, bf16):
    slow_in(name)
    chosen, said = choose()
    assert chosen is bf16
    assert said.startswith(f"bf16 {'on' if bf16 else 'off'}: a convolution takes ")


CASES = {
    "told": (True, None, True, ""),
    "told as before": (False, False, False, ""),
    "kept": (None, False, False, "bf16 off, as in the checkpoint\n"),
    "told otherwise": (
        True,
        False,
        True,
        "bf16 on, as --bf16 says; off in the checkpoint: from here on the numbers are others than "
        "without the stop\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_told_counts_first_then_the_checkpoint(choose, case):
    told, before, bf16, says = CASES[case]
    assert choose(told, before) == (bf16, says)


def test_measuring_changes_no_random_numbers(choose):
    import torch

    before = torch.get_rng_state()
    choose()
    assert torch.equal(torch.get_rng_state(), before)
