"""Questions to a fleet of instances, and what transformers answers to them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pictures
from chat import stream_events
from clips import Clip, clip
from fleet import Books, deployed, gateway
from http_client import http_client
from pictures import noise, png
from PIL import Image
from reference import Reference
from sounds import Sound, sound

from epd_serve.launch.deployment import LocalDeployment
from epd_serve.models.loader import load_family

MAX_TOKENS = 10
CHATS = "/v1/chat/completions"


@dataclass(frozen=True, eq=False)
class Question:
    text: str
    images: tuple[Image.Image, ...] = ()
    videos: tuple[Clip, ...] = ()
    sounds: tuple[Sound, ...] = ()
    bounds: Mapping[str, int] = field(default_factory=dict)
    #: Of a model that thinks and calls tools: variables of its template.
    template: Mapping[str, Any] = field(default_factory=dict)

    def body(self, *, stream: bool, ignore_eos: bool) -> dict[str, Any]:
        urls = [f"data:image/png;base64,{base64.b64encode(png(image)).decode()}" for image in self.images]
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        for video in self.videos:
            parts.append({"type": "video_url", "video_url": {"url": video.url}})
        parts += [sound.part for sound in self.sounds]
        fps = next((video.fps for video in self.videos if video.fps), None)
        num_read = next((video.num_read for video in self.videos if video.num_read), None)
        parts.append({"type": "text", "text": self.text})
        return {
            "model": "tested",
            "messages": [{"role": "user", "content": parts if len(parts) > 1 else self.text}],
            **({"mm_processor_kwargs": {"fps": fps}} if fps else {}),
            **({"mm_processor_kwargs": self.bounds} if self.bounds else {}),
            **({"media_io_kwargs": {"video": {"num_frames": num_read}}} if num_read else {}),
            **self._template_fields(),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "stream": stream,
        }

    def _template_fields(self) -> dict[str, Any]:
        if not self.template:
            return {}
        variables = dict(self.template)
        tools = variables.pop("tools", None)
        return {"chat_template_kwargs": variables, **({"tools": tools, "tool_choice": "none"} if tools else {})}


QUESTIONS = tuple(Question(text, tuple(images)) for text, images in pictures.QUESTIONS)

#: For models whose processors take them: the first picture again, smaller and larger.
BOUNDED_QUESTIONS = tuple(
    Question("What is this?", (noise(1), noise(2, (60, 140))), bounds=bounds)
    for bounds in ({"max_pixels": 4000}, {"min_pixels": 9000}, {"min_pixels": 3500, "max_pixels": 7000})
)

#: For models that take them: one run or several, beside a picture, two of one prompt at another rate.
VIDEO_QUESTIONS = (
    Question("What happens?", videos=(Clip(clip(1, 24, (96, 64), fps=6)),)),
    Question("What is in the picture?", (noise(1),), (Clip(clip(2, 9, (64, 96), fps=3)),)),
    Question(
        "Which one is longer?", videos=(Clip(clip(3, 15, fps=5), 1.5), Clip(clip(4, 33, (70, 60), fps=12), 1.5))
    ),
)


#: For models that take them: two files of one prompt, of other lengths, rates and formats, and beside text.
SOUND_QUESTIONS = (
    Question("What is said?", sounds=(Sound(sound(1, 1.37)),)),
    Question(
        "Which one is longer?",
        sounds=(Sound(sound(2, 3.1, 44_100, 2, "flac"), "flac"), Sound(sound(3, 0.4), as_url=True)),
    ),
    Question("What is said?", sounds=(Sound(sound(4, 2.2, 24_000, 1, "mp3"), "mp3", as_url=True),)),
)

_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
#: For models with ``tiny_models.THINKING_TEMPLATE``.
THINKING_QUESTIONS = (
    Question("Say apple", template={"enable_thinking": True}),
    Question("What is 2 + 3? " * 9, template={"enable_thinking": False, "tools": [_TOOL]}),
    Question("What is this?", (noise(1),), template={"enable_thinking": True, "tools": [_TOOL]}),
)

#: For models that take all of these.
OMNI_QUESTIONS = (
    Question(
        "What do you see and hear?",
        (noise(1),),
        (Clip(clip(5, 12, (70, 60), fps=6)), Clip(clip(6, 9, fps=3))),
        (Sound(sound(5, 2.3)), Sound(sound(6, 2.3, kind="flac"), "flac")),
    ),
)


@dataclass
class Fleet:
    """Instances of all roles with one model, and what transformers answers to each question."""

    deployment: LocalDeployment
    expected: dict[Question, list[int]]
    ignore_eos: bool
    num_checks: int = 0

    @property
    def urls(self) -> dict[str, str]:
        return {name: handle.url for name, handle in self.deployment.instances.items()}

    async def check_tokens(self, names: Iterable[str]) -> None:
        """These instances behind a gateway answer all questions at once as expected.

        Every other answer is streamed, and the next time the others are.
        """
        self.num_checks += 1
        urls = {name: self.urls[name] for name in names}
        # a step of many ranks may take long where there are few cores
        config = {"gateway": {"probe_timeout_s": 60}}
        async with gateway(urls, config=config) as url, http_client(url) as client:
            asked = []
            for number, question in enumerate(self.expected):
                stream = (number + self.num_checks) % 2 > 0
                body = question.body(stream=stream, ignore_eos=self.ignore_eos)
                asked.append((_stream if stream else answer_whole)(client, body))
            answers = await asyncio.gather(*asked)
            assert dict(zip(self.expected, answers, strict=True)) == self.expected
            await Books(urls).check()


@asynccontextmanager
async def start_fleet(
    path: Path,
    topology: str,
    *,
    ignore_eos: bool = True,
    instances: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """All instances of a topology with the model in ``path``; ``settings`` of the deployment go over the usual."""
    reference = Reference(path)
    expected = {}
    asked = [one for one in QUESTIONS if reference.takes_images or not one.images]
    template = path / "chat_template.jinja"
    if template.exists() and "enable_thinking" in template.read_text():
        asked += THINKING_QUESTIONS
    if template.exists() and "'video'" in template.read_text():
        asked += VIDEO_QUESTIONS
    if getattr(load_family(path), "bounds", None):
        asked += BOUNDED_QUESTIONS
    if reference.takes_sounds:
        asked += SOUND_QUESTIONS
    if reference.takes_sounds and reference.takes_images:
        asked += OMNI_QUESTIONS
    asked = [one for one in asked if reference.takes(one.videos, one.sounds)]
    for question in asked:
        media = question.images, question.videos, question.sounds
        options = {"bounds": question.bounds, **question.template}
        ids = reference.generate(question.text, *media, max_tokens=MAX_TOKENS, **options)
        expected[question] = ids
    del reference
    # the token budget is smaller than any image: every image that can be is computed in several chunks
    budget = {"max_num_batched_tokens": max(13, load_family(path).both_ways_tokens)}
    async with deployed(topology, path, instances={**budget, **(instances or {})}, **settings) as deployment:
        yield Fleet(deployment, expected, ignore_eos=ignore_eos)


async def ask(client: httpx.AsyncClient, question: Question) -> list[int]:
    return await answer_whole(client, question.body(stream=False, ignore_eos=True))


def generated(reference: Reference, question: Question) -> list[int]:
    """transformers' tokens."""
    media = question.images, question.videos, question.sounds
    ids = reference.generate(question.text, *media, max_tokens=MAX_TOKENS)
    assert len(set(ids)) >= 5, "tokens that say little of the model"
    return ids


async def answer_whole(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    answer = await client.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    answer = await client.post(CHATS, json=body)
    assert answer.status_code == 200, answer.text
    return [token for event in stream_events(answer.text) for token in event["choices"][0]["token_ids"]]
