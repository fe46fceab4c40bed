"""Search a growing text for stop strings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import Any


class Node:
    """The longest suffix of the symbols so far that is a prefix of a pattern.

    Attributes:
        depth: length of the suffix.
        goes_on: True if it is a proper prefix of a pattern.
        ends: node of the longest pattern that the symbols end with; None if they end with none.
        fail: node of the next shorter suffix; the root's is the root.
    """

    __slots__ = ("_children", "_high", "_low", "depth", "ends", "fail")

    def __init__(self, depth: int, low: int, high: int) -> None:
        self.depth = depth
        self._low, self._high = low, high  # range of the longer patterns with this prefix
        self._children: dict[Any, Node] = {}
        self.fail = self
        self.ends: Node | None = None

    @property
    def goes_on(self) -> bool:
        return self._low < self._high


class Patterns:
    """Patterns of orderable symbols: strings, or tuples of token ids. Not thread-safe.

    The automaton of Aho and Corasick (1975) finds them in a growing sequence; the cost per symbol does not depend
    on their number and lengths. Nodes are created when reached, so a long pattern costs nothing until a text
    matches its start.

    Attributes:
        root: the start node, without symbols.
        first: the first symbols of the patterns.
    """

    def __init__(self, patterns: Iterable[AbstractSequence[Any]]) -> None:
        distinct: set[Any] = set(patterns)
        # patterns with a common prefix are adjacent, the shortest first
        self._patterns: list[AbstractSequence[Any]] = sorted(distinct)
        self.root = self._node(0, 0, len(self._patterns), None)
        self.first = frozenset(pattern[0] for pattern in self._patterns if pattern)

    def pattern(self, node: Node) -> AbstractSequence[Any]:
        """Return the pattern of a node taken from an ``ends`` attribute."""
        return self._patterns[node._low - 1]

    def step(self, node: Node, symbol: Any) -> Node:
        """Return the node after one more symbol."""
        new: list[tuple[Node, int, int]] = []  # nodes that lack a child for the symbol, and the child's range
        while (child := node._children.get(symbol)) is None:
            low, high = self._going_on(node, symbol)
            if low < high:
                new.append((node, low, high))
            if node is self.root:
                break
            node = node.fail
        after = child or self.root
        for parent, low, high in reversed(new):  # the shortest first: it is the next one's fail node
            after = parent._children[symbol] = self._node(parent.depth + 1, low, high, after)
        return after

    def _going_on(self, node: Node, symbol: Any) -> tuple[int, int]:
        """Return the range of patterns that continue with the symbol."""

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
