"""Requests that come from files: traces of Mooncake's format, and a user's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from epd_serve.bench.types import Item, Media
from epd_serve.bench.workloads import load_workload
from epd_serve.bench.workloads.files import BLOCK_TOKENS

TRACE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 26, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 500, "hash_ids": [0, 1, 3]},
    {"timestamp": 9000, "input_length": 600, "output_length": 7, "hash_ids": [4, 1]},
]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def items_of(kind: str, path: Path, settings: str = "") -> list[Item]:
    workload = load_workload(f"{kind}:{path}{settings}")
    items = list(workload.items(1))
    assert workload.num_items == len(items)
    return items


def words(item: Item) -> list[str]:
    (text,) = item.messages[0].parts
    assert isinstance(text, str)
    return text.split()


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    first, second, third = items_of("trace", written(tmp_path / "chat.jsonl", TRACE))
    assert [item.arrival_s for item in (first, second, third)] == [0.0, 0.0, 6.0], "from the first one on"
    assert [len(words(item)) for item in (first, second, third)] == [1100, 1536, 600]
    assert [item.max_tokens for item in (first, second, third)] == [26, 500, 7]
    assert first.workload == "chat"
    assert words(first)[: 2 * BLOCK_TOKENS] == words(second)[: 2 * BLOCK_TOKENS]
    assert words(first)[2 * BLOCK_TOKENS :] != words(second)[2 * BLOCK_TOKENS : 1100]
    assert words(third)[BLOCK_TOKENS:] == words(first)[BLOCK_TOKENS : BLOCK_TOKENS + 88]
    assert words(third)[:BLOCK_TOKENS] != words(first)[:BLOCK_TOKENS]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 3000), st.integers(1, 900), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    scale=st.floats(0.01, 2),
)
def test_any_trace(tmp_path: Path, lines: list[tuple[int, int, int, int]], scale: float) -> None:
    trace = [
        {
            "timestamp": time,
            "input_length": length,
            "output_length": output,
            "hash_ids": [first + n for n in range(-(-length // BLOCK_TOKENS))],
        }
        for time, length, output, first in lines
    ]
    items = items_of("trace", written(tmp_path / "any.jsonl", trace), f",length_scale={scale!r}")
    arrivals = [item.arrival_s for item in items]
    assert arrivals == sorted(arrivals, key=lambda at: at or 0.0)
    assert arrivals[0] == 0
    ordered = sorted(trace, key=lambda line: line["timestamp"])
    assert [len(words(item)) for item in items] == [
        max(1, round(scale * line["input_length"])) for line in ordered
    ]
    assert items == items_of("trace", tmp_path / "any.jsonl", f",length_scale={scale!r}")


def test_requests_of_a_users_file(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "red.png")
    png = (tmp_path / "red.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    lines: list[Any] = [
        {"prompt": "What is it?", "images": ["red.png", url, "https://example.org/a.jpg"], "answer": "red"},
        {"prompt": "Two?", "max_tokens": 9, "timestamp": 500, "system": "Be brief."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, sound]},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
            ],
            "fields": {"temperature": 0},
        },
        {"turns": ["one", {"prompt": "two", "images": ["red.png"]}, "three"]},
    ]
    items = items_of("custom", written(tmp_path / "mine.jsonl", lines), ",output_tokens=5,ignore_eos=true")
    first, second, third, *turns = items
    assert first.messages[0].parts == (
        Media(mime="image/png", data=png),
        Media(mime="image/png", data=png),
        Media(mime="image/*", url="https://example.org/a.jpg"),
        "What is it?",
    )
    assert (first.modality, first.max_tokens, first.arrival_s) == ("image", 5, None)
    assert [message.role for message in second.messages] == ["system", "user"]
    assert (second.modality, second.max_tokens, second.arrival_s) == ("text", 9, 0.5)
    assert third.messages[0].parts == ("a", sound)
    assert third.modality == "audio+image"
    assert third.fields == {"ignore_eos": True, "temperature": 0}
    assert [(item.turn, item.modality) for item in turns] == [(0, "text"), (1, "image"), (2, "image")]
    assert len({item.conversation for item in turns}) == 1
    assert [item.conversation for item in (first, second, third)] == [None] * 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": "a"}, "has no request; write one of"),
        ({"prompt": "a", "max_token": 3}, "did you mean 'max_tokens'"),
        ({"prompt": "a", "max_tokens": True}, "Expected `int \\| null`, got `bool` - at `\\$.max_tokens`"),
        ({"prompt": "a", "images": ["gone.png"]}, "No such file"),
        ({"prompt": "a", "images": ["notes.txt"]}, "neither a URL nor a file"),
        ({"prompt": "a", "images": ["data:image/png;base64,!"]}, "base64"),
        ({"messages": [{"content": "a"}]}, "missing required field `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "unknown content part .*smell"),
    ],
)
def test_a_users_file_with_a_fault_is_refused_with_its_line(tmp_path: Path, line: Any, says: str) -> None:
    path = written(tmp_path / "mine.jsonl", [{"prompt": "good"}, line])
    with pytest.raises(ValueError, match=rf"mine\.jsonl:2: .*{says}"):
        load_workload(f"custom:{path}")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "image_url", "url", "prompt", "images"]), inner
        )
    ),
    max_leaves=4,
)
_LINES = st.dictionaries(
    st.sampled_from(
        ["messages", "prompt", "turns", "images", "max_tokens", "timestamp", "fields", "system", "id"]
    ),
    _JSON,
    max_size=3,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lines=st.lists(_LINES, max_size=3))
def test_any_file_is_a_workload_or_refused_with_a_reason(tmp_path: Path, lines: list[Any]) -> None:
    path = written(tmp_path / "any.jsonl", lines)
    try:
        items = items_of("custom", path)
    except ValueError as error:
        assert str(error).startswith(str(path))
    else:
        assert [item.index for item in items] == list(range(len(items)))
        assert all(item.messages and item.max_tokens > 0 for item in items)
