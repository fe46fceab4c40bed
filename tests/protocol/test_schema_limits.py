"""Schemas whose compilation would take long are refused; usual ones are taken."""

from __future__ import annotations

from typing import Any

import pytest

from epd_serve.protocol.openai.tools import MAX_ENUM_VALUES, MAX_JOINED_PATTERNS, check_schema

PATTERNS: list[dict[str, Any]] = [
    {"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}"} for number in range(1, MAX_JOINED_PATTERNS + 2)
]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"allOf": [{"allOf": PATTERNS[:5]}, {"allOf": PATTERNS[5:]}]},
        {
            "properties": {"a": {"allOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]}},
            "$defs": dict(enumerate(PATTERNS)),
        },
        {
            "$ref": "#/$defs/0",
            "pattern": "a",
            "$defs": {str(i): {**one, "$ref": f"#/$defs/{i + 1}"} for i, one in enumerate(PATTERNS)},
        },
        {"patternProperties": {one["pattern"]: {} for one in PATTERNS}, "allOf": [{"properties": {"a": {}}}]},
    ],
)
def test_patterns_that_may_have_to_match_one_string_are_few(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has \d+ patterns, and allOf or \$ref"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS[:-1]},
        {"type": "object", "properties": {str(i): one for i, one in enumerate(PATTERNS * 10)}},
        {
            "properties": {str(i): {"$ref": f"#/$defs/{i}", "title": "a", "examples": ["b"]} for i in range(9)},
            "$defs": {str(i): one for i, one in enumerate(PATTERNS)},
        },
        {
            "properties": {"a": {"allOf": [{"$ref": "#/$defs/0"}], "title": "A"}},
            "$defs": dict(enumerate(PATTERNS)),
        },
    ],
)
def test_usual_schemas_are_taken(schema: dict[str, Any]) -> None:
    assert check_schema(schema) is schema


def test_enums_are_bounded() -> None:
    check_schema({"enum": list(range(MAX_ENUM_VALUES))})
    with pytest.raises(ValueError, match="values together"):
        check_schema({"anyOf": [{"enum": list(range(MAX_ENUM_VALUES))}, {"enum": [1]}]})
