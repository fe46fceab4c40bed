"""The loads that each gateway gets, and the answers of the stage instances, ready to be sent (stage.c)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
from PIL import Image

from benchmarks.common import data_url, encoded, user_message
from epd_serve.protocol import instance_state, wire
from epd_serve.protocol.openai import chunks
from epd_serve.rpc import items
from epd_serve.rpc.messages import OPENING, Welcome, pack

TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One load. ``rate``: requests per second of an open loop; 0: each connection waits for its answer."""

    name: str
    body: str
    connections: int
    gap_ms: int = 0
    rate: float = 0
    seconds: float = 3.0


CELLS = (
    *(Cell(name=f"{body}, c16", body=body, connections=16) for body in ("text", "1 image", "4 images", "3 MB")),
    Cell(name="text, 10 ms gaps, c256", body="text", connections=256, gap_ms=10, seconds=4),
    *(
        Cell(name=f"{body}, c1", body=body, connections=1, seconds=1.5)
        for body in ("text", "1 image", "4 images", "3 MB")
    ),
    # 64 tokens with 20 ms between them: about 256 streams at a time
    Cell(name="1 image, 256 streams, open loop", body="1 image", connections=512, gap_ms=20, rate=200, seconds=5),
)


def write_bodies(directory: Path) -> dict[str, Path]:
    """Name of a body → its file."""
    small, large = _jpeg(200_000), _jpeg(3_000_000)
    pictures = {"text": [], "1 image": [small], "4 images": [small] * 4, "3 MB": [large]}
    paths = {}
    for name, images in pictures.items():
        paths[name] = directory / f"{name}.json"
        paths[name].write_bytes(_body(images))
    return paths


def _body(images: list[bytes]) -> bytes:
    urls = [data_url(one, "jpeg") for one in images]
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            user_message("What is to be seen here, and what does it mean? " * 4, urls),
        ],
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(chat).encode()


def _jpeg(nbytes: int) -> bytes:
    """Noise, so that its size follows from its area: a file of about ``nbytes``."""
    noise = random.Random(1)
    side = 256
    while True:
        picture = Image.frombytes("RGB", (side, side), noise.randbytes(3 * side * side))
        data = encoded(picture, "JPEG", quality=85)
        if abs(len(data) - nbytes) < nbytes * 0.03:
            return data
        side = max(16, round(side * (nbytes / len(data)) ** 0.5))


MODEL = "demo"
#: Stands for the time at which an event leaves; stage.c writes it.
_STAMP = "@" * 19
#: Of vLLM's answers; ours come from the same functions as those of real instances.
_CHUNK = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1750000000,
    "model": MODEL,
}
_WHOLE = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1750000000, "model": MODEL}
_USAGE = {"prompt_tokens": 10, "total_tokens": 74, "completion_tokens": 64}
_OPTIONS = wire.OutputOptions(kind="chat", id="chatcmpl-0123456789abcdef", created=1750000000, model=MODEL)


def write_answers(directory: Path, stages: list[tuple[str, int]]) -> None:
    """One file per answer; ``stages`` are (role, port)."""
    answers = {
        "empty": _response(b"{}"),
        "models": _response(_json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})),
        "opening": OPENING + pack(Welcome("", "")),
        "plain_head": _head({}),
        "encode_body": wire.encode(wire.EncodeReply(cached=False)),
        "prefill_head": _head({"content-type": items.CONTENT_TYPE, wire.NEXT_HEADER: "decode"}),
        "first_token": _token(first=True),
        "framed_head": _head({"content-type": items.CONTENT_TYPE}),
        "framed_token": _token(first=False),
        "framed_last": _LAST,
        "openai_prefill": _response(_json(_whole({"kv_transfer_params": _KV_HANDLES}))),
        "openai_head": _STREAM_HEAD,
        "openai_token": _chunk(chunks.event({**_CHUNK, "choices": [_openai_token()]})),
        "openai_last": _chunk(chunks.event({**_CHUNK, "choices": [], "usage": _USAGE}))
        + _chunk(chunks.DONE)
        + _chunk(b""),
    }
    for count in range(33):
        features = {f"{index:032x}": _feature(index) for index in range(count)}
        answers[f"openai_encode.{count}"] = _response(_json(_whole({"ec_transfer_params": features})))
    for role, port in stages:
        answers[f"info.{port}"] = msgspec.json.encode(_info(role, port))
    for name, answer in answers.items():
        (directory / name).write_bytes(answer)


_KV_HANDLES = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_block_ids": list(range(16)),
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "tp_size": 1,
}


_LAST = items.pack(items.END, (), chunks.DONE)


def _head(headers: dict[str, str]) -> bytes:
    """The headers of an answer over a link: the rest of its message behind the stream's number."""
    return msgspec.msgpack.encode([(name.encode(), value.encode()) for name, value in headers.items()])


def _token(*, first: bool) -> bytes:
    event = chunks.delta_event(
        _OPTIONS, 0, f" tok {_STAMP}", first=first, finish_reason=None, logprobs=None, usage=None
    )
    return items.pack(0, (1234,), event)


def _openai_token() -> dict[str, object]:
    return {"index": 0, "delta": {"content": f" tok {_STAMP}"}, "logprobs": None, "finish_reason": None}


def _feature(index: int) -> dict[str, object]:
    return {
        "item_indices": [index],
        "metadata": {"image_grid_thw": [[1, 46, 62]]},
        "peer_host": "127.0.0.1",
        "peer_port": 5600,
        "size_bytes": 5108736,
    }


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: stage\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _whole(more: dict[str, object]) -> dict[str, object]:
    message = {"role": "assistant", "content": ""}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return {**_WHOLE, "choices": [choice], "usage": _USAGE, **more}


def _info(role: str, port: int) -> instance_state.InstanceInfo:
    return instance_state.InstanceInfo(
        name=f"{role.lower()}{port}",
        role=role,
        url=f"http://127.0.0.1:{port}",
        model=MODEL,
        model_path="/models/demo",
        max_model_len=32768,
        media_fingerprint="f00d",
        device="cpu",
        dtype="float32",
        pid=1,
        ready=True,
        load=instance_state.Load(),
    )


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _response(body: bytes) -> bytes:
    head = "HTTP/1.1 200 OK\r\nserver: stage\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
