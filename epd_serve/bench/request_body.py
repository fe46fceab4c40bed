"""Requests as bytes: chat bodies, and the history that a later turn of a conversation sends along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pybase64

from epd_serve.bench.types import Item, Media, Message

CHAT_PATH = "/v1/chat/completions"
_encoder = msgspec.json.Encoder()
#: Part by what a media type begins with.
_PARTS = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def wire_message(message: Message) -> dict[str, Any]:
    """A message as an entry of the request's ``messages``."""
    if len(message.parts) == 1 and isinstance(message.parts[0], str):
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def chat_body(item: Item, history: Sequence[dict[str, Any]], model: str, fields: Mapping[str, Any]) -> bytes:
    """The JSON of a streamed chat. ``history``: messages and answers before this turn; ``fields`` of the run."""
    body = {
        "model": model,
        "messages": [*history, *map(wire_message, item.messages)],
        "max_tokens": item.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
        **item.fields,
    }
    return _encoder.encode(body)


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _PARTS.get(part.mime.partition("/")[0])
    if kind is None:
        raise ValueError(f"media type {part.mime!r} is none of image/..., audio/... and video/...")
    return {"type": kind, kind: {"url": part.url or _data_url(part)}}


def _data_url(media: Media) -> msgspec.Raw:
    """A data URL, as JSON already: base64 needs no escapes, and a picture is not worth a second pass."""
    return msgspec.Raw(b'"data:%b;base64,%b"' % (media.mime.encode(), pybase64.b64encode(media.data)))
