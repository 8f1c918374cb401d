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
_OVERWRITES = rb"\r(?!\n|\Z)|\x1b\[\d*[AF]"
_MOVE = rb"(\r|\n|\x1b\[[?\d;]*[A-HJKSTfhlsu])"
_PRINTED = rb"[^\r\n\x1b][^\r\n]*\r?\n(?:[^\r\n\x1b]*\r?\n)*"  # whole lines
_UNSEEN = rb"\x1b\[[\d;]*m|\s"


class _Row:
    """A row of a terminal: its text, and its last text that was not blank."""

    text = state = b""
    is_new = False  # the state was not shown yet


class Bars:
    """The rows of a terminal that a script may still write over.

    These are the last ones: as many as the cursor has gone up, and one more. A row above them is
    finished: a line. Of the others, states are shown as lines, every 5 s at most. Lines that are
    printed amid a bar leave its row as it is.
    """

    def __init__(self) -> None:
        self.due = NEVER  # when to show states
        self._rows, self._at = [_Row()], 0
        self._is_at_begin = False  # of a row: the next text replaces it
        self._has_gone_up = False
        self._next = self._fed_at = -NEVER

    def takes(self, text: bytes) -> bool:
        """Tell whether this takes text: it overwrites earlier text, or would stand amid a bar."""
        if len(self._rows) > 1 or self._rows[0].text:
            return True
        if not (b"\r" in text or b"\x1b[" in text):
            return False
        import re

        return re.search(_OVERWRITES, text) is not None

    def feed(self, text: bytes, now: float) -> bytes:
        """Process text that was written `now`, in seconds; return complete lines."""
        import re

        lines: list[bytes] = []
        row = self._rows[self._at]
        is_later = self._is_at_begin or now > self._fed_at + _WRITTEN_AT_ONCE_SECONDS
        printed = re.match(_PRINTED, text) if is_later and row.text else None
        if printed and len(self._rows) == 1:
            lines.append(printed[0])
            text = text[printed.end() :]
            row.text, self._is_at_begin = b"", True
        elif printed:
            # It takes the place of this row, and moves down to the next, as on a terminal.
            lines += [row.state + b"\n"] * row.is_new
            self._rows[self._at] = _Row()
        self._fed_at = now
        pieces = re.split(_MOVE, text)
        for written, move in zip(pieces[::2], [*pieces[1::2], b""]):
            row = self._rows[self._at]
            if written:
                row.text = written if self._is_at_begin else row.text + written
                self._is_at_begin = False
                if re.sub(_UNSEEN, b"", row.text):
                    row.is_new |= row.text != row.state
                    row.state = row.text
            if len(row.text) > _LONGEST:
                self._down(lines)
            kind, count = move[-1:], move[2:-1]
            if not kind:  # the text ends without a move
                break
            if kind in b"\nBE":
                self._down(lines)
            elif kind in b"AF":
                above = min(int(count[:9]) if count.isdigit() else 1, _MOST_ROWS) - self._at
                self._rows[:0] = [_Row() for _ in range(above)]  # which were never written
                self._at, self._has_gone_up = max(0, -above), True
            elif kind in b"\rG":
                self._is_at_begin = True
            elif kind in b"JK":
                self._rows[self._at].text = b""
        is_new = any(row.is_new for row in self._rows)
        self.due = max(self._next, min(self.due, now + _SOON_SECONDS)) if is_new else NEVER
        return b"".join(lines)

    def _down(self, lines: list[bytes]) -> None:
        self._at, self._is_at_begin = self._at + 1, True
        if self._at == len(self._rows):
            self._at -= 1
            row = self._rows.pop(0)
            self._rows.append(_Row())
            if row.is_new or (len(self._rows) == 1 and not row.state):
                lines.append(row.state + b"\n")

    def states(self, now: float) -> bytes:
        """Return the lines that are due, or the last ones."""
        new = [row for row in self._rows if row.is_new]
        for row in new:
            row.is_new = False
        if not self._has_gone_up:  # rows below each other are finished
            self._rows, self._at = [self._rows[self._at]], 0
        self._has_gone_up = False
        self.due, self._next = NEVER, now + _STATE_SECONDS
        return b"".join(row.state + b"\n" for row in new)
