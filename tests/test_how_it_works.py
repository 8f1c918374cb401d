"""docs/how-it-works.md against the code: the phases, events and files that it names."""

import inspect
import re
from typing import get_args

import pytest
from conftest import REPO

from launcher.peers import coordinator, member, messages
from launcher.peers import events as of_hosts
from launcher.run import events, machine, state

PAGE = (REPO / "docs" / "how-it-works.md").read_text(encoding="utf-8")
PICTURES = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE, re.DOTALL)


def names(union):
    return {one.__name__ for one in get_args(union)}


def own_events(module):
    """Return the events that a module defines."""
    part = re.findall(r"\n# Events.*?\n(.*?)\n# Actions", inspect.getsource(module), re.DOTALL)
    return set(re.findall(r"^class (\w+)", part[0], re.MULTILINE))


# Of each machine: its phases, its events, and its picture. `Received` is shown as what is said.
HEARD_BY_RUN = {*re.findall(r"\w+", inspect.getsource(machine.step))} & names(messages.Message)
MACHINES = {
    "run": (names(state.Phase), own_events(events) | HEARD_BY_RUN | {"AllKnow"}),
    "coordinator": (
        names(coordinator.Phase),
        own_events(of_hosts) - {"Received", "Connected", "Unreachable"}
        | names(messages.FromMember),
    ),
    "member": (
        names(member.Phase),
        {"Connected", "Unreachable", "Lost", "Time"}
        | names(messages.FromMember)
        | names(messages.FromCoordinator),
    ),
}
each_machine = pytest.mark.parametrize("machine", MACHINES)


def rows(machine):
    """Return the rows of a machine's table: phases, events, what happens, next phases."""
    (table,) = re.findall(rf"<!-- {machine} -->\n.*\n.*\n((?:\|.*\n)+)<!-- end -->", PAGE)
    found = []
    for line in table.splitlines():
        phases, on, what, to = (cell.strip() for cell in line.strip("|").split("|"))
        nexts = [phase for phase in re.findall(r"\w+", to) if phase != "stays"]
        found.append((phases.split(", "), re.findall(r"\w+", on), what, nexts))
    return found


@each_machine
def test_a_table_has_all_phases_and_events_of_the_code_and_no_others(machine):
    phases, on = MACHINES[machine]
    named = {phase for in_phases, _, _, to in rows(machine) for phase in (*in_phases, *to)}
    assert named == phases
    assert {event for _, events_, _, _ in rows(machine) for event in events_} == on


@each_machine
def test_what_happens_names_messages_that_exist(machine):
    named = {word for _, _, what, _ in rows(machine) for word in re.findall(r"`(\w+)`", what)}
    assert named <= names(messages.Message) | MACHINES[machine][1]


@pytest.mark.parametrize(("machine", "picture"), zip(MACHINES, PICTURES), ids=MACHINES)
def test_every_arrow_of_a_picture_is_in_the_table(machine, picture):
    """In a form that mermaid takes for nothing else."""
    assert len(PICTURES) == len(MACHINES)
    phases = set()
    for line in picture.splitlines():
        arrow = re.fullmatch(r" +(\[\*\]|\w+) --> (\[\*\]|\w+)(?: : (\w+(?:, \w+)*))?", line)
        assert arrow, line
        source, target, label = arrow.groups()
        phases |= {source, target} - {"[*]"}
        for event in label.split(", ") if label else ():
            assert any(
                source in in_phases and event in on and target in to
                for in_phases, on, _, to in rows(machine)
            ), f"{source} --> {target} : {event}"
    assert phases == MACHINES[machine][0]


def test_files_and_functions_that_the_page_names_exist():
    (part,) = re.findall(r"has every module:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    files = re.findall(r"\b[\w/]+\.py", part)
    assert len(files) > 10
    for path in files:
        assert (REPO / "launcher" / path).is_file(), path
    for function, path in re.findall(r"`(\w+)` in\s+(?:\[)?([\w/]+\.py)", PAGE):
        text = (REPO / "launcher" / path).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text, function
