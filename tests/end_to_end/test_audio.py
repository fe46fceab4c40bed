"""Sounds over E-P-D: names, limits, hostile files by part, chunks, encoders that die, figures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tiny_models
from chat import data_url
from clips import Clip, clip
from fleet import Books, deployed, figures
from http_client import http_client
from identity import CHATS, Question, ask, generated
from reference import Reference
from sounds import Sound, encoded, sound

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BYTES = 1 << 20
LIMITS = {"max_bytes": MAX_BYTES, "max_seconds": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen2_audio", tmp_path_factory.mktemp("audio") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(model: Path) -> AsyncIterator[LocalDeployment]:
    # a transcript ends where the context does
    async with deployed("E-P-D", model, gateway={"media": LIMITS}, instances={"max_model_len": 256}) as deployment:
        yield deployment
        await Books.of(deployment).check()


async def test_a_sound_is_encoded_once_however_it_is_sent(
    deployment: LocalDeployment, reference: Reference
) -> None:
    data = sound(5, 2.5)
    questions = [
        Question(text, sounds=(Sound(data, as_url=as_url),))
        for text, as_url in (("What is said?", False), ("Where is it? Say it.", True), ("apple", False))
    ]
    encoder = deployment.instances["e0"].url
    async with http_client(deployment.gateway_url) as client:
        before = (await figures(encoder))["tower_images_total"]
        for question in questions:
            assert await ask(client, question) == generated(reference, question)
        assert (await figures(encoder))["tower_images_total"] - before == 1
        text = (await client.get("/metrics")).text
        tokens = await client.post(
            "/tokenize", json={"messages": question.body(stream=False, ignore_eos=True)["messages"]}
        )
    assert tokens.json()["tokens"] == reference.prompt
    assert 'modality="audio"' in text


GOOD = sound(7, 2.0)


@cache
def hostile() -> dict[str, tuple[str, str]]:
    """Each is refused at another place; tests/media has many more."""
    silence = encoded(np.zeros((1, 120 * 16_000), np.int16), 16_000, "flac")
    return {
        "called a picture": (data_url(GOOD, "image/wav"), "only audio/... is supported; send it as image_url"),
        "cut": (data_url(GOOD[: len(GOOD) // 2], "audio/wav"), "truncated"),
        "two minutes of silence": (data_url(silence, "audio/flac"), "limit of 60 s"),
        "longer than the model takes": (data_url(sound(0, 5.0), "audio/wav"), "at most 4 s at a time"),
        "short": (data_url(sound(0, 0.01), "audio/wav"), "too short for a token"),
        "large": (data_url(bytes(MAX_BYTES + 10), "audio/wav"), f"at most {MAX_BYTES}"),
        "no base64": ("data:audio/wav;base64,!!!!", "base64"),
    }


async def test_hostile_sounds_are_refused_by_part(deployment: LocalDeployment) -> None:
    async def check(client: httpx.AsyncClient, kind: str) -> None:
        url, words = hostile()[kind]
        parts = [Sound(GOOD).part, {"type": "audio_url", "audio_url": {"url": url}}]
        answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": parts}]})
        error = answer.json()["error"]
        assert answer.status_code == (413 if kind == "large" else 400), answer.text
        assert words in error["message"], (kind, error)
        if kind not in ("longer than the model takes", "short"):  # P says so, of all items together
            assert error["param"] == "messages[0].content[1].audio_url.url", (kind, error)

    async with http_client(deployment.gateway_url) as client, asyncio.timeout(60):
        await asyncio.gather(*(check(client, kind) for kind in hostile()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_asr", "qwen2_audio", "qwen3_omni", "gemma4"])
async def test_the_answer_is_the_same_when_the_encoder_dies(kind: str, tmp_path: Path) -> None:
    """E is killed while it has the sound, and a video before it; P encodes them. Its chunks have 7 tokens."""
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    videos = (Clip(clip(2, 8, (64, 96), fps=2)),) if kind in tiny_models.OMNI_KINDS else ()
    question = Question("What is said?", videos=videos, sounds=(Sound(sound(9, 3.9, 48_000, 2, "flac"), "flac"),))
    async with (
        deployed("E-P-D", path, restart="never", instances={"max_num_batched_tokens": 7}) as deployment,
        http_client(deployment.gateway_url) as client,
    ):
        handle = deployment.instances["e0"]
        os.kill(handle.pid, signal.SIGSTOP)  # so that it has the request and cannot end it
        task = asyncio.create_task(ask(client, question))
        await asyncio.sleep(0.3)
        os.kill(handle.pid, signal.SIGKILL)
        assert await task == generated(Reference(path), question)


async def test_a_file_is_transcribed_as_openai_does(deployment: LocalDeployment, reference: Reference) -> None:
    """A chat with the file, whole, as text, and streamed; by httpx's forms."""
    file = {"file": ("speech.flac", sound(11, 1.9, kind="flac"), "audio/flac")}
    fields = {"model": "tested", "language": "en", "prompt": "and so on"}
    path = "/v1/audio/transcriptions"
    async with http_client(deployment.gateway_url) as client:
        whole = await client.post(path, data=fields, files=file)
        text = await client.post(path, data={**fields, "response_format": "text"}, files=file)
        stream = await client.post(path, data={**fields, "stream": "true"}, files=file)
    assert whole.status_code == text.status_code == stream.status_code == 200, (whole.text, text.text, stream.text)
    instruction = (
        "Transcribe what is said. Answer with the transcript alone. The language is en. "
        "It goes on behind this text: and so on"
    )
    ids = reference.generate(instruction, sounds=(Sound(file["file"][1]),), max_tokens=40)
    answer = whole.json()
    assert answer["text"].startswith(reference.tokenizer.decode(ids, skip_special_tokens=True)[:30])
    assert answer["usage"]["input_tokens"] == len(reference.prompt)
    assert (text.headers["content-type"], text.text) == ("text/plain; charset=utf-8", answer["text"] + "\n")
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.split("\n\n") if event]
    assert "".join(event["delta"] for event in events[:-1]) == answer["text"] == events[-1]["text"]
    assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
    assert (events[-1]["type"], events[-1]["usage"]) == ("transcript.text.done", answer["usage"])


async def test_forms_that_cannot_be_are_refused(deployment: LocalDeployment) -> None:
    path = "/v1/audio/transcriptions"
    async with http_client(deployment.gateway_url) as client:
        for fields, file, param in (
            ({}, GOOD[: len(GOOD) // 2], "file"),
            ({"response_format": "srt"}, GOOD, "response_format"),
            ({"timestamp_granularities[]": "word"}, GOOD, "timestamp_granularities[]"),
            ({"model": "tested"}, None, "file"),
        ):
            files: dict[str, Any] = {name: (None, value) for name, value in fields.items()}
            answer = await client.post(path, files=files | ({"file": ("a.wav", file)} if file else {}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        no_form = await client.post(path, json={"file": "x"})
    assert no_form.status_code == 400 and "multipart/form-data" in no_form.json()["error"]["message"]
