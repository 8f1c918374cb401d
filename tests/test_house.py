"""The house: which modules import which, and how long files and functions are."""

import ast
import io
import re
import sys
import tokenize
from graphlib import TopologicalSorter

import pytest
from conftest import REPO

PACKAGE, TOOLS = REPO / "launcher", REPO / "launcher_tools"
# A folder for the ranks' sys.path, with what they import from it.
SMDDP = REPO / "smddp"
# From the top down: a module imports from its own floor and from those below.
FLOORS = [
    ("launcher_tools",),  # which launcher.cli finds beside the package, for whom it is to run
    ("launcher.__main__",),
    ("launcher.cli",),
    ("launcher.run", "launcher.container"),
    ("launcher.warm",),
    ("launcher.peers",),
    ("launcher.watch",),
    ("launcher.result",),
    ("launcher.job",),
    ("launcher.host",),
    ("launcher.errors",),
    ("launcher.text",),
    ("launcher",),
]
# Executed by path for each rank, in it, beside them, and in the toolkit's process.
CHILDREN = [
    "launcher.run.stub",
    "launcher.run.keeper",
    "launcher.run.lines",
    "launcher.run.output",
    "launcher.run.rank",
    "launcher.run.clues",
    "launcher.run.store",
    "launcher.warm.warm",
    "launcher.watch.in_rank",
    "launcher.container.training",
    "launcher_tools.doctor_probe",
]
# What else acts, or waits, in the folders where all is pure but children.
ACTS = {
    "launcher.run.supervisor",
    "launcher.run.keepers",
    "launcher.run.torchrun",
    "launcher.peers.channel",
    "launcher.result.failure",
}
PURE_FOLDERS = ("launcher.run.", "launcher.peers.", "launcher.result.", "launcher.watch.")
# shlex splits a text; signal is for the numbers.
ALLOWED_IN_PURE = (
    "__future__ collections collections.abc enum functools hashlib itertools json math"
)
ALLOWED_IN_PURE = {*ALLOWED_IN_PURE.split(), "operator", "re", "shlex", "signal", "typing"}
OURS = {"launcher", "launcher_tools"}
# What children import that stands beside them.
BESIDE = {path.stem for folder in ("run", "warm") for path in (PACKAGE / folder).glob("*.py")}
# Lines of code: no blanks, comments, docstrings.
MOST_LINES_OF_FOLDERS = {
    ("",): 7635,
    ("run", "warm"): 2637,
    ("watch",): 1082,
    ("peers",): 836,
    ("job",): 1432,
    ("result",): 411,
    ("container",): 212,
    ("../launcher_tools",): 1973,
    ("../tests",): 17_000,
    ("../tests/simulation",): 2500,
}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 50
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted(TOOLS.rglob("*.py"))]
MODULES = {
    ".".join(path.relative_to(REPO).with_suffix("").parts).replace(".__init__", ""): path
    for path in FILES
}
PURE = ["launcher.text.words", "launcher.errors"]
PURE += [one for one in MODULES if one.startswith(PURE_FOLDERS) and one not in {*ACTS, *CHILDREN}]


TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imported(tree):
    """Return what a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return found


IMPORTS = {module: imported(tree) for module, tree in TREES.items()}


def floor(module):
    """Return the number of a module's floor, 0 for the top."""
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(module)


def test_the_floors_are_those_of_the_folders():
    folders = {f"launcher.{path.name}" for path in PACKAGE.iterdir() if path.is_dir()}
    folders.add(TOOLS.name)
    named = {name for names in FLOORS for name in names}
    assert folders - {"launcher.__pycache__"} <= named <= {*MODULES, *folders}


def test_arrows_lead_downward_only():
    arrows = [(module, name) for module in MODULES for name in IMPORTS[module]]
    ours = [(module, name) for module, name in arrows if name.split(".")[0] in OURS]
    assert [arrow for arrow in ours if arrow[1] not in MODULES] == []
    assert [arrow for arrow in ours if floor(arrow[0]) > floor(arrow[1])] == []
    assert [arrow for arrow in ours if arrow[1] in CHILDREN] == []  # they run in child processes


def test_the_first_line_of_a_module_says_what_it_does():
    firsts = {module: ast.get_docstring(tree) or "" for module, tree in TREES.items()}
    assert [module for module, text in firsts.items() if len(text.partition("\n")[0]) <= 20] == []


def test_modules_name_only_modules_that_are_there():
    folders = "|".join(path.name for path in PACKAGE.iterdir() if path.is_dir())
    named = re.compile(rf"\b(?:{folders})/\w+\.py\b")
    names = {name for path in FILES for name in named.findall(path.read_text())}
    assert names and not [name for name in sorted(names) if not (PACKAGE / name).exists()]


def test_no_module_imports_itself_by_way_of_others():
    """Imports in functions count: otherwise they could hide a cycle."""
    graph = {module: names & {*MODULES} for module, names in IMPORTS.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_pure_modules_import_nothing_that_acts():
    """Nor by way of others."""
    seen, left = set(), {*PURE}
    while left:
        module = left.pop()
        seen.add(module)
        left |= IMPORTS[module] & {*MODULES} - seen
        others = IMPORTS[module] - {*MODULES} - ALLOWED_IN_PURE
        assert not others, f"{module} imports {others}"


def test_what_runs_in_other_processes_imports_nothing_of_ours():
    assert [module for module in CHILDREN if IMPORTS[module] & {*MODULES}] == []


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python lists its own modules since 3.10")
def test_what_ranks_import_from_smddp_needs_torch_alone():
    """And the launcher none of it: another test holds that it imports nothing but its own."""
    assert not [path for path in (SMDDP, SMDDP / "smdistributed") if list(path.glob("*.py"))]
    for path in SMDDP.rglob("*.py"):
        theirs = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert theirs <= {"smdistributed", "torch", *sys.stdlib_module_names}, path


def lines_of_code(path):
    """Return how many lines of a file are code: no blanks, comments, docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


def test_the_map_names_what_stands_there():
    steps = re.findall(
        r"(?m)^ {4}([a-z_/]+\.py) +(.*(?:\n {5,}.*)*)", ast.get_docstring(TREES["launcher"])
    )
    assert len(steps) > 25
    for path, what in steps:
        text = (PACKAGE / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", what):
            assert re.search(rf"(?m)^ *(def |class )?{name}\b( =|\(|:)", text), f"{path}: {name}"


def test_no_file_is_longer_than_a_reader_holds_in_mind():
    lengths = {module: lines_of_code(path) for module, path in MODULES.items()}
    long = {module: count for module, count in lengths.items() if count > MOST_LINES_OF_A_FILE}
    assert long == {}


@pytest.mark.parametrize("folders", MOST_LINES_OF_FOLDERS, ids=" and ".join)
def test_the_launcher_stays_as_small_as_it_was_made(folders):
    files = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    assert sum(map(lines_of_code, files)) <= MOST_LINES_OF_FOLDERS[folders]


def own_lines(function):
    """Return the number of lines of a function without the functions inside it."""
    inside = set()
    for node in ast.walk(function):
        if isinstance(node, FUNCTIONS) and node is not function:
            inside |= set(range(node.lineno, node.end_lineno + 1))
    return function.end_lineno - function.lineno + 1 - len(inside)


def test_no_function_is_longer_than_a_screen():
    functions = [
        (module, node.name, own_lines(node))
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    assert [one for one in functions if one[2] > MOST_LINES_OF_A_FUNCTION] == []


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python lists its own modules since 3.10")
def test_nothing_but_the_standard_library_and_psutil_is_imported():
    theirs = {
        (module, name.split(".")[0])
        for module in MODULES
        for name in IMPORTS[module]
        if name.split(".")[0] not in {*sys.stdlib_module_names, *OURS, "psutil"}
        and not (module in CHILDREN and name.split(".")[0] in BESIDE)
    }
    assert theirs == {
        ("launcher.run.store", "torch"),
        ("launcher.warm.warm", "torch"),
        ("launcher.container.training", "sagemaker_training"),
        ("launcher_tools.doctor_probe", "torch"),
    }


CODES = re.compile(r"\bEXIT_(USAGE|HOST_LOST|SOFTWARE|HUNG|CANNOT_EXECUTE|NOT_FOUND)\b")


def test_causes_alone_chooses_exit_codes():
    """The numbers stand in launcher/errors.py, and the table of --launcher-help names them."""
    use_them = {module for module, path in MODULES.items() if CODES.search(path.read_text())}
    assert use_them == {"launcher.errors", "launcher.result.causes"}
