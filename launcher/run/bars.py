"""Progress bars on a console that is not a terminal: print a bar's state as a line now and then.

Imported by output.py, in the keeper's process: it needs no package of ours.
"""

from __future__ import annotations

NEVER = float("inf")
_STATE_SECONDS = 5.0  # between two lines of a bar that is still moving
_SOON_SECONDS = 0.2  # until its first: a bar that ends earlier shows only its last state
_WRITTEN_AT_ONCE_SECONDS = 0.01
_MOST_ROWS = 100  # of one move
_LONGEST = 1 << 16  # bytes of a row
# Not compiled here: most ranks need none, nor `re`, which takes 4 ms.
_UP = rb"\x1b\[\d*[AF]"
_MOVE = rb"(\r|\n|\x1b\[[?\d;]*[A-HJKSTfhlsu])"
_WHOLE_LINE = rb"[^\r\n\x1b][^\r\n]*\r?\n"
_UNSEEN = rb"\x1b\[[\d;]*m|\s"


def writes_over(text: bytes) -> bool:
    """Tell whether text overwrites earlier text, as a bar does."""
    if b"\r" in text and b"\r" in text.replace(b"\r\n", b"")[:-1]:
        return True
    if b"\x1b[" not in text:
        return False
    import re

    return re.search(_UP, text) is not None


class _Row:
    """A row of a terminal: its text, and its last text that was not blank."""

    def __init__(self) -> None:
        self.text = self.state = b""
        self.is_new = False  # the state was not shown yet

    def write(self, text: bytes) -> None:
        import re

        self.text = text
        if re.sub(_UNSEEN, b"", text):
            self.is_new = self.is_new or text != self.state
            self.state = text


class Bars:
    """The rows of a terminal that a script may still write over.

    These are the last ones: as many as the cursor has gone up, and one more. A row above them is
    finished: a line. Of the others, states are shown as lines, every 5 s at most.
    """

    def __init__(self) -> None:
        self.due = NEVER  # when to show states
        self._rows, self._at = [_Row()], 0
        self._is_at_begin = False  # of a row: the next text replaces it
        self._depth, self._has_gone_up = 1, False
        self._cut_off = b""  # the state of a bar that other text has interrupted
        self._next = self._fed_at = -NEVER

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to show or to overwrite."""
        return self._depth == 1 and not (self._rows[0].text or self._cut_off)

    def feed(self, text: bytes, now: float) -> bytes:
        """Process text that was written `now`, in seconds; return complete lines."""
        import re

        lines: list[bytes] = []
        row = self._rows[self._at]
        is_later = self._is_at_begin or now > self._fed_at + _WRITTEN_AT_ONCE_SECONDS
        if is_later and row.text and re.match(_WHOLE_LINE, text):  # a printed line, not the bar's
            self._cut_off = row.state if row.is_new else b""
            self._rows[self._at], self._is_at_begin = _Row(), False
        self._fed_at = now
        pieces = re.split(_MOVE, text)
        for written, move in zip(pieces[::2], [*pieces[1::2], b""]):
            if written:
                self._write(written, lines)
            if move:
                self._move(move, lines)
        is_new = self._cut_off or any(row.is_new for row in self._rows)
        self.due = max(self._next, min(self.due, now + _SOON_SECONDS)) if is_new else NEVER
        return b"".join(lines)

    def _write(self, text: bytes, lines: list[bytes]) -> None:
        row = self._rows[self._at]
        row.write(text if self._is_at_begin else row.text + text)
        self._is_at_begin = False
        if len(row.text) > _LONGEST:
            self._down(lines)

    def _move(self, move: bytes, lines: list[bytes]) -> None:
        kind, count = move[-1:], move[2:-1]
        if kind in b"\nBE":
            self._down(lines)
        elif kind in b"AF":
            self._up(min(int(count) if count.isdigit() else 1, _MOST_ROWS))
        elif kind in b"\rG":
            self._is_at_begin, self._cut_off = True, b""
        elif kind in b"JK":
            self._rows[self._at].text = b""

    def _down(self, lines: list[bytes]) -> None:
        self._at, self._is_at_begin = self._at + 1, True
        if self._at == len(self._rows):
            self._rows.append(_Row())
        while len(self._rows) > self._depth:
            row = self._rows.pop(0)
            self._at -= 1
            if row.is_new or (self._depth == 1 and not row.state):
                lines.append(row.state + b"\n")

    def _up(self, count: int) -> None:
        self._has_gone_up = True
        above = max(0, count - self._at)  # rows that are there already, or were never written
        self._rows[:0] = [_Row() for _ in range(above)]
        self._at += above - count
        self._depth = max(self._depth, len(self._rows) - self._at)

    def states(self, now: float) -> bytes:
        """Return the lines that are due, or the last ones."""
        states = [row.state for row in self._rows if row.is_new] or [self._cut_off]
        for row in self._rows:
            row.is_new = False
        self._cut_off = b""
        if not self._has_gone_up:  # rows below each other are finished
            self._rows, self._at, self._depth = self._rows[self._at :][:1], 0, 1
        self._has_gone_up = False
        self.due, self._next = NEVER, now + _STATE_SECONDS
        return b"".join(state + b"\n" for state in states if state)
