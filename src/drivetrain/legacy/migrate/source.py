"""A Python file that is edited at the positions of nodes in the syntax tree; all other bytes are kept."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from drivetrain.errors import ConfigurationError

Span: TypeAlias = tuple[int, int]


class Remark(NamedTuple):
    """One line of the report.

    Attributes:
        line: the number of the line in the original file.
        text: "old -> new" for a change, "differs: ..." for code whose result has changed, and "left: ..." for work that
            the user must do.
        is_left: whether the user must do something.
    """

    line: int
    text: str
    is_left: bool


class _Edit(NamedTuple):
    start: int
    end: int
    pieces: tuple[str | Span, ...]  # each span is replaced by the edited text in the span


class Source:
    """A Python file, with the edits of the file and the remarks about the file for the report.

    Args:
        name: the file's name in messages.
        content: the bytes of the file.

    Raises:
        ConfigurationError: the text is not valid Python.
    """

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        try:
            lines = io.BytesIO(re.sub(rb"\r\n?", b"\n", content))
            self._encoding, _ = tokenize.detect_encoding(lines.readline)
            self.text = content.decode(self._encoding)
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            where = f"{name}:{error.lineno}" if error.lineno else name
            raise ConfigurationError(f"{where}: this is no Python 3: {error.msg}. Mend it first.") from None
        except (UnicodeDecodeError, ValueError, RecursionError, LookupError) as error:
            raise ConfigurationError(f"{name}: it cannot be read as Python: {error}. Mend it first.") from None
        self.starts = [0, *(found.end() for found in re.finditer(r"\r\n|\r|\n", self.text))]
        self.newline = next((found[0] for found in re.finditer(r"\r\n|\r|\n", self.text)), "\n")
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.remarks: list[Remark] = []
        self._edits: list[_Edit] = []

    # ---- positions ---------------------------------------------------------------------------------------------------

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias | ast.arg) -> Span:
        """Return the indices of the begin and the end of ``node`` in the text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._position(node.lineno, node.col_offset), self._position(node.end_lineno, node.end_col_offset)

    def _position(self, line: int, column: int) -> int:
        """Return the index of the character at a column; the syntax tree counts columns in UTF-8 bytes."""
        start = self.starts[line - 1]
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="ignore"))

    def text_of(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias | ast.arg) -> str:
        """Return the text of ``node``."""
        start, end = self.span(node)
        return self.text[start:end]

    def is_in_f_string(self, node: ast.AST) -> bool:
        """Whether ``node`` is in an f-string. Python before 3.12 does not know the positions of nodes in an
        f-string.
        """
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, (ast.stmt, ast.JoinedStr)):
            parent = self.parents.get(parent)
        return isinstance(parent, ast.JoinedStr)

    # ---- edits -------------------------------------------------------------------------------------------------------

    def replace(self, start: int, end: int, *pieces: str | Span) -> None:
        """Replace the text from ``start`` to ``end`` by ``pieces``: texts, and spans of the original text."""
        self._edits.append(_Edit(start, end, pieces))

    def insert_before(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Insert statements before ``statement``; if possible, each new statement gets its own line."""
        start = self.span(statement)[0]
        indent = self.text[self.starts[statement.lineno - 1] : start]
        between = f"{self.newline}{indent}" if not indent.strip() else "; "
        self.replace(start, start, "".join(f"{line}{between}" for line in lines))

    def remove(self, items: Sequence[Span], doomed: set[int]) -> None:
        """Remove the ``items`` at the indices ``doomed`` from a comma-separated list; comments are kept."""
        last = max((index for index in range(len(items)) if index not in doomed), default=-1)
        for index in sorted(doomed):
            start, end = items[index]
            if index > last >= 0 and "#" not in self.text[items[index - 1][1] : start]:
                start = items[index - 1][1]
            elif (comma := re.match(r"[\s\\]*,[ \t]*", self.text[end:])) is not None:
                end += comma.end()
            self.replace(*self._with_its_line(start, end))

    def _with_its_line(self, start: int, end: int) -> Span:
        """Return the span from ``start`` to ``end``; if these lines contain no other code, extend the span to complete
        lines.
        """
        before = re.search(r"(?:^|[\r\n])([ \t]*)$", self.text[:start])
        after = re.match(r"[ \t]*(\r\n|\r|\n)", self.text[end:])
        if before is None or after is None:
            return start, end
        return start - len(before[1]), end + after.end()

    def result(self) -> str:
        """Return the text with all edits."""
        outermost_first = sorted(self._edits, key=lambda edit: (edit.start, edit.end > edit.start, -edit.end))
        return self._rendered(0, len(self.text), outermost_first)

    def _rendered(self, start: int, end: int, edits: Sequence[_Edit]) -> str:
        parts, position = [], start
        for number, edit in enumerate(edits):
            if edit.start < position or edit.end > end:
                continue  # an earlier edit has removed this text, or has already applied this inner edit
            parts.append(self.text[position : edit.start])
            inner = [other for other in edits[number + 1 :] if other.end <= edit.end]
            for piece in edit.pieces:
                inside = piece if isinstance(piece, tuple) else None
                parts.append(str(piece) if inside is None else self._inside(inside, inner))
            position = max(position, edit.end)
        return "".join([*parts, self.text[position:end]])

    def _inside(self, span: Span, edits: Sequence[_Edit]) -> str:
        return self._rendered(*span, [edit for edit in edits if span[0] <= edit.start and edit.end <= span[1]])

    def content(self) -> bytes:
        """Return the bytes of the edited file, in the original encoding and with the original newlines."""
        return self.result().encode(self._encoding)

    # ---- remarks -----------------------------------------------------------------------------------------------------

    def changed(self, node: ast.AST, was: str, now: str) -> None:
        """Report a change."""
        self._remark(node, f"{_one_line(was)} -> {_one_line(now)}" if now else f"{_one_line(was)} removed", False)

    def differs(self, node: ast.AST, text: str) -> None:
        """Report a difference in the result; the program needs no change."""
        self._remark(node, f"differs: {text}", False)

    def left(self, node: ast.AST, text: str) -> None:
        """Report work that the user must do."""
        self._remark(node, f"left: {text}", True)

    def _remark(self, node: ast.AST, text: str, is_left: bool) -> None:
        remark = Remark(getattr(node, "lineno", 1), text, is_left)
        if remark not in self.remarks:
            self.remarks.append(remark)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
