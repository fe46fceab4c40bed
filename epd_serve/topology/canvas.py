"""A grid of characters on which lines join by themselves into box-drawing corners and crossings."""

from __future__ import annotations

UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8

_JOINTS = {
    UP | DOWN: "│",
    LEFT | RIGHT: "─",
    RIGHT | DOWN: "┌",
    LEFT | DOWN: "┐",
    UP | RIGHT: "└",
    UP | LEFT: "┘",
    UP | DOWN | RIGHT: "├",
    UP | DOWN | LEFT: "┤",
    LEFT | RIGHT | DOWN: "┬",
    LEFT | RIGHT | UP: "┴",
    UP | RIGHT | DOWN | LEFT: "┼",
}


class Canvas:
    """Cells are addressed by (column, row) from the upper left; text covers lines."""

    __slots__ = ("_lines", "_text")

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], int] = {}
        self._text: dict[tuple[int, int], str] = {}

    def horizontal(self, row: int, left: int, right: int) -> None:
        for column in range(left, right):
            self._join(column, row, RIGHT)
            self._join(column + 1, row, LEFT)

    def vertical(self, column: int, top: int, bottom: int) -> None:
        for row in range(top, bottom):
            self._join(column, row, DOWN)
            self._join(column, row + 1, UP)

    def box(self, left: int, top: int, right: int, bottom: int) -> None:
        self.horizontal(top, left, right)
        self.horizontal(bottom, left, right)
        self.vertical(left, top, bottom)
        self.vertical(right, top, bottom)

    def write(self, column: int, row: int, text: str) -> None:
        for offset, character in enumerate(text):
            self._text[column + offset, row] = character

    def __str__(self) -> str:
        cells = {position: _JOINTS[joint] for position, joint in self._lines.items()} | self._text
        bottom = max((row for _, row in cells), default=-1)
        right = max((column for column, _ in cells), default=-1)
        rows = ("".join(cells.get((column, row), " ") for column in range(right + 1)) for row in range(bottom + 1))
        return "\n".join(row.rstrip() for row in rows)

    def _join(self, column: int, row: int, direction: int) -> None:
        self._lines[column, row] = self._lines.get((column, row), 0) | direction
