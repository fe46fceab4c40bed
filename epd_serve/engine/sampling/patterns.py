"""Stop strings, found in a text while it grows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import Any


class Node:
    """The longest end of the symbols so far that begins a pattern.

    Attributes:
        depth: its length.
        goes_on: whether it begins a longer pattern.
        ends: the longest pattern that the symbols end with, as the node of that pattern; None: there is none.
        fail: the next shorter such end; the root's is the root.
    """

    __slots__ = ("_children", "_high", "_low", "depth", "ends", "fail")

    def __init__(self, depth: int, low: int, high: int) -> None:
        self.depth = depth
        self._low, self._high = low, high  # places of the longer patterns that begin so
        self._children: dict[Any, Node] = {}
        self.fail = self
        self.ends: Node | None = None

    @property
    def goes_on(self) -> bool:
        return self._low < self._high


class Patterns:
    """Patterns of symbols that can be ordered: strings, or tuples of token ids. Not thread-safe.

    They are found in a sequence while it grows; a symbol costs the same whatever their number and lengths are.
    This is the automaton of Aho and Corasick (1975), whose nodes are made when they are reached: long patterns
    cost nothing before a text follows them.

    Attributes:
        root: the node of no symbols, where every sequence begins.
        first: the symbols with which patterns begin.
    """

    def __init__(self, patterns: Iterable[AbstractSequence[Any]]) -> None:
        distinct: set[Any] = set(patterns)
        # those that begin alike stand side by side, the shortest first
        self._patterns: list[AbstractSequence[Any]] = sorted(distinct)
        self.root = self._node(0, 0, len(self._patterns), None)
        self.first = frozenset(pattern[0] for pattern in self._patterns if pattern)

    def pattern(self, node: Node) -> AbstractSequence[Any]:
        """The symbols of a node that is another's, or its own, ``ends``."""
        return self._patterns[node._low - 1]

    def step(self, node: Node, symbol: Any) -> Node:
        """The node after one more symbol."""
        new: list[tuple[Node, int, int]] = []  # nodes that lack a child for the symbol, and what it stands for
        while (child := node._children.get(symbol)) is None:
            low, high = self._going_on(node, symbol)
            if low < high:
                new.append((node, low, high))
            if node is self.root:
                break
            node = node.fail
        after = child or self.root
        for parent, low, high in reversed(new):  # the shortest first: it is what the next one fails to
            after = parent._children[symbol] = self._node(parent.depth + 1, low, high, after)
        return after

    def _going_on(self, node: Node, symbol: Any) -> tuple[int, int]:
        """The places of patterns that go on so."""

        def next_symbol(pattern: AbstractSequence[Any]) -> Any:
            return pattern[node.depth]

        low = bisect_left(self._patterns, symbol, node._low, node._high, key=next_symbol)
        return low, bisect_right(self._patterns, symbol, low, node._high, key=next_symbol)

    def _node(self, depth: int, low: int, high: int, fail: Node | None) -> Node:
        is_whole = low < high and len(self._patterns[low]) == depth
        node = Node(depth, low + is_whole, high)
        if fail is not None:
            node.fail = fail
        node.ends = node if is_whole else node.fail.ends
        return node
