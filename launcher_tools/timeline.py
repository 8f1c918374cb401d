"""`sm-launch timeline`: what each rank of a job did when, as a page or as text.

It reads the DIR/HOST/events.jsonl of all hosts (launcher/text/words.py, `Note`), whatever has
become of them: of a job that was killed the last line may be cut off, and a host may have none.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import LaunchError
from launcher.host.journal import NAME, host_folder
from launcher.host.signals import Signals
from launcher.result.causes import SUCCESS, Result
from launcher.text.log import log, show
from launcher.text.words import lasted, plural, printable
from launcher_tools import timeline_page
from launcher_tools.parser import Parser
from launcher_tools.timeline_lanes import KINDS, MARKS, Lane, Line, Timeline, parsed, timeline

PAGE = "timeline.html"
_MOST_BYTES = 64 << 20  # of a file
HELP = f"""\
usage: sm-launch timeline DIR [-o PAGE] [--text]

Show what each rank of a job did when, from DIR/HOST/{NAME}. DIR is the folder given to
--launcher-log-dir or, if there was none, the run folder of sm-launch local.

  -o PAGE  the page to write (default: DIR/{PAGE}), one HTML file that needs no network
  --text   print the timeline as text instead

Exit codes: 0; 2 if DIR has no {NAME}, or the page cannot be written."""


def run(argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Result:
    """Write the page, or print the text. Raises LaunchError."""
    parser = Parser("timeline")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("-o", "--output", metavar="PAGE")
    parser.add_argument("--text", action="store_true")
    chosen = parser.parse_args(argv)
    found = read(chosen.folder)
    if chosen.text:
        show("\n".join(text(found, shutil.get_terminal_size((100, 24)).columns)))
    if chosen.output or not chosen.text:
        path = chosen.output or os.path.join(chosen.folder, PAGE)
        write(found, path)
        log(f"the timeline is in {path}: open it in a browser.")
    return SUCCESS


def read(folder: str) -> Timeline:
    """Return the timeline of a folder. Raises LaunchError if it has no file of a host."""
    logs: dict[str, list[Line]] = {}
    notes = []
    for host, path in _files(folder):  # sorted by their folders' names
        try:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES)
        except OSError as error:
            notes.append(f"{host}/{NAME} cannot be read ({error.strerror})")
            continue
        lines, bad = parsed(data.decode("utf-8", "replace"))
        if bad:
            notes.append(f"{host}/{NAME}: {plural(bad, 'line')} unreadable or cut off")
        if lines and lines[0].host in logs:
            notes.append(f"{host}/{NAME} belongs to {lines[0].host}, which has another file")
        elif lines:
            logs[lines[0].host] = lines
    if not logs:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise LaunchError(
            f"no host's {NAME} in {folder}{why}; expected the folder given to "
            "--launcher-log-dir or, if there was none, the run folder of sm-launch local."
        )
    found = timeline(logs, [printable(note) for note in notes])
    events = [event._replace(output=_output(folder, event.line)) for event in found.events]
    return found._replace(events=events)


def _files(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the hosts' names and files; the folder may be that of one host."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise LaunchError(f"cannot read the folder {folder} ({error.strerror}).") from None
    for name in ("", *names):
        inside = os.path.join(folder, name)
        path = os.path.join(inside, NAME)
        is_closed = os.path.isdir(inside) and not os.access(inside, os.X_OK)  # to this user
        if is_closed or os.path.isfile(path):  # not a pipe, which may never have data
            yield name or os.path.basename(os.path.abspath(folder)), path


def _output(folder: str, line: Line) -> str:
    """Return the file with the output of a rank, or of its host; "" if there is none."""
    host = host_folder(folder, line.host)
    of_rank = os.path.join(host, f"attempt-{line.attempt}", f"rank-{line.rank}.log")
    return next(filter(os.path.isfile, [of_rank, os.path.join(host, "stderr.log")]), "")


def write(found: Timeline, path: str) -> None:
    """Write the page. Raises LaunchError."""
    page = timeline_page.page(found, title(found))
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
    except OSError as error:
        raise LaunchError(
            f"cannot write {path} ({error.strerror}); name another with -o."
        ) from None


def left_in(run_dir: str, folder: str) -> str:
    """Write the page of a folder into a run folder; return a line about it, or why there is none.

    A job that has not begun has no events.
    """
    try:
        write(read(folder), os.path.join(run_dir, PAGE))
    except LaunchError as error:
        begun = os.path.isdir(folder) and any(_files(folder))
        return f"no {PAGE}: {error if begun else 'nothing was started'}"
    where = f"each host's {NAME}" if folder == run_dir else os.path.join(folder, "HOST", NAME)
    return f"{PAGE}: what each rank did, and when (raw data: {where})"


# As text.


def text(found: Timeline, columns: int) -> list[str]:
    """Return the timeline as lines: one for each rank, or for a host's ranks with equal lines."""
    label = max(len(_label(lane)) for lane in found.lanes) + 3 + 4  # for a second number
    width = max(20, min(columns, 200) - label)
    rows = [f"{name:{label}}{strip}".rstrip() for name, strip in _rows(found, width)]
    used = {letter for row in rows for letter in row[label:]}
    letters = {kind: made.letter for kind, made in KINDS.items()} | MARKS
    legend = [f"{letter} {name}" for name, letter in letters.items() if letter in used - {" "}]
    spent = [f"{kind} {lasted(mean)}" for kind, mean in found.means().items()]
    begin, end = (found.clock(at) + "Z" for at in (0.0, found.seconds))
    return [
        title(found),
        *(f"note: {note}" for note in found.notes),
        "",
        f"{'':{label}}{begin}{end:>{width - len(begin)}}",
        *rows,
        "",
        "  ".join(legend),
        f"average per rank: {', '.join(spent)}",
        "",
        *_happened(found),
    ]


def title(found: Timeline) -> str:
    """Return how a job ended, in a line."""
    after = f" after {plural(found.attempts - 1, 'restart')}" if found.attempts > 1 else ""
    cause = f": {found.cause}" if found.cause else ""
    return f"{found.job or 'job'} ({found.size}) {found.how}{after}, {lasted(found.seconds)}{cause}"


def _label(lane: Lane) -> str:
    return lane.host if lane.rank is None else f"{lane.host} {lane.rank}"


def _rows(found: Timeline, width: int) -> Iterator[tuple[str, str]]:
    for lanes in found.hosts.values():
        for strip, same in itertools.groupby(lanes, lambda lane: _strip(found, lane, width)):
            first, *others = same
            last = f"-{others[-1].rank}" if others else ""
            yield _label(first) + last, strip


def _strip(found: Timeline, lane: Lane, width: int) -> str:
    """Return a lane as characters: each is that of the bar in its middle, or of a mark."""
    unit = width / max(found.seconds, 1e-9)
    letters = [" "] * width
    for bar in lane.bars:
        for at in range(round(bar.start * unit), round((bar.start + bar.seconds) * unit)):
            letters[at] = KINDS[bar.kind].letter
    # The rank's own marks replace the host's.
    for seconds, number in (*found.marks[lane.host, None], *found.marks[lane.host, lane.rank]):
        at = min(width - 1, int(seconds * unit))
        letters[at] = MARKS[found.events[number].kind]
    return "".join(letters)


def _happened(found: Timeline) -> Iterator[str]:
    """Yield the events, in order, with tracebacks and stacks."""
    for event in found.events:
        most = 160 if event.kind == "also failed" else None  # the page has the rest
        yield f"{found.clock(event.line.seconds)}Z  {event.kind}: {event.summary[:most]}"
        if event.kind != "also failed":
            yield from (f"{'':11}{line}" for line in event.line.text.splitlines())
        if event.kind == "failed" and event.output:
            yield f"{'':11}output: {event.output}"
