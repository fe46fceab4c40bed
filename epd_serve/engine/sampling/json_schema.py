"""Adapt JSON schemas to the grammar engine: close objects, and drop patterns the engine cannot compile."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any

_Schema = dict[str, Any]
#: Keywords whose value is data, not a schema.
_DATA = frozenset({"enum", "const", "default", "example", "examples"})
#: Keywords whose value holds schemas by name.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def close_objects(schema: _Schema) -> _Schema:
    """Forbid undeclared keys in schemas with ``properties`` and without ``additionalProperties``.

    Objects that must satisfy several schemas with ``properties`` (``allOf``, or ``anyOf`` or ``$ref`` next to
    ``properties``) stay open, because a key declared by one schema is undeclared in another.
    """
    closed = deepcopy(schema)
    joined = _Joined(closed).schemas
    for node in _walk(closed):
        declared = node.get("properties")
        if (
            isinstance(declared, dict)
            and "additionalProperties" not in node
            and node.get("unevaluatedProperties", False) is False
            and all(isinstance(name, str) and name in declared for name in _list(node.get("required")))
            and id(node) not in joined
        ):
            node["additionalProperties"] = False
    return closed


def patterns_of(schema: _Schema) -> list[str]:
    """Return the distinct regular expressions of a schema."""
    found: dict[str, None] = {}
    for node in _walk(schema):
        if isinstance(node.get("pattern"), str):
            found[node["pattern"]] = None
        if isinstance(node.get("patternProperties"), dict):
            found |= dict.fromkeys(node["patternProperties"])
    return list(found)


def drop_patterns(schema: _Schema, patterns: Collection[str]) -> _Schema:
    """Return a schema without these regular expressions; keys that they allowed stay allowed."""
    dropped = deepcopy(schema)
    for node in _walk(dropped):
        if node.get("pattern") in patterns:
            del node["pattern"]
        by_pattern = node.get("patternProperties")
        if isinstance(by_pattern, dict) and not by_pattern.keys().isdisjoint(patterns):
            node["patternProperties"] = {key: one for key, one in by_pattern.items() if key not in patterns}
            node["additionalProperties"] = True
    return dropped


def _walk(node: Any) -> Iterator[_Schema]:
    """Yield each schema within a schema, the inner ones first."""
    if isinstance(node, list):
        for one in node:
            yield from _walk(one)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in _BY_NAME and isinstance(value, dict):
                yield from _walk(list(value.values()))
            elif key not in _DATA:
                yield from _walk(value)
        yield node


class _Joined:
    """Subschemas that an object must satisfy together with other schemas that have ``properties``.

    Attributes:
        schemas: ids of these subschemas.
    """

    def __init__(self, root: _Schema) -> None:
        self._root = root
        self._declaring: dict[int, bool] = {}
        self.schemas: set[int] = set()
        for node in _walk(root):
            groups = self._groups(node)
            num_declaring = sum(any(map(self._declares, group)) for group in groups)
            if num_declaring + bool(node.get("properties")) > 1:
                self._join(node)

    def _groups(self, node: _Schema) -> list[list[_Schema]]:
        """Return groups of further schemas; a value of ``node`` must satisfy at least one of every group."""
        dependent = node.get("dependentSchemas")
        by_key = list(dependent.values()) if isinstance(dependent, dict) else []
        groups = [[one] for one in _list(node.get("allOf"))]
        groups += [_list(node.get("anyOf")), _list(node.get("oneOf")), [node.get("then"), node.get("else")]]
        groups += [by_key, [self._target(node.get("$ref"))]]
        return [[one for one in group if isinstance(one, dict)] for group in groups]

    def _declares(self, node: _Schema) -> bool:
        """Return whether a schema has ``properties``, directly or by reference."""
        if id(node) not in self._declaring:
            self._declaring[id(node)] = False  # stops at schemas that refer to themselves
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
        """Return the target of ``#/...`` in the schema."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        node: Any = self._root
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
        return node


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
