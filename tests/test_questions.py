"""Commands that are asked something while a loop goes on, which may fail, hang or never end."""

import os
import selectors
import time

import pytest
from conftest import has_ended, poll

from launcher.host.child import Question


@pytest.fixture
def ask(tmp_path):
    """Ask a shell something: ask(text) -> the question, what has come, and the loop's next turn."""
    selector = selectors.DefaultSelector()

    def make(text):
        said = []
        question = Question(("sh", "-c", text), dict(os.environ), selector, said.append)

        def turn(seconds=10.0):
            for key, _ in selector.select(seconds):
                key.data()

        return question, said, turn

    yield make
    assert not selector.get_map()
    selector.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo one; echo two >&2; sleep 0.1; echo three; exit 3", "one\ntwo\nthree\n"),
        ("kill -9 $$", ""),
        ("printf '\\377'", "\ufffd"),
        ("printf %099999d 7", f"{7:099999}"),
        ("exec cat /dev/zero", ""),  # which never ends
        ("exec >/dev/null 2>&1; sleep 600", ""),  # nothing can come any more
    ],
    ids=range(6),
)
def test_an_answer_is_all_that_was_said(ask, text, says):
    _, said, turn = ask(text)
    by = time.monotonic() + 60
    while not said and time.monotonic() < by:
        turn()
    assert said == [says]


@pytest.mark.parametrize("keeps", ["", ">/dev/null 2>&1"])
def test_what_an_answer_leaves_behind_is_killed(ask, tmp_path, keeps):
    """Also what keeps the answer from its end."""
    note = tmp_path / "pid"
    question, said, turn = ask(f"sleep 600 {keeps} & echo $! > {note}; echo one")
    turn()
    if keeps:
        poll(lambda: turn(0.1) or said == ["one\n"])
    else:
        assert said == []
        poll(note.exists)
        question.close()
    poll(lambda: has_ended(int(note.read_text())))


def test_a_question_that_is_given_up_is_killed_and_says_nothing_any_more(ask, tmp_path):
    note = tmp_path / "pid"
    question, said, turn = ask(f"trap '' TERM; sleep 600 & echo $! > {note}; echo one; wait")
    turn()
    poll(lambda: note.exists() and note.read_text())
    began = time.monotonic()
    question.close()
    question.close()
    assert time.monotonic() - began < 1 and said == []
    poll(lambda: has_ended(int(note.read_text())))


def test_a_command_that_is_not_there(tmp_path):
    with selectors.DefaultSelector() as selector, pytest.raises(OSError):
        Question(("no-such-command",), {"PATH": str(tmp_path)}, selector, print)
