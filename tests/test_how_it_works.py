"""docs/development/how-it-works.md against the code: what its rows, pictures and files name.

make docs prints the rows and draws the pictures.
"""

import re
import runpy
from typing import get_args

import pytest
from conftest import REPO
from simulation.planting import TABLES
from simulation.rows import MACHINES, ROWS

from launcher.peers import member, messages
from launcher.peers import state as of_coordinator
from launcher.run import state

PAGE = (REPO / "docs" / "development" / "how-it-works.md").read_text(encoding="utf-8")
DRAWING = runpy.run_path(str(REPO / "docs" / "pictures.py"))
PICTURES = DRAWING["PICTURES"]
PHASES = {"run": state.Phase, "coordinator": of_coordinator.JobPhase, "member": member.MemberPhase}
each_machine = pytest.mark.parametrize("machine", ROWS)


@each_machine
def test_rows_have_all_phases_and_events_and_no_others(machine):
    rows = ROWS[machine]
    named = {phase for row in rows for phase in (*row.phases, *row.nexts)}
    assert named == {*get_args(PHASES[machine])}
    events = {event for row in rows for event in row.events}
    tables = [getattr(MACHINES[machine], table, {}) for table in TABLES]
    own = (
        get_args(messages.FromMember) if machine == "member" else ()
    )  # reports, which it passes on
    assert events == {event for table in (*tables, own) for event in table}


@each_machine
def test_what_happens_names_messages_that_exist(machine):
    events = {event.__name__ for row in ROWS[machine] for event in row.events}
    named = {word for row in ROWS[machine] for word in re.findall(r"`(\w+)`", row.text)}
    assert named <= events | {one.__name__ for one in get_args(messages.Message)}


@each_machine
def test_every_arrow_of_a_picture_is_in_the_table(machine):
    picture = PICTURES[machine]
    arrows = {
        (phase.__name__, event.__name__, after.__name__)
        for row in ROWS[machine]
        for phase in row.phases
        for event in row.events
        for after in row.nexts
    }
    drawn = {(a.source, event, a.target) for a in picture.arrows for event in a.events}
    assert drawn <= arrows and len(drawn) > 8
    dots = {DRAWING["START"], DRAWING["END"]}
    assert {*picture.phases} - dots == {phase.__name__ for phase in get_args(PHASES[machine])}
    assert {*picture.phases} == {end for a in picture.arrows for end in (a.source, a.target)}


@each_machine
def test_the_page_shows_the_picture_as_it_is_drawn(machine):
    path = REPO / "docs" / "development" / f"{machine}.svg"
    assert path.read_text(encoding="utf-8") == DRAWING["drawn"](PICTURES[machine]), "make docs"
    assert f"]({machine}.svg)" in PAGE and [*PICTURES] == [*ROWS]


def test_files_and_functions_that_the_page_names_exist():
    (part,) = re.findall(r"has every module:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    files = re.findall(r"\b[\w/]+\.py", part)
    assert len(files) > 10
    for path in files:
        assert (REPO / "launcher" / path).is_file(), path
    for function, path in re.findall(r"`(\w+)` in\s+(?:\[)?([\w/]+\.py)", PAGE):
        text = (REPO / "launcher" / path).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, function
