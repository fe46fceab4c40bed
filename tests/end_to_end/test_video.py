"""Videos over E-P-D: options and names, hostile files, prefixes that end within, encoders that die."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
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

from epd_serve.launch.deployment import LocalDeployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BYTES = 1 << 21
LIMITS = {"max_bytes": MAX_BYTES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen3_vl", tmp_path_factory.mktemp("video") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(model: Path) -> AsyncIterator[LocalDeployment]:
    async with deployed("E-P-D", model, gateway={"media": LIMITS}) as deployment:
        yield deployment
        await Books.of(deployment).check()


async def test_options_are_part_of_the_name(deployment: LocalDeployment, reference: Reference) -> None:
    """Each way to sample a video gives its own tokens, and is encoded once."""
    pictures = tuple(png(noise(seed, (90, 70))) for seed in range(5))
    video = Clip(clip(5, 40, (80, 60), fps=10))
    questions = [
        Question("What happens?", videos=(one,))
        for one in (video, replace(video, fps=1.5), replace(video, num_read=7), Clip(pictures))
    ]
    encoder = deployment.instances["e0"].url
    async with http_client(deployment.gateway_url) as client:
        before = (await figures(encoder))["tower_images_total"]
        for question in (*questions, *questions):
            assert await ask(client, question) == generated(reference, question)
        assert (await figures(encoder))["tower_images_total"] - before == len(questions)


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


GOOD = clip(7, 60)


@cache
def hostile() -> dict[str, tuple[str, str]]:
    """Each is refused at another place; tests/media has many more."""
    picture = data_url(png(noise(1))).partition(",")[2]
    return {
        "text": (data_url(b"no video, but text", "video/mp4"), "not a readable video"),
        "called a picture": (data_url(GOOD, "image/mp4"), "only video/... is supported; send it as image_url"),
        "cut": (data_url(GOOD[: len(GOOD) // 2], "video/mp4"), "corrupt or truncated"),
        "a GIF of 10,000 frames": (data_url(animation(10_000), "video/gif"), "send it as image_url"),
        "a GIF of 10,000 frames that is called a video": (data_url(animation(10_000), "video/mp4"), "image_url"),
        "10,000 by 10,000 pixels": (data_url(wide(), "video/avi"), "10000×10000"),
        "large": (data_url(bytes(MAX_BYTES + 10), "video/mp4"), f"at most {MAX_BYTES}"),
        "a broken frame": (f"data:video/jpeg;base64,{picture},AAAA", "frame 1 of the video"),
        "no base64": ("data:video/jpeg;base64,!!!!", "base64"),
    }


async def check_refused(client: httpx.AsyncClient, kind: str) -> None:
    """A good video and a hostile one behind it: the second is refused by its place."""
    url, words = hostile()[kind]
    parts = [{"type": "video_url", "video_url": {"url": one}} for one in (data_url(GOOD, "video/mp4"), url)]
    async with asyncio.timeout(30):
        answer = await client.post(CHATS, json={"messages": [{"role": "user", "content": parts}]})
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].video_url.url" and words in error["message"], (kind, error)
    assert answer.status_code == (413 if kind == "large" else 400)


def held(pid: int) -> tuple[int, int, int]:
    """Threads, descriptors and MiB of memory of a process."""
    here = Path(f"/proc/{pid}")
    threads, files = (len([*(here / name).iterdir()]) for name in ("task", "fd"))
    pages = int((here / "statm").read_text().split()[1])
    return threads, files, pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def test_hostile_videos_are_refused_and_hold_nothing(deployment: LocalDeployment) -> None:
    """All of them at once, and again: what each leaves behind would grow with every round; pools fill up once."""
    pids = {process.spec.name: process.pid for process in deployment.processes}
    rounds: list[dict[str, tuple[int, int, int]]] = []
    async with http_client(deployment.gateway_url) as client:
        while len(rounds) < 3 or (_grows(*rounds[-2:]) and len(rounds) < 20):
            await asyncio.gather(*(check_refused(client, kind) for kind in hostile()))
            await Books.of(deployment).check()
            metrics = (await client.get("/metrics")).text
            assert not re.search(r"^epd_serve_in_flight_calls[{].* [^0]", metrics, re.M), "places"
            rounds.append({name: held(pid) for name, pid in pids.items()})
    assert not _grows(*rounds[-2:]), rounds


def _grows(before: dict[str, tuple[int, int, int]], after: dict[str, tuple[int, int, int]]) -> bool:
    """Whether a process holds more than before: threads, descriptors but for two, or more than 32 MiB."""
    limits = {name: (threads, files + 2, mebibytes + 32) for name, (threads, files, mebibytes) in before.items()}
    return any(now > most for name in after for now, most in zip(after[name], limits[name], strict=True))


@pytest.mark.parametrize(
    ("processor", "video", "param", "words"),
    [
        ({"fps": 1, "num_frames": 4}, {}, "mm_processor_kwargs", "mutually exclusive"),
        ({}, {"fps": 0}, "media_io_kwargs.video.fps", "greater than 0"),
        ({"do_sample_frames": False, "max_frames": 4}, {}, "mm_processor_kwargs", "remove do_sample_frames"),
        ({"do_sample_frames": True}, {"num_frames": 4}, "mm_processor_kwargs.do_sample_frames", "from all frames"),
        ({"use_audio_in_video": True}, {}, "mm_processor_kwargs.use_audio_in_video", "unknown field"),
        ({"min_pixels": 1}, {}, "mm_processor_kwargs", "applies to images only, and the chat has"),
        ({}, {"num_frames": 1}, None, "needs at least 2"),
    ],
)
async def test_options_that_cannot_be_are_refused(
    deployment: LocalDeployment, processor: dict[str, Any], video: dict[str, Any], param: str | None, words: str
) -> None:
    part = {"type": "video_url", "video_url": {"url": data_url(GOOD, "video/mp4")}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part]}]}
    body |= {"mm_processor_kwargs": processor} if processor else {}
    body |= {"media_io_kwargs": {"video": video}} if video else {}
    async with http_client(deployment.gateway_url) as client:
        answer = await client.post(CHATS, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], answer.text
    assert param is None or error["param"] == param
