"""docs/how-it-works.md against the code: its tables, and the phases and arrows of its pictures."""

import ast
import importlib
import inspect
import re
import runpy

import pytest
from conftest import REPO

from launcher.events import Time
from launcher.run.state import Phase

TABLES = runpy.run_path(str(REPO / "docs" / "tables.py"))
PAGE = (REPO / "docs" / "how-it-works.md").read_text(encoding="utf-8")
MACHINES, words = TABLES["MACHINES"], TABLES["words"]
each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)

PICTURES = re.findall(r"```mermaid\n(\w+).*?\n(.*?)```", PAGE, re.DOTALL)
SEQUENCES = [text for kind, text in PICTURES if kind == "sequenceDiagram"]
DIAGRAMS = [text for kind, text in PICTURES if kind == "stateDiagram"]
NO_PHASES = {"PID", "SIGTERM"}


def test_the_tables_on_the_page_are_those_of_the_code():
    assert TABLES["filled"](PAGE) == PAGE, "make docs"


@each_machine
def test_every_phase_has_a_meaning(machine):
    for phase in machine.phases:
        assert phase.value == phase.name.lower()
        assert re.fullmatch(r"\S.*\S\.", phase.meaning), phase


@each_machine
def test_every_phase_can_be_reached(machine):
    first, *others = machine.phases
    reached, left = set(), {first}
    while left:
        reached |= left
        left = {to for rule in machine.rules if reached & {*rule.phases} for to in rule.to}
        left -= reached
    assert reached == {first, *others}


@each_machine
def test_a_phase_that_lasts_so_long_has_a_rule_for_its_end(machine):
    for phase in machine.phases:
        assert bool(phase.time_out) == bool(machine.rules.rule(phase, Time)), phase


@each_machine
def test_every_rule_says_what_happens_in_a_sentence(machine):
    for rule in machine.rules:
        assert re.fullmatch(r"[A-Z][^\n]+[^.\s][.)]+", rule.says), rule.handler
        assert "|" not in rule.says, "it ends a column"


def made_in(module):
    """Return the types of which a module makes values."""
    made = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name):
            made.add(getattr(module, called.id, None))
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            made.add(getattr(getattr(module, called.value.id, None), called.attr, None))
    return made


@each_machine
def test_no_rule_is_for_an_event_that_nothing_produces(machine):
    """A rule that hands an event of its own to another rule does not count."""
    produced = set()
    for path in (REPO / "launcher").glob("[pr]*/*.py"):
        module = importlib.import_module(f"launcher.{path.parent.name}.{path.stem}")
        if module not in machine.files:
            produced |= made_in(module)
    assert not {rule.event for rule in machine.rules} - produced


def test_an_event_has_one_name():
    for machine in MACHINES.values():
        events = {rule.event for rule in machine.rules}
        assert len({words(event) for event in events}) == len(events)
        assert all(TABLES["meaning"](event).endswith(".") for event in events)


def test_a_rank_that_fails_while_ranks_save_stands_in_a_table():
    (row,) = (
        row
        for row in TABLES["rows"](MACHINES["a host's run"])
        if row.phase is Phase.STOPPING and "rank failed" in map(words, row.events)
    )
    assert f"| rank failed | {row.says} |" in PAGE


@pytest.mark.parametrize(
    ("machine", "diagram"), zip(MACHINES.values(), DIAGRAMS), ids=list(MACHINES)
)
def test_every_arrow_of_a_picture_is_a_rule(machine, diagram):
    phases = machine.phases.__members__
    (first,) = re.findall(r"\[\*\] --> (\w+)\n", diagram)
    assert phases[first] is next(iter(machine.phases))
    arrows = re.findall(r"^ *(\w+) --> (\w+) : ([^:;\n]+)$", diagram, re.MULTILINE)
    ends = re.findall(r"^ *(\w+) --> \[\*\]$", diagram, re.MULTILINE)
    assert len(arrows) + len(ends) + 1 == len(diagram.splitlines())
    events = {words(rule.event): rule.event for rule in machine.rules}
    for source, target, label in arrows:
        on, *more = label.split(", ")
        for event in (on, *(one for one in more if one in events)):
            rule = machine.rules.rule(phases[source], events[event])
            assert rule and phases[target] in rule.to, f"{source} --> {target} : {event}"


def test_phases_of_the_sequences_exist_and_follow_each_other():
    assert len(SEQUENCES) == 2
    for sequence in SEQUENCES:
        assert set(re.findall(r"\b[A-Z]{3,}\b", sequence)) - NO_PHASES
        named = {"run": "a host's run", "first host": "the first host"}
        steps = re.findall(r"(run|first host) ([A-Z]+) to ([A-Z]+)", sequence)
        shown = {phase for _, *pair in steps for phase in pair}
        assert set(re.findall(r"\b[A-Z]{3,}\b", sequence)) - NO_PHASES == shown
        for name, source, target in steps:
            machine = MACHINES[named[name]]
            phases = machine.phases.__members__
            assert any(
                phases[source] in rule.phases and phases[target] in rule.to
                for rule in machine.rules
            ), f"{name}: {source} to {target}"


@pytest.mark.parametrize("kind_and_text", PICTURES, ids=[kind for kind, _ in PICTURES])
def test_pictures_hold_nothing_that_mermaid_takes_for_something_else(kind_and_text):
    """A semicolon or a hash ends a line early; so does a second colon in a state diagram."""
    kind, text = kind_and_text
    line = {
        "sequenceDiagram": r"participant [A-Z] as [\w -]+"
        r"|[A-Z]->>[A-Z]: [^;#:]+|Note over [A-Z](,[A-Z])?: [^;#:]+",
        "stateDiagram": r"(\[\*\]|[A-Z]+) --> (\[\*\]|[A-Z]+)( : [^;#:]+)?",
    }[kind]
    for one in text.splitlines():
        assert re.fullmatch(line, one.strip()), one
    used = set(re.findall(r"\b[A-Z](?=->>|:|,[A-Z]:)|(?<=over )[A-Z]", text))
    assert kind == "stateDiagram" or used == set(re.findall(r"participant ([A-Z])", text))


def test_files_and_anchors_that_the_page_names_exist():
    folders = PAGE.partition("## The folders\n\n```\n")[2].partition("```")[0]
    for path in re.findall(r"^(\S+/)", folders, re.MULTILINE):
        assert (REPO / path).is_dir(), path
    titles = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    for path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", PAGE):
        if path:
            assert (REPO / "docs" / path).exists(), path
        else:
            assert anchor in titles, anchor
