"""Requests drawn from distributions: the workloads of the paper (003 section 4.1), and any other mix.

The paper gives means, not distributions. ``sharegpt4o-like``: 802×652 pixels and 9.6 text tokens on average, both
lognormal. ``visualwebinstruct-like``: every second request has an image, of 1280×720 pixels; 63.1 text tokens on
average. 64 output tokens each, and 512 requests.

A picture of one colour, or with the shapes of a test, makes a JPEG of a few kilobytes: decoding, hashing and the
way to the server are then nearly free. These are sums of noise whose contrast falls with its frequency, as it does
in photographs, luminance finer than colour: 1.3 to 2.5 bits a pixel at quality 85, 10 ms of one core for 0.5
megapixels.
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
from epd_serve.bench.workloads.lengths import Draw, Size, parse_lengths, parse_seconds, parse_sizes
from epd_serve.bench.workloads.options import Options, parse_count, parse_share, parse_switch

#: Each is one token of the built-in model, and of the byte-level vocabularies of Qwen, Llama and GPT, when a blank
#: stands before it.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "that", "this", "with", "you", "it", "are", "from", "at"),
    *("your", "all", "have", "can", "about", "has", "one", "do", "no", "what", "which", "there", "only", "any"),
)


def text_of(num_tokens: int, rng: Random) -> str:
    """Words that make about ``num_tokens`` tokens; at least one word."""
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

#: Requests with and without images are mixed within blocks of so many conversations, so that short runs have both.
_BLOCK = 16
#: Of how many different pictures one is shown again.
_REUSE_POOL = 64
#: Conversations that go on side by side.
_SIDE_BY_SIDE = 8


@dataclass(kw_only=True, slots=True)
class _Conversation:
    number: int
    num_turns: int
    has_media: bool
    turn: int = 0


class Synthetic:
    """Generated requests: endless, or a given number. Turns of conversations are mixed with each other.

    Settings: text_tokens, output_tokens, system_tokens (the same text before every conversation), image_size,
    images (of the first turn), image_share (of conversations), image_reuse (share of images that were shown
    before, byte by byte), video_size, video_s, video_fps, audio_s, turns, think_s, ignore_eos,
    requests. The workloads ``videos`` and ``audio`` have one of these in the place of each image.
    """

    def __init__(
        self, name: str, options: Options, draw_picture: Callable[[Size, Random], Media] | None = None
    ) -> None:
        """Raises ValueError for a setting that does not exist or is not understood.

        Args:
            draw_picture: makes the picture of a size; None: :func:`synthesise`.
        """
        preset = PRESETS[name]
        self._draw_picture = draw_picture or synthesise
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
        # asked for explicitly: servers that know no such field refuse it
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
        waiting = self._conversations(seed)
        active: list[_Conversation] = []
        for index in count() if self.num_items is None else range(self.num_items):
            while len(active) < (_SIDE_BY_SIDE if self._is_chat else 1):
                active.append(next(waiting))
            conversation = active[order.randrange(len(active))]
            rng = Random(f"{seed}/{self.name}/{conversation.number}/{conversation.turn}")
            yield self._item(index, conversation, system, shown, rng)
            conversation.turn += 1
            if conversation.turn == conversation.num_turns:
                active.remove(conversation)

    def _item(
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
            parts = (*(self._media(shown, rng) for _ in range(self._images(rng))), *parts)
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

    def _conversations(self, seed: int) -> Iterator[_Conversation]:
        """Yield the conversations; the share with images is exact over blocks whose length times it is whole."""
        for block in count():
            rng = Random(f"{seed}/{self.name}/block{block}")
            numbers = range(block * _BLOCK, (block + 1) * _BLOCK)
            with_media = [int((n + 1) * self._share) > int(n * self._share) for n in numbers]
            rng.shuffle(with_media)
            for number, has_media in zip(numbers, with_media, strict=True):
                yield _Conversation(number=number, num_turns=self._turns(rng), has_media=has_media)

    def _media(self, shown: deque[Media], rng: Random) -> Media:
        if shown and rng.random() < self._reuse:
            return shown[rng.randrange(len(shown))]
        if self._kind == "video":
            one = synthesise_clip(self._video_size(rng), self._video_s(rng), self._video_fps(rng), rng)
        elif self._kind == "audio":
            one = synthesise_sound(self._audio_s(rng), rng)
        else:
            one = self._draw_picture(self._size(rng), rng)
        shown.append(one)
        return one


_QUALITY = 85
#: How much of an octave's noise is blended in, for each octave from the finest on: a picture's amount of detail.
_DETAIL = (0.012, 0.034)
_CONTRAST = tuple(max(0, min(255, 2 * value - 128)) for value in range(256))
_COLOR_OCTAVE = 3


def synthesise(size: Size, rng: Random) -> Media:
    """A JPEG of ``size`` (width, height); no two draws of one generator are alike."""
    detail = rng.uniform(*_DETAIL)
    luminance = _plane(size, rng, 0, detail).point(_CONTRAST)
    colors = [_plane(size, rng, _COLOR_OCTAVE, detail) for _ in range(2)]
    data = io.BytesIO()
    Image.merge("YCbCr", (luminance, *colors)).save(data, "JPEG", quality=_QUALITY)
    return Media(mime="image/jpeg", data=data.getvalue())


def synthesise_clip(size: Size, seconds: int, fps: int, rng: Random) -> Media:
    """An MP4 of H.264 in which the camera moves over such a picture; sides are even. Needs PyAV."""
    av = load_pyav()
    width, height = (side + side % 2 for side in size)
    picture = Image.open(io.BytesIO(synthesise((width, height), rng).data))
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


#: Samples a second of a generated sound, and of each of its tones.
_AUDIO_RATE, _TONE_SAMPLES = 16_000, 1600


def synthesise_sound(seconds: int, rng: Random) -> Media:
    """A WAV file of one channel with ten tones a second, of any pitch and loudness."""
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
    """Raises ValueError with the package to install."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos are made with PyAV: pip install '.[media]' in epd-serve's clone") from error
    return av


def _plane(size: Size, rng: Random, finest: int, detail: float) -> Image.Image:
    """Octaves from the coarsest on: what is there is enlarged, and noise of the new resolution blended in."""
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
