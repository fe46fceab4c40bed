"""Sounds and videos over E-P-D: options and names, hostile files, prefixes that end within, encoders that die."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tiny_models
from chat import data_url
from clips import Clip, clip, wide
from fleet import Books, deployed, figures
from http_client import http_client
from identity import CHATS, Question, ask, generated
from pictures import noise, png
from PIL import Image
from reference import Reference
from sounds import Sound, encoded, sound

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = {"max_seconds": 60}
TRANSCRIPTIONS = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen2_5_omni", tmp_path_factory.mktemp("omni") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(model: Path) -> AsyncIterator[LocalDeployment]:
    # a transcript ends where the context does
    async with deployed("E-P-D", model, gateway={"media": LIMITS}, instances={"max_model_len": 640}) as deployment:
        yield deployment
        await Books.of(deployment).check()


async def test_each_way_to_sample_an_item_is_encoded_once(
    deployment: LocalDeployment, reference: Reference
) -> None:
    """Options of a video are part of its name, and give tokens of their own; how a sound is sent is not."""
    pictures = tuple(png(noise(seed, (90, 70))) for seed in range(5))
    video, data = Clip(clip(5, 30, (60, 60), fps=10)), sound(5, 2.5)
    videos = [
        Question("What happens?", videos=(one,))
        for one in (video, replace(video, fps=1.5), replace(video, num_read=7), Clip(pictures))
    ]
    sounds = [
        Question(text, sounds=(Sound(data, as_url=as_url),))
        for text, as_url in (("What is said?", False), ("Where is it? Say it.", True), ("apple", False))
    ]
    encoder = deployment.instances["e0"].url
    async with http_client(deployment.gateway_url) as client:
        before = (await figures(encoder))["tower_images_total"]
        for question in (*videos, *videos, *sounds):
            assert await ask(client, question) == generated(reference, question)
        assert (await figures(encoder))["tower_images_total"] - before == len(videos) + 1
        messages = sounds[-1].body(stream=False, ignore_eos=True)["messages"]
        tokens = await client.post("/tokenize", json={"messages": messages})
        assert 'modality="audio"' in (await client.get("/metrics")).text
    assert tokens.json()["tokens"] == reference.prompt


async def test_a_prefix_hit_may_end_within_a_video(deployment: LocalDeployment, reference: Reference) -> None:
    video = Clip(clip(6, 16, (84, 84), fps=4))
    async with http_client(deployment.gateway_url) as client:
        for text in ("What happens?", "Where is it? Say it.", "apple"):
            question = Question(text, videos=(video,))
            assert await ask(client, question) == generated(reference, question)


def animation(num_frames: int) -> bytes:
    """A GIF that shows a picture that many times."""
    file = io.BytesIO()
    Image.new("P", (16, 16)).save(file, "GIF")
    data = file.getvalue()
    begin = data.index(b",")
    return data[:begin] + data[begin:-1] * num_frames + data[-1:]


GOOD, GOOD_SOUND = clip(7, 60), sound(7, 2.0)


@cache
def hostile() -> dict[str, tuple[str, str]]:
    """URLs by the place that refuses each, and words of the error; tests/media has many more."""
    picture = data_url(png(noise(1))).partition(",")[2]
    silence = encoded(np.zeros((1, 120 * 16_000), np.int16), 16_000, "flac")
    return {
        "called a picture": (data_url(GOOD, "image/mp4"), "only video/... is supported; send it as image_url"),
        "cut": (data_url(GOOD[: len(GOOD) // 2], "video/mp4"), "corrupt or truncated"),
        "a GIF of 10,000 frames": (data_url(animation(10_000), "video/gif"), "send it as image_url"),
        "a GIF of 10,000 frames that is called a video": (data_url(animation(10_000), "video/mp4"), "image_url"),
        "10,000 by 10,000 pixels": (data_url(wide(), "video/avi"), "10000×10000"),
        "a broken frame": (f"data:video/jpeg;base64,{picture},AAAA", "frame 1 of the video"),
        "no base64": ("data:video/jpeg;base64,!!!!", "base64"),
        "a cut sound": (data_url(GOOD_SOUND[: len(GOOD_SOUND) // 2], "audio/wav"), "truncated"),
        "two minutes of silence": (data_url(silence, "audio/flac"), "limit of 60 s"),
    }


async def check_refused(client: httpx.AsyncClient, name: str) -> None:
    """A good file and a hostile one behind it: the second is refused by its place."""
    url, words = hostile()[name]
    kind, good = ("audio_url", GOOD_SOUND) if url.startswith("data:audio") else ("video_url", GOOD)
    mime = "audio/wav" if good is GOOD_SOUND else "video/mp4"
    parts = [{"type": kind, kind: {"url": one}} for one in (data_url(good, mime), url)]
    async with asyncio.timeout(30):
        answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": parts}]})
    error = answer.json()["error"]
    assert error["param"] == f"messages[0].content[1].{kind}.url" and words in error["message"], (name, error)
    assert answer.status_code == 400


def held(pid: int) -> tuple[int, int, int]:
    """Threads, descriptors and MiB of memory of a process."""
    here = Path(f"/proc/{pid}")
    threads, files = (len([*(here / name).iterdir()]) for name in ("task", "fd"))
    pages = int((here / "statm").read_text().split()[1])
    return threads, files, pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def test_hostile_files_are_refused_and_hold_nothing(deployment: LocalDeployment) -> None:
    """All of them at once, and again: what each leaves behind would grow with every round; pools fill up once."""
    pids = {process.spec.name: process.pid for process in deployment.processes}
    rounds: list[dict[str, tuple[int, int, int]]] = []
    async with http_client(deployment.gateway_url) as client:
        while len(rounds) < 3 or (_grows(*rounds[-2:]) and len(rounds) < 20):
            await asyncio.gather(*(check_refused(client, name) for name in hostile()))
            await Books.of(deployment).check()
            metrics = (await client.get("/metrics")).text
            assert not re.search(r"^epd_serve_in_flight_calls[{].* [^0]", metrics, re.M), "places"
            rounds.append({name: held(pid) for name, pid in pids.items()})
    assert not _grows(*rounds[-2:]), rounds


def _grows(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]) -> bool:
    """Whether a process holds more than before: threads, descriptors but for two, or more than 32 MiB."""
    limits = {name: (threads, files + 2, mebibytes + 32) for name, (threads, files, mebibytes) in before.items()}
    return any(now > most for name in after for now, most in zip(after[name], limits[name], strict=True))


async def test_the_sound_of_a_video_is_refused(deployment: LocalDeployment) -> None:
    part = {"type": "video_url", "video_url": {"url": data_url(GOOD, "video/mp4")}}
    body = {"messages": [{"role": "user", "content": [part]}], "mm_processor_kwargs": {"use_audio_in_video": True}}
    async with http_client(deployment.gateway_url) as client:
        answer = await client.post(CHATS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "mm_processor_kwargs.use_audio_in_video"), error


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
    async with http_client(deployment.gateway_url) as client:
        whole = await client.post(TRANSCRIPTIONS, data=fields, files=file)
        text = await client.post(TRANSCRIPTIONS, data={**fields, "response_format": "text"}, files=file)
        stream = await client.post(TRANSCRIPTIONS, data={**fields, "stream": "true"}, files=file)
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
    async with http_client(deployment.gateway_url) as client:
        for fields, file, param in (
            ({}, GOOD_SOUND[: len(GOOD_SOUND) // 2], "file"),
            ({"response_format": "srt"}, GOOD_SOUND, "response_format"),
            ({"timestamp_granularities[]": "word"}, GOOD_SOUND, "timestamp_granularities[]"),
            ({"model": "tested"}, None, "file"),
        ):
            files: dict[str, Any] = {name: (None, value) for name, value in fields.items()}
            answer = await client.post(TRANSCRIPTIONS, files=files | ({"file": ("a.wav", file)} if file else {}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        no_form = await client.post(TRANSCRIPTIONS, json={"file": "x"})
    assert no_form.status_code == 400 and "multipart/form-data" in no_form.json()["error"]["message"]
