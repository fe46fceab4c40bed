"""Answers of the benchmark's stage instances, written down ready to be sent (stage.c)."""

from __future__ import annotations

import json
from pathlib import Path

from epd_serve.protocol import chunks, frames, wire

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
        "reports_head": _stream_head("application/x-ndjson"),
        "encode_reply": _response(
            wire.encode(wire.EncodeReply(cached=False, num_tokens=256)), "application/msgpack"
        ),
        "prefill_reply": _stream_head(frames.CONTENT_TYPE, {wire.NEXT_HEADER: "decode"})
        + _chunk(_token(first=True))
        + _chunk(b""),
        "decode_head": _stream_head(frames.CONTENT_TYPE),
        "token": _chunk(_token(first=False)),
        "last": _chunk(frames.pack(frames.END, (), chunks.DONE)) + _chunk(b""),
        "openai_prefill": _response(_json(_whole({"kv_transfer_params": _KV_HANDLES}))),
        "openai_head": _stream_head("text/event-stream; charset=utf-8"),
        "openai_token": _chunk(chunks.event({**_CHUNK, "choices": [_openai_token()]})),
        "openai_last": _chunk(chunks.event({**_CHUNK, "choices": [], "usage": _USAGE}))
        + _chunk(chunks.DONE)
        + _chunk(b""),
    }
    for count in range(33):
        features = {f"{index:032x}": _feature(index) for index in range(count)}
        answers[f"openai_encode.{count}"] = _response(_json(_whole({"ec_transfer_params": features})))
    for role, port in stages:
        answers[f"info.{port}"] = _response(wire.to_json(_info(role, port)))
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


def _token(*, first: bool) -> bytes:
    event = chunks.delta_event(
        _OPTIONS, 0, f" tok {_STAMP}", first=first, finish_reason=None, logprobs=None, usage=None
    )
    return frames.pack(0, (1234,), event)


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


def _whole(more: dict[str, object]) -> dict[str, object]:
    message = {"role": "assistant", "content": ""}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return {**_WHOLE, "choices": [choice], "usage": _USAGE, **more}


def _info(role: str, port: int) -> wire.InstanceInfo:
    return wire.InstanceInfo(
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
        load=wire.Load(),
    )


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _response(body: bytes, content_type: str = "application/json") -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\nserver: stage\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _stream_head(content_type: str, headers: dict[str, str] | None = None) -> bytes:
    lines = [
        "HTTP/1.1 200 OK",
        "server: stage",
        f"content-type: {content_type}",
        "cache-control: no-cache",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
        "transfer-encoding: chunked",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
