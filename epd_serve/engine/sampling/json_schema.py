"""Adapt JSON schemas to the grammar engine: close objects, and drop patterns that it cannot compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

_Schema = dict[str, Any]
#: Keywords whose value is data, not a schema.
_DATA = frozenset({"enum", "const", "default", "example", "examples"})
#: Keywords whose value holds schemas by name.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Group 1: look-around, back-references, atomic groups, comments, and escapes and quantifiers that llguidance does
#: not know. Other escapes match too, so that the search steps over an escaped backslash or bracket.
_UNSUPPORTED = re.compile(r"(\(\?(?:<?[=!]|P=|>|#)|\\(?![AadDfnpPrsStuUvwWxz])[0-9A-Za-z<>]|\{,)|\\.", re.DOTALL)


def enforceable(schema: _Schema, *, is_strict: bool) -> _Schema:
    """Return the schema that the grammar enforces.

    Objects with ``properties`` and without ``additionalProperties`` get only declared keys. Objects that must
    satisfy several schemas with ``properties`` (``allOf``, or ``anyOf`` or ``$ref`` next to ``properties``) stay
    open, because a key declared by one schema is undeclared in another. Unless strict, unsupported regular
    expressions are dropped, and the keys that they allowed stay allowed.
    """
    closed = deepcopy(schema)
    joined = _joined(closed)
    for node in _walk(closed):
        if not is_strict:
            _drop_patterns(node)
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


def _drop_patterns(node: _Schema) -> None:
    if not _is_supported(str(node.get("pattern", ""))):
        del node["pattern"]
    by_pattern = node.get("patternProperties")
    if isinstance(by_pattern, dict) and not all(map(_is_supported, by_pattern)):
        node["patternProperties"] = {key: one for key, one in by_pattern.items() if _is_supported(key)}
        node["additionalProperties"] = True


def _is_supported(pattern: str) -> bool:
    return not any(found[1] for found in _UNSUPPORTED.finditer(pattern))


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


def _joined(root: _Schema) -> set[int]:
    """Return ids of the schemas that an object must satisfy together with others that have ``properties``."""
    declaring: dict[int, bool] = {}
    joined: set[int] = set()

    def declares(node: _Schema) -> bool:
        """Return whether a schema has ``properties``, directly or by reference."""
        if id(node) not in declaring:
            declaring[id(node)] = False  # stops at schemas that refer to themselves
            members = (member for group in _groups(node, root) for member in group)
            declaring[id(node)] = bool(node.get("properties")) or any(map(declares, members))
        return declaring[id(node)]

    def join(node: _Schema) -> None:
        if id(node) not in joined:
            joined.add(id(node))
            for group in _groups(node, root):
                for member in group:
                    join(member)

    for node in _walk(root):
        num_declaring = sum(any(map(declares, group)) for group in _groups(node, root))
        if num_declaring + bool(node.get("properties")) > 1:
            join(node)
    return joined


def _groups(node: _Schema, root: _Schema) -> list[list[_Schema]]:
    """Return groups of further schemas; a value of ``node`` must satisfy at least one of every group."""
    dependent = node.get("dependentSchemas")
    groups = [[one] for one in _list(node.get("allOf"))]
    groups += [_list(node.get("anyOf")), _list(node.get("oneOf")), [node.get("then"), node.get("else")]]
    groups += [list(dependent.values()) if isinstance(dependent, dict) else [], [_target(node.get("$ref"), root)]]
    return [[one for one in group if isinstance(one, dict)] for group in groups]


def _target(ref: Any, root: _Schema) -> Any:
    """Return the target of ``#/...`` in the schema."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return None
    node: Any = root
    for step in ref[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
