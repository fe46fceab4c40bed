"""Types shared by all packages: stages, roles, sampling parameters and media."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args

import msgspec

#: How to choose P and D: the pair with the lowest cost in seconds; in turn; the pair with the lowest cost if a
#: prefix cached by P costs nothing.
Routing = Literal["least_loaded", "round_robin", "prefix_affinity"]


class Stage(StrEnum):
    """One of the three kinds of work in a multimodal request."""

    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"

    #: The hash of the letter, computed in C: stages are keys in hot paths, and Enum's hash is Python code.
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
        """Parse ``"E"``, ``"PD"``, ``"EPD"`` ... Raises ValueError for other texts."""
        stages: list[Stage] = []
        for letter in text:
            if letter not in ("E", "P", "D"):
                raise ValueError(f"role {text!r}: {letter!r} is not a stage; use E, P and D, as in 'EP'")
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

    ``strict``: refuse a schema that cannot be enforced in full.
    """

    name: str
    parameters: str
    strict: bool = False


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that an answer must have.

    Attributes:
        kind, text: form of the content: "json" and a schema, "regex", "choice" and a JSON list of strings; "" for
            free text.
        strict: refuse a schema in ``text`` that cannot be enforced in full.
        param: the request's field that sets the grammar, for errors.
        tools: functions that may be called instead of the content, or after free text.
        must_call, parallel: whether the answer must contain a call; whether it may contain several.
        format: name of the calls' text form, a key of ``FORMATS`` in ``protocol/openai/tool_format.py``.
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
    """The thoughts of a model before its answer, between the tokens ``<think>`` and ``</think>``.

    Attributes:
        start_id, end_id: ids of these tokens.
        after_ids: ids of the tokens between ``</think>`` and the answer.
        is_open: whether the prompt ends with ``<think>``.
    """

    start_id: int
    end_id: int
    after_ids: tuple[int, ...] = ()
    is_open: bool = False


def grammar_problem(message: str) -> str:
    """Shorten llguidance's error to its first line, without the position in our grammar, and the cause below.

    The line below "regex parse error:" is the regular expression.
    """
    first, *below = message.strip().splitlines()
    if first.endswith("error:") and below:
        first = f"{first} {below[0].strip()}:"
    causes = [line.removeprefix("error: ") for line in below if line.startswith("error: ")]
    first = re.sub(r"^at \d+\(\d+\): |\. Enable '.*", "", first)  # the latter names llguidance's options
    return " ".join([first, *causes])[:300]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rules by which tokens are chosen and generation stops, in the vocabulary of the OpenAI and vLLM APIs.

    ``temperature == 0`` is greedy. ``max_tokens`` is None until the instance that tokenizes the prompt sets it to
    the rest of the context. ``seed`` is always set: the sender of the request draws one. ``include_stop``: a stop
    string stays in the text. ``bad_word_ids``: tokens of ``bad_words``, set by the instance with the tokenizer.
    ``priority``: lower is computed earlier. ``neutral``: parameters that the request explicitly sets to their
    value in :data:`SAMPLING_DEFAULTS`; for others with that value, the model's generation_config.json decides.
    ``thinking`` is set by the instance with the chat template; ``thinking_budget`` limits its tokens.
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
        """True if the scores depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_token_lists(self) -> bool:
        """True if the request prefers or forbids some tokens by their ids."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_word_ids)


#: Defaults of the APIs, used if neither the request nor the model's generation_config.json sets a value.
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
        item, first: for a segment of a video: the video's mm_hash, and the row of the video's feature at which
            the segment begins.
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
#: Plural of each kind, for messages.
PLURALS: dict[str, str] = {"image": "images", "video": "videos", "audio": "sounds"}


class VideoFacts(msgspec.Struct, frozen=True):
    """A video as its container describes it.

    Attributes:
        width, height: pixels of a frame as displayed.
        num_frames: frames in the file.
        fps: mean frames per second.
        is_list: True for a frame list.
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
    """A sound as stored in its file: samples per channel, samples per second, channels."""

    num_samples: int
    rate: int
    channels: int

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.rate

    def count_at(self, rate: int) -> int:
        """Return the samples per channel at another rate."""
        return -(-self.num_samples * rate // self.rate)


class VideoSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's choice of video frames, with the names of vLLM's API; None: not set.

    Attributes:
        num_frames, fps: frames to read (``media_io_kwargs``); -1: all. For a frame list, fps is its frame rate.
        processor_num_frames, processor_fps, max_frames: frames that the model's processor samples if all frames
            are read (``mm_processor_kwargs``).
        do_sample_frames: False: the processor uses all frames read.
    """

    num_frames: int | None = None
    fps: float | None = None
    processor_num_frames: int | None = None
    processor_fps: float | None = None
    max_frames: int | None = None
    do_sample_frames: bool | None = None

    def takes_all_read(self, video: VideoFacts) -> bool:
        """Return whether the processor uses all frames read, because the request chose them."""
        return video.is_list or self.do_sample_frames is False or self.count_read(video) < video.num_frames

    def count_read(self, video: VideoFacts) -> int:
        """Return the number of frames to read, as vLLM's loader counts them; a frame list is cut after them."""
        count = video.num_frames if self.num_frames in (None, -1) else min(self.num_frames, video.num_frames)
        if self.fps is not None and not video.is_list:
            count = min(count, math.floor(video.duration_s * self.fps))
        return max(1, count)


#: No choice in the request: the model's files determine the sampling.
AS_THE_MODEL = VideoSampling()


class StageRate(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured time of a stage's batch, in seconds: ``base_s + unit_s * units``.

    Units are pixels (encode), tokens (prefill) and sequences (decode, where a batch is one step).

    Attributes:
        is_fresh: True if measured recently.
    """

    base_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    unit_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    is_fresh: bool = True

    def seconds(self, units: float) -> float:
        """Return the time of a batch of ``units``."""
        return self.base_s + self.unit_s * units
