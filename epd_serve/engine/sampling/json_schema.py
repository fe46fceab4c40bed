"""JSON schemas for the grammar engine: objects closed, and patterns left out that it cannot compile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

_Schema = dict[str, Any]
#: Keywords whose value is data, not a schema.
_DATA = frozenset({"enum", "const", "default", "example", "examples"})
#: Keywords whose value holds schemas by name.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def close_objects(schema: _Schema) -> _Schema:
    """Allow declared keys alone where a schema has ``properties`` and does not say ``additionalProperties``.

    Objects that have to follow several schemas with ``properties`` at once (``allOf``, or ``anyOf`` or ``$ref``
    beside ``properties``) stay open: a key that one of them declares would be undeclared in another.
    """
    joined = _Joined(schema)

    def close(node: _Schema, copied: _Schema) -> _Schema:
        declared = node.get("properties")
        if (
            isinstance(declared, dict)
            and "additionalProperties" not in node
            and node.get("unevaluatedProperties", False) is False
            and all(isinstance(name, str) and name in declared for name in _list(node.get("required")))
            and id(node) not in joined.schemas
        ):
            copied["additionalProperties"] = False
        return copied

    closed: _Schema = _rewrite(schema, close)
    return closed


def patterns_of(schema: _Schema) -> list[str]:
    """Return the regular expressions of a schema, each once."""
    found: dict[str, None] = {}

    def note(node: _Schema, copied: _Schema) -> _Schema:
        found.update((pattern, None) for pattern in _patterns(node))
        return copied

    _rewrite(schema, note)
    return list(found)


def drop_patterns(schema: _Schema, patterns: Collection[str]) -> _Schema:
    """Return a schema without these regular expressions; keys that they allowed are allowed still."""

    def drop(node: _Schema, copied: _Schema) -> _Schema:
        if copied.get("pattern") in patterns:
            del copied["pattern"]
        by_pattern = copied.get("patternProperties")
        if isinstance(by_pattern, dict) and not by_pattern.keys().isdisjoint(patterns):
            copied["patternProperties"] = {key: one for key, one in by_pattern.items() if key not in patterns}
            copied["additionalProperties"] = True
        return copied

    dropped: _Schema = _rewrite(schema, drop)
    return dropped


def _patterns(node: _Schema) -> Iterator[str]:
    if isinstance(node.get("pattern"), str):
        yield node["pattern"]
    if isinstance(node.get("patternProperties"), dict):
        yield from node["patternProperties"]


def _rewrite(node: Any, change: Callable[[_Schema, _Schema], _Schema]) -> Any:
    """Copy a schema; ``change`` gets each schema in it, and its copy with the schemas below it changed already."""
    if isinstance(node, list):
        return [_rewrite(one, change) for one in node]
    if not isinstance(node, dict):
        return node
    copied: _Schema = {}
    for key, value in node.items():
        if key in _DATA:
            copied[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            copied[key] = {name: _rewrite(one, change) for name, one in value.items()}
        else:
            copied[key] = _rewrite(value, change)
    return change(node, copied)


class _Joined:
    """The schemas of a schema that an object has to follow beside others with ``properties``.

    Attributes:
        schemas: their ids.
    """

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._declaring: dict[int, bool] = {}
        self.schemas: set[int] = set()
        _rewrite(root, self._look_at)

    def _look_at(self, node: _Schema, copied: _Schema) -> _Schema:
        groups = self._groups(node)
        num_declaring = sum(any(map(self._declares, group)) for group in groups)
        if num_declaring + bool(node.get("properties")) > 1:
            self.schemas.add(id(node))
            for group in groups:
                for member in group:
                    self._join(member)
        return copied

    def _groups(self, node: _Schema) -> list[list[_Schema]]:
        """The schemas that a value of ``node`` has to follow as well: one of each group at least."""
        dependent = node.get("dependentSchemas")
        by_key = list(dependent.values()) if isinstance(dependent, dict) else []
        groups = [[one] for one in _list(node.get("allOf"))]
        groups += [_list(node.get("anyOf")), _list(node.get("oneOf")), [node.get("then"), node.get("else")]]
        groups += [by_key, [self._target(node.get("$ref"))]]
        return [[one for one in group if isinstance(one, dict)] for group in groups]

    def _declares(self, node: _Schema) -> bool:
        """Whether a schema has ``properties``, itself or in what it refers to."""
        if id(node) not in self._declaring:
            self._declaring[id(node)] = False  # for schemas that refer to themselves
            members = (member for group in self._groups(node) for member in group)
            self._declaring[id(node)] = bool(node.get("properties")) or any(map(self._declares, members))
        return self._declaring[id(node)]

    def _join(self, node: _Schema) -> None:
        if id(node) not in self.schemas:
            self.schemas.add(id(node))
            for group in self._groups(node):
                for member in group:
                    self._join(member)

    def _target(self, ref: Any) -> Any:
        """The place in the schema to which ``#/...`` points."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        node: Any = self._root
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
        return node


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
