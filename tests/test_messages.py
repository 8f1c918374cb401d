"""docs/messages.md has every line that the launcher can say, and none that it cannot."""

import ast
import re

import pytest
from conftest import REPO

PAGE = REPO / "docs" / "messages.md"
PACKAGES = (REPO / "launcher", REPO / "launcher_tools")
# The ranks' own, sm-launch doctor's findings (docs/doctor.md), and help.
NOT_HERE = ("launcher_tools/doctor", "launcher/job/help.py")
HELP = {"help", "usage", "description", "epilog"}  # keywords whose values are help, too
SAYS = {"log", "Log", "LaunchError", "Fail", "say"}  # calls whose first argument is a message
ALL_SAID = ("launcher/result/causes.py", "launcher_tools/local_report.py")
# What is compared with the words of Python and torch.
THEIRS = {"No module named HOLE", "address already in use", "__mp_main__."}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def template(node):
    """Return a text of the code with HOLE for each value in it; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "HOLE" for part in node.values)
        return "".join(parts)
    return None


def texts(tree):
    """Yield a module's texts but docstrings, help, phases (how-it-works.md) and parts of texts."""
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            left_out.add(node.body[0].value)
        if isinstance(node, ast.keyword) and node.arg in HELP:
            left_out |= set(ast.walk(node))
        if isinstance(node, ast.ClassDef) and node.name == "Phase":
            left_out |= set(ast.walk(node))
        if isinstance(node, ast.JoinedStr):
            left_out |= {inner for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    for node in ast.walk(tree):
        if template(node) and node not in left_out:
            yield node


def said(tree):
    """Return the texts that are said: arguments of calls that say them, also by way of a name."""
    found = set()
    for function in [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]:
        values = {}
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AugAssign)):
                for target in getattr(node, "targets", None) or [node.target]:
                    values.setdefault(getattr(target, "id", ""), []).append(node.value)
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            if call.args and getattr(call.func, "id", getattr(call.func, "attr", "")) in SAYS:
                names = [node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)]
                for value in [
                    call.args[0],
                    *(one for name in names for one in values.get(name, ())),
                ]:
                    found |= set(ast.walk(value))
    return found


def in_code():
    """Return what the launcher says, with where it is in the code; and all texts that it has."""
    messages, everything = {}, set()
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        name = str(path.relative_to(REPO))
        if name.startswith(NOT_HERE):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_said = said(tree)
        for node in texts(tree):
            text = template(node)
            plain = " ".join(text.replace("`", "").split()).removeprefix("launcher: ")
            everything.add(plain)
            words = re.findall("[A-Za-z]{2,}", plain.replace("HOLE", ""))
            by_form = len(plain) > 8 and text[-1] in ".\n"
            by_place = (node in is_said or name in ALL_SAID) and " " in plain
            if words and plain not in THEIRS and (by_form or by_place):
                messages[plain] = f"{name}:{node.lineno}"
    return messages, everything


MESSAGES, TEXTS = in_code()


def in_page():
    """Return the messages of the page: what is code in the first column of its tables."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            found += re.findall(r"(`+) ?(.+?) ?\1(?!`)", line.split(" | ")[0])
    return [text.replace("`", "") for _, text in found]


def pattern(code):
    """Return what finds a message of the code, with words in capitals for its values."""
    return re.compile(".*".join(map(re.escape, code.split("HOLE"))))


PATTERNS = [pattern(code) for code in TEXTS if re.search("[a-z]{2}", code.replace("HOLE", ""))]


@pytest.mark.parametrize("code", MESSAGES)
def test_the_page_has_what_the_launcher_says(code):
    """Some messages are parts of others: the page may have them there."""
    found = any(pattern(code).search(page) for page in in_page())
    assert found, f"{MESSAGES[code]}: not in docs/messages.md: {code}"


@pytest.mark.parametrize("page", in_page())
def test_the_launcher_says_what_the_page_has(page):
    without_names = re.sub("^([A-Z]+:? )+", "", page)  # a part, behind a value
    found = any(one.fullmatch(text) for one in PATTERNS for text in (page, without_names))
    assert found, f"nothing in the code says: {page}"


def test_no_message_is_twice_in_the_page():
    assert len(in_page()) == len(set(in_page()))
