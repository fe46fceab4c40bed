"""Words that every part shares: stages, roles and the sampling parameters of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args

import msgspec

#: How P and D are chosen: the pair that costs the fewest seconds; in turn; the cheaper of two at random; the
#: cheapest where the beginning of a prompt that P knows costs nothing.
Routing = Literal["least_loaded", "round_robin", "prefix_affinity"]


class Stage(StrEnum):
    """One of the three kinds of work in a multimodal request."""

    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"

    #: That of the letter, in C: Enum's own is Python, and stages are keys wherever calls are counted.
    __hash__ = str.__hash__


_ORDER = (Stage.ENCODE, Stage.PREFILL, Stage.DECODE)


@dataclass(frozen=True)
class Role:
    """A non-empty set of stages; it decides which weights and caches an instance holds.

    Printed in data-path order: ``str(Role.parse("DE")) == "ED"``.
    """

    stages: frozenset[Stage]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a role needs at least one stage of E, P and D")

    @classmethod
    def of(cls, stages: Iterable[Stage]) -> Role:
        return cls(frozenset(stages))

    @classmethod
    def parse(cls, text: str) -> Role:
        """Read ``"E"``, ``"PD"``, ``"EPD"`` ... Raises ValueError that says what is wrong."""
        stages: list[Stage] = []
        for letter in text:
            if letter not in ("E", "P", "D"):
                raise ValueError(f"role {text!r}: {letter!r} is no stage; use letters of E, P and D, as in 'EP'")
            if letter in stages:
                raise ValueError(f"role {text!r}: stage {letter} is named twice")
            stages.append(Stage(letter))
        if not stages:
            raise ValueError("an empty role; use letters of E, P and D, as in 'EP'")
        return cls(frozenset(stages))

    @property
    def encodes(self) -> bool:
        return Stage.ENCODE in self.stages

    @property
    def prefills(self) -> bool:
        return Stage.PREFILL in self.stages

    @property
    def decodes(self) -> bool:
        return Stage.DECODE in self.stages

    @property
    def has_language_model(self) -> bool:
        """Prefill and decode run the language model; encode runs the tower alone."""
        return self.prefills or self.decodes

    def __str__(self) -> str:
        return "".join(stage for stage in _ORDER if stage in self.stages)


class ToolSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; ``parameters`` is the text of a JSON schema.

    ``strict``: a schema is refused that cannot be enforced in full.
    """

    name: str
    parameters: str
    strict: bool = False


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have.

    Attributes:
        kind, text: of the content: "json" and a schema, "regex", "choice" and a JSON list of strings; "" for free.
        strict: a schema in ``text`` is refused that cannot be enforced in full.
        param: the request's field that asks for it, for errors.
        tools: functions that may be called in place of the content, or behind it where that is free.
        must_call, parallel: whether one call is needed; whether there may be more than one.
        format: name of the text form of calls, of ``FORMATS`` in ``protocol/openai/tool_format.py``.
    """

    kind: Literal["", "json", "regex", "choice"] = ""
    text: str = ""
    strict: bool = False
    param: str = ""
    tools: list[ToolSchema] = []
    must_call: bool = False
    parallel: bool = True
    format: str = "hermes"


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The thoughts of a model before its answer, between ``<think>`` and ``</think>``, each a token of its own.

    Attributes:
        start_id, end_id: these tokens. after_ids: those between ``</think>`` and the answer.
        is_open: whether the prompt ends with ``<think>``.
    """

    start_id: int
    end_id: int
    after_ids: tuple[int, ...] = ()
    is_open: bool = False


def grammar_problem(message: str) -> str:
    """Shorten llguidance's error to its first line, without the place in our grammar, and the cause below it.

    Below "regex parse error:" is the regular expression.
    """
    first, *below = message.strip().splitlines()
    if first.endswith("error:") and below:
        first = f"{first} {below[0].strip()}:"
    causes = [line.removeprefix("error: ") for line in below if line.startswith("error: ")]
    first = re.sub(r"^at \d+\(\d+\): |\. Enable '.*", "", first)  # the latter names options of its own
    return " ".join([first, *causes])[:300]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules by which tokens are chosen and generation stops, in the vocabulary of the OpenAI and vLLM APIs.

    ``temperature == 0`` is greedy. ``max_tokens`` is None until the instance that knows the prompt length fills it
    with the room that the context leaves. ``seed`` is always set: the sender of the request draws one.
    ``include_stop``: a stop string stays in the text. ``bad_word_ids`` are ``bad_words`` as the instance that has
    the tokenizer spells them. ``priority``: lower is computed earlier. ``neutral``: those of
    :data:`SAMPLING_DEFAULTS` that the request itself sets to that value; others that have it are open, and the
    model's generation_config.json decides. ``thinking`` is set by the instance that knows the chat template;
    ``thinking_budget`` is the most tokens of it.
    """

    seed: int
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    n: int = 1
    include_stop: bool = False
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    priority: int = 0
    neutral: tuple[str, ...] = ()
    thinking: Thinking | None = None
    thinking_budget: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the scores depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_token_lists(self) -> bool:
        """Whether some tokens are preferred or forbidden by their ids."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_word_ids)


#: What the APIs take where neither a request nor the model's generation_config.json says anything.
SAMPLING_DEFAULTS: dict[str, float] = {
    name: getattr(SamplingParams(seed=0), name)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
}


class MediaSpan(msgspec.Struct, frozen=True):
    """The tokens ``[start, start + length)`` of a prompt stand for rows of the feature ``mm_hash``.

    An item may have several spans, with text between them.

    Attributes:
        offset: the first of those rows.
        item, first: where the feature is that of a video's segment: the video's mm_hash, and the row of its
            feature with which the segment's begins.
    """

    start: int
    length: int
    mm_hash: str
    offset: int = 0
    item: str = ""
    first: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


#: The kinds of media.
Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
#: Several items of a kind, in sentences.
PLURALS: dict[str, str] = {"image": "images", "video": "videos", "audio": "sounds"}


class VideoFacts(msgspec.Struct, frozen=True):
    """A video as its container describes it.

    Attributes:
        width, height: pixels of a frame as displayed.
        num_frames: of the file.
        fps: frames a second, on average.
        is_list: it is a frame list.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    is_list: bool = False

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.fps


class AudioFacts(msgspec.Struct, frozen=True):
    """A sound as its file has it: samples of each channel as decoded, samples a second, channels."""

    num_samples: int
    rate: int
    channels: int

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.rate

    def count_at(self, rate: int) -> int:
        """Samples of each channel at another rate."""
        return -(-self.num_samples * rate // self.rate)


class VideoSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The frames that a request asks for of its videos, in the words of vLLM's API; None: it does not say.

    Attributes:
        num_frames, fps: those that are read (``media_io_kwargs``). -1: all. fps of a frame list is its own rate.
        processor_num_frames, processor_fps, max_frames: those that the model's processor takes of a video all of
            whose frames are read (``mm_processor_kwargs``).
        do_sample_frames: False: the processor takes all that are read.
    """

    num_frames: int | None = None
    fps: float | None = None
    processor_num_frames: int | None = None
    processor_fps: float | None = None
    max_frames: int | None = None
    do_sample_frames: bool | None = None

    def takes_all_read(self, video: VideoFacts) -> bool:
        """Whether the processor takes all frames that are read, since the request chose them."""
        return video.is_list or self.do_sample_frames is False or self.count_read(video) < video.num_frames

    def count_read(self, video: VideoFacts) -> int:
        """The number of frames that are read, as vLLM's loader counts them; the first ones of a frame list."""
        count = video.num_frames if self.num_frames in (None, -1) else min(self.num_frames, video.num_frames)
        if self.fps is not None and not video.is_list:
            count = min(count, math.floor(video.duration_s * self.fps))
        return max(1, count)


#: The request says nothing: the model's processor samples as its files say.
AS_THE_MODEL = VideoSampling()


class StageRate(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of one batch of a stage as measured: ``base_s + unit_s * units``.

    Units are pixels (encode), tokens (prefill) and sequences (decode, where a batch is one step).

    Attributes:
        is_fresh: whether it was measured lately.
    """

    base_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    unit_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    is_fresh: bool = True

    def seconds(self, units: float) -> float:
        """Seconds of one batch of ``units``."""
        return self.base_s + self.unit_s * units
