"""``custom:FILE.jsonl``: requests from a file, one a line.

A line has one of

``messages``    as in an OpenAI chat request: sent as it is
``prompt``      the user's text (``question`` is the same), with ``images``, a list, before it
``turns``       a conversation: each is a text, or an object with ``prompt`` and ``images``; the answers between
                them are those of the server

and, where wanted, ``max_tokens`` (``output_tokens`` is the same), ``timestamp`` (milliseconds from the begin, for
arrivals of kind trace), ``system`` (a text) and ``fields`` (more of the request's body). An image is a URL that
begins with ``data:`` or ``http(s):``, or a file, relative to the workload's.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from epd_serve.bench.types import Item, Media, Message, Part
from epd_serve.bench.workloads.lengths import parse_lengths
from epd_serve.bench.workloads.options import (
    LineError,
    Options,
    check_keys,
    json_lines,
    number,
    parse_switch,
    whole_number,
)

_KINDS = ("messages", "prompt", "question", "turns")
_KEYS = (*_KINDS, "images", "max_tokens", "output_tokens", "timestamp", "system", "fields")
_TURN_KEYS = ("prompt", "images")
_MEDIA_PARTS = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


class Custom:
    """The requests of a file, in its order.

    Settings: output_tokens (where a line has no max_tokens), ignore_eos (default false: answers end by
    themselves).
    """

    def __init__(self, file: Path, options: Options) -> None:
        """Raises ValueError for a file that is not what it should be."""
        self.name = file.stem
        self._folder = file.resolve().parent
        self._output = options.take("output_tokens", parse_lengths, "64")
        ignore_eos = options.take("ignore_eos", parse_switch, "false")
        self._fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        options.check(f"custom:{file}")
        self._media = cache(self._read_media)
        self._lines: list[tuple[int, dict[str, Any], tuple[tuple[Message, ...], ...]]] = []
        for line_number, line in json_lines(file):
            try:
                self._lines.append((line_number, line, self._turns(line)))
            except LineError as error:
                raise ValueError(f"{file}:{line_number}: {error}") from None
        self.num_items: int | None = sum(len(turns) for _, _, turns in self._lines)

    def items(self, seed: int) -> Iterator[Item]:
        index = 0
        for line_number, line, turns in self._lines:
            rng = Random(f"{seed}/{self.name}/{line_number}")
            timestamp = number(line, "timestamp")
            kinds: set[str] = set()
            for turn, messages in enumerate(turns):
                parts = [part for message in messages for part in message.parts]
                kinds |= {part.mime.partition("/")[0] for part in parts if isinstance(part, Media)}
                yield Item(
                    index=index,
                    messages=messages,
                    max_tokens=self._max_tokens(line, rng),
                    workload=self.name,
                    modality="+".join(sorted(kinds)) or "text",
                    conversation=f"line{line_number}" if len(turns) > 1 else None,
                    turn=turn,
                    arrival_s=None if timestamp is None else timestamp / 1e3,
                    fields={**self._fields, **line.get("fields", {})},
                )
                index += 1

    def _max_tokens(self, line: Mapping[str, Any], rng: Random) -> int:
        given = line.get("max_tokens", line.get("output_tokens"))
        return self._output(rng) if given is None else int(given)

    def _turns(self, line: Mapping[str, Any]) -> tuple[tuple[Message, ...], ...]:
        """The turns of a line. All faults that a line can have are found here."""
        check_keys(line, _KEYS)
        for key in ("max_tokens", "output_tokens"):
            if key in line:
                whole_number(line, key)
        number(line, "timestamp")
        if not isinstance(line.get("fields", {}), dict):
            raise LineError("fields: expected an object with fields of the request's body")
        given = [kind for kind in _KINDS if kind in line]
        if len(given) != 1:
            found = " and ".join(given) or f"none of {', '.join(_KINDS)}"
            raise LineError(f"has {found}; write one of prompt, turns, messages")
        system = self._system(line)
        if given == ["messages"]:
            return ((*system, *self._messages(line["messages"])),)
        if given == ["turns"]:
            turns = line["turns"]
            if not isinstance(turns, list) or not turns:
                raise LineError("turns: expected a list of texts, or of objects with prompt and images")
            first, *rest = [self._turn(turn) for turn in turns]
            return ((*system, first), *((turn,) for turn in rest))
        prompt = {"prompt": line[given[0]], "images": line.get("images", [])}
        return ((*system, self._turn(prompt)),)

    def _system(self, line: Mapping[str, Any]) -> tuple[Message, ...]:
        if "system" not in line:
            return ()
        return (Message(role="system", parts=(_text(line["system"], "system"),)),)

    def _turn(self, turn: object) -> Message:
        if isinstance(turn, str):
            return Message(role="user", parts=(turn,))
        if not isinstance(turn, dict) or "prompt" not in turn:
            raise LineError("turns: expected a text, or an object with prompt and images")
        check_keys(turn, _TURN_KEYS)
        images = turn.get("images", [])
        if not isinstance(images, list):
            raise LineError("images: expected a list of URLs or files")
        text = _text(turn["prompt"], "prompt")
        pictures = [self._media("image", _text(image, "images")) for image in images]
        return Message(role="user", parts=(*pictures, text) if text or not pictures else tuple(pictures))

    def _messages(self, messages: object) -> tuple[Message, ...]:
        if not isinstance(messages, list) or not messages:
            raise LineError("messages: expected a list of messages with role and content")
        found = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise LineError("messages: each needs a role, as in {'role': 'user', 'content': 'text'}")
            content = message.get("content")
            if not isinstance(content, str | list):
                raise LineError("messages: content is a text or a list of parts")
            parts = [content] if isinstance(content, str) else [self._part(part) for part in content]
            found.append(Message(role=message["role"], parts=tuple(parts)))
        return tuple(found)

    def _part(self, part: object) -> Part:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise LineError("messages: a part needs a type, as in {'type': 'text', 'text': '...'}")
        if kind == "text":
            return _text(part.get("text"), "text")
        if kind == "input_audio":
            sound = part.get("input_audio")
            if not isinstance(sound, dict) or not all(isinstance(sound.get(k), str) for k in ("data", "format")):
                raise LineError("input_audio: expected data in base64 and format")
            return Media(mime=f"audio/{sound['format']}", data=_base64(sound["data"]))
        if kind in _MEDIA_PARTS:
            value = part.get(kind)
            url = value.get("url") if isinstance(value, dict) else value
            return self._media(_MEDIA_PARTS[kind], _text(url, kind))
        known = ", ".join(("text", "input_audio", *_MEDIA_PARTS))
        raise LineError(f"messages: there are no parts of type {kind!r}; known: {known}")

    def _read_media(self, kind: str, url: str) -> Media:
        if url.startswith(("http://", "https://")):
            return Media(mime=f"{kind}/*", url=url)
        if url.startswith("data:"):
            head, comma, data = url.removeprefix("data:").partition(",")
            if not comma or not head.endswith(";base64"):
                raise LineError("a data URL looks like data:image/jpeg;base64,...")
            if not head.startswith(f"{kind}/"):
                raise LineError(f"{url[:40]!r}... is no {kind}: its type should begin with {kind}/")
            return Media(mime=head.removesuffix(";base64"), data=_base64(data))
        path = self._folder / Path(url.removeprefix("file://")).expanduser()
        mime, _ = mimetypes.guess_type(path.name)
        if mime is None or not mime.startswith(f"{kind}/"):
            raise LineError(f"{url[:80]!r} is no {kind}: neither a URL nor a file with the suffix of one")
        try:
            return Media(mime=mime, data=path.read_bytes())
        except OSError as error:
            raise LineError(f"{path}: {error.strerror}") from error


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise LineError(f"{key}: expected a text, not {value!r:.80}")
    return value


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise LineError(f"data that is no base64: {error}") from error
