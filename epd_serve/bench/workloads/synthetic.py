"""Requests drawn from distributions: the workloads of EPD-Serve (section 4.1) and any other mix.

The paper gives means, not distributions. ``sharegpt4o-like``: 802×652 pixels and 9.6 text tokens on average, both
lognormal. ``visualwebinstruct-like``: every second request has an image of 1280×720 pixels; 63.1 text tokens on
average. Both: 64 output tokens, 512 requests.

A plain picture makes a JPEG of a few kilobytes, which costs almost nothing to decode, hash and send. These
pictures are noise whose contrast falls with frequency, as in photographs, with finer luminance than colour: 1.3 to
2.5 bits per pixel at quality 85, made in 10 ms of one core for 0.5 megapixels.
"""

from __future__ import annotations

import io
import math
import sys
import wave
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from PIL import Image, ImageChops

from epd_serve.bench.types import Item, Media, Message, Part
from epd_serve.bench.workloads.notation import (
    Draw,
    Options,
    Size,
    parse_count,
    parse_lengths,
    parse_seconds,
    parse_share,
    parse_sizes,
    parse_switch,
)

#: After a blank, each is one token of the built-in model and of the vocabularies of Qwen, Llama and GPT.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "that", "this", "with", "you", "it", "are", "from", "at"),
    *("your", "all", "have", "can", "about", "has", "one", "do", "no", "what", "which", "there", "only", "any"),
)


def text_of(num_tokens: int, rng: Random) -> str:
    """Return words that make about ``num_tokens`` tokens; at least one word."""
    return " ".join(rng.choices(WORDS, k=max(num_tokens, 1)))


_DRAWN = {"text_tokens": "64", "image_size": "lognormal:802x652:0.35", "image_share": "1", "media": "image"}
PRESETS: Mapping[str, Mapping[str, str]] = {
    "sharegpt4o-like": {**_DRAWN, "text_tokens": "lognormal:9.6:4", "requests": "512"},
    "visualwebinstruct-like": {
        **_DRAWN,
        "text_tokens": "lognormal:63.1:35",
        "image_size": "1280x720",
        "image_share": "0.5",
        "requests": "512",
    },
    "synthetic": {**_DRAWN, "image_share": "0.5"},
    "videos": {**_DRAWN, "media": "video"},
    "audio": {**_DRAWN, "media": "audio"},
}

#: Conversations with and without images are mixed within blocks of this size, so that short runs have both.
_BLOCK = 16
#: Number of recent pictures from which reused ones are drawn.
_REUSE_POOL = 64
#: Concurrent conversations.
_NUM_ACTIVE = 8


@dataclass(kw_only=True, slots=True)
class _Conversation:
    number: int
    num_turns: int
    has_media: bool
    turn: int = 0


class Synthetic:
    """Generated requests, endless or a given number; turns of several conversations alternate.

    Settings: text_tokens, output_tokens, system_tokens (the same text before every conversation), image_size,
    images (in the first turn), image_share (of conversations), image_reuse (share of exact copies of earlier
    images), video_size, video_s, video_fps, audio_s, turns, think_s, ignore_eos, requests. The workloads
    ``videos`` and ``audio`` replace each image by a clip or a sound.
    """

    def __init__(
        self, name: str, options: Options, draw_picture: Callable[[Size, Random], Media] | None = None
    ) -> None:
        """Raises ValueError for an unknown or invalid setting."""
        preset = PRESETS[name]
        self._draw_picture = draw_picture or make_picture
        self.name = name
        self._kind = preset["media"]
        if self._kind == "video":
            load_pyav()
        self._text: Draw[int] = options.take("text_tokens", parse_lengths, preset["text_tokens"])
        self._output: Draw[int] = options.take("output_tokens", parse_lengths, "64")
        self._system = options.take("system_tokens", lambda text: parse_lengths(text, at_least=0), "0")
        self._size: Draw[Size] = options.take("image_size", parse_sizes, preset["image_size"])
        self._images: Draw[int] = options.take("images", parse_lengths, "1")
        self._share = options.take("image_share", parse_share, preset["image_share"])
        self._reuse = options.take("image_reuse", parse_share, "0")
        self._video_size: Draw[Size] = options.take("video_size", parse_sizes, "640x360")
        self._video_s: Draw[int] = options.take("video_s", parse_lengths, "8")
        self._video_fps: Draw[int] = options.take("video_fps", parse_lengths, "24")
        self._audio_s: Draw[int] = options.take("audio_s", parse_lengths, "8")
        self._turns: Draw[int] = options.take("turns", parse_lengths, "1")
        self._think: Draw[float] = options.take("think_s", parse_seconds, "0")
        # switchable, because some servers refuse the field
        self._fields = {"ignore_eos": True} if options.take("ignore_eos", parse_switch, "true") else {}
        self.num_items: int | None = options.take("requests", parse_count, preset.get("requests", ""))
        options.check(name)
        self._is_chat = options.values.get("turns", "1") != "1"

    def items(self, seed: int) -> Iterator[Item]:
        shown: deque[Media] = deque(maxlen=_REUSE_POOL)
        rng = Random(f"{seed}/{self.name}/system")
        num_system = self._system(rng)
        system = (Message(role="system", parts=(text_of(num_system, rng),)),) if num_system else ()
        order = Random(f"{seed}/{self.name}/order")
        waiting = self._draw_conversations(seed)
        active: list[_Conversation] = []
        for index in count() if self.num_items is None else range(self.num_items):
            while len(active) < (_NUM_ACTIVE if self._is_chat else 1):
                active.append(next(waiting))
            conversation = active[order.randrange(len(active))]
            rng = Random(f"{seed}/{self.name}/{conversation.number}/{conversation.turn}")
            yield self._make_item(index, conversation, system, shown, rng)
            conversation.turn += 1
            if conversation.turn == conversation.num_turns:
                active.remove(conversation)

    def _make_item(
        self,
        index: int,
        conversation: _Conversation,
        system: tuple[Message, ...],
        shown: deque[Media],
        rng: Random,
    ) -> Item:
        is_first = conversation.turn == 0
        num_tokens = self._text(rng)
        num_output = self._output(rng)
        think_s = 0.0 if is_first else self._think(rng)
        parts: tuple[Part, ...] = (text_of(num_tokens, rng),)
        if is_first and conversation.has_media:
            parts = (*(self._make_media(shown, rng) for _ in range(self._images(rng))), *parts)
        return Item(
            index=index,
            messages=(*(system if is_first else ()), Message(role="user", parts=parts)),
            max_tokens=num_output,
            workload=self.name,
            modality=self._kind if conversation.has_media else "text",
            conversation=f"c{conversation.number}" if self._is_chat else None,
            turn=conversation.turn,
            think_s=think_s,
            fields=self._fields,
        )

    def _draw_conversations(self, seed: int) -> Iterator[_Conversation]:
        """Yield conversations; each block contains the exact share with images, as far as it divides."""
        for block in count():
            rng = Random(f"{seed}/{self.name}/block{block}")
            numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
            with_media = [int((n + 1) * self._share) > int(n * self._share) for n in numbers]
            rng.shuffle(with_media)
            for number, has_media in zip(numbers, with_media, strict=True):
                yield _Conversation(number=number, num_turns=self._turns(rng), has_media=has_media)

    def _make_media(self, shown: deque[Media], rng: Random) -> Media:
        if shown and rng.random() < self._reuse:
            return shown[rng.randrange(len(shown))]
        if self._kind == "video":
            one = make_clip(self._video_size(rng), self._video_s(rng), self._video_fps(rng), rng)
        elif self._kind == "audio":
            one = make_sound(self._audio_s(rng), rng)
        else:
            one = self._draw_picture(self._size(rng), rng)
        shown.append(one)
        return one


_QUALITY = 85
#: Range of a picture's detail: the share of noise that each octave adds, counted from the finest.
_DETAIL = (0.012, 0.034)
_CONTRAST = tuple(max(0, min(255, 2 * value - 128)) for value in range(256))
_COLOR_OCTAVE = 3


def make_picture(size: Size, rng: Random) -> Media:
    """Return a JPEG of ``size`` (width, height)."""
    detail = rng.uniform(*_DETAIL)
    luminance = _make_noise(size, rng, 0, detail).point(_CONTRAST)
    colors = [_make_noise(size, rng, _COLOR_OCTAVE, detail) for _ in range(2)]
    data = io.BytesIO()
    Image.merge("YCbCr", (luminance, *colors)).save(data, "JPEG", quality=_QUALITY)
    return Media(mime="image/jpeg", data=data.getvalue())


def make_clip(size: Size, seconds: int, fps: int, rng: Random) -> Media:
    """Return an H.264 MP4 in which the camera pans over a picture; sides become even. Needs PyAV."""
    av = load_pyav()
    width, height = (side + side % 2 for side in size)
    picture = Image.open(io.BytesIO(make_picture((width, height), rng).data))
    data = io.BytesIO()
    across, down = rng.randrange(1, 8), rng.randrange(1, 8)
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # the same bytes on every machine
        for number in range(seconds * fps):
            frame = ImageChops.offset(picture, across * number, down * number)
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())
    return Media(mime="video/mp4", data=data.getvalue())


#: Sample rate of a generated sound, and samples of each tone.
_AUDIO_RATE, _TONE_SAMPLES = 16_000, 1600


def make_sound(seconds: int, rng: Random) -> Media:
    """Return a mono WAV file with ten random tones per second."""
    samples = array("h")
    for _ in range(seconds * _AUDIO_RATE // _TONE_SAMPLES):
        period, loudness = rng.randrange(16, 200), rng.uniform(1000, 12_000)
        tone = array("h", (round(loudness * math.sin(math.tau * place / period)) for place in range(period)))
        samples += (tone * (_TONE_SAMPLES // period + 1))[:_TONE_SAMPLES]
    if sys.byteorder == "big":
        samples.byteswap()
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, _AUDIO_RATE, len(samples), "NONE", ""))
        file.writeframes(samples.tobytes())
    return Media(mime="audio/wav", data=data.getvalue())


def load_pyav() -> Any:
    """Import PyAV. Raises ValueError with the package to install."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need PyAV: pip install '.[media]' in epd-serve's clone") from error
    return av


def _make_noise(size: Size, rng: Random, finest: int, detail: float) -> Image.Image:
    """Start with the coarsest octave; enlarge it repeatedly and blend in noise of each new resolution."""
    plane: Image.Image | None = None
    octave = finest
    while max(size) >> octave > 6:
        octave += 1
    for level in range(octave, finest - 1, -1):
        at = max(2, size[0] >> level), max(2, size[1] >> level)
        noise = Image.frombytes("L", at, rng.randbytes(at[0] * at[1]))
        if plane is None:
            plane = noise
        else:
            enlarged = plane.resize(at, Image.Resampling.BICUBIC)
            plane = Image.blend(enlarged, noise, min(0.5, detail * (1 + level)))
    assert plane is not None
    return plane.resize(size, Image.Resampling.BICUBIC)
