"""A checkpoint's audio feature extractor: durations, tower inputs, and feature rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.family import TowerInputs, require
from epd_serve.protocol.wire import PIXELS_PER_POSITION, MediaRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AudioProcessor:
    """Whisper's log-mel spectra, padded to the extractor's length, and a mask of the valid frames.

    Two frames of the spectrum make a position of the tower, two positions a row of the feature.

    Attributes:
        extractor: transformers' extractor. kind: its class name.
        mask: name of the mask among the tower's inputs.
        padding: padding arguments of the extractor.
    """

    extractor: Any
    kind: ClassVar[str] = "WhisperFeatureExtractor"
    mask: ClassVar[str] = "feature_attention_mask"
    padding: ClassVar[dict[str, Any]] = {"padding": "max_length"}

    @property
    def rate(self) -> int:
        rate: int = self.extractor.sampling_rate
        return rate

    @property
    def max_seconds(self) -> float:
        return float(self.extractor.n_samples / self.rate)

    def check(self, tower: Any) -> None:
        """Raise ValueError if the extractor does not fit the tower."""
        self.check_kind()
        require("feature_size of preprocessor_config.json", self.extractor.feature_size, tower.num_mel_bins)

    def check_kind(self) -> None:
        """Raise ValueError for an extractor of another class, or one that adds noise."""
        require("the class of the feature extractor", type(self.extractor).__name__, self.kind)
        require("dither of the feature extractor", getattr(self.extractor, "dither", 0) or 0, 0)

    def check_length(self, item: MediaRef) -> None:
        """Raise InvalidRequest for audio too long for the model, instead of truncating it."""
        if item.audio.count_at(self.rate) > self.max_seconds * self.rate:
            raise InvalidRequest(
                f"the audio has {item.audio.duration_s:.2f} s; the model takes at most {self.max_seconds:g} s at "
                "a time: cut it into parts",
                code="audio_too_long",
            )

    def num_frames(self, item: MediaRef) -> int:
        """Return the frames of the spectrum without padding. Raises like :meth:`check_length`."""
        self.check_length(item)
        count: int = -(-item.audio.count_at(self.rate) // self.extractor.hop_length)
        return count

    def num_tokens(self, item: MediaRef) -> int:
        """Return the rows of the feature. Raises InvalidRequest if the audio is too short or too long."""
        count = self._num_rows(self.num_frames(item))
        if not count:
            raise InvalidRequest(
                f"the audio has {item.audio.duration_s:.3f} s, which is too short for a token of the model",
                code="audio_too_short",
            )
        return count

    def num_pixels(self, item: MediaRef) -> int:
        """Return the tower's work, in pixels of images. Raises like :meth:`num_tokens`."""
        return self._num_positions(self.num_frames(item)) * PIXELS_PER_POSITION

    def inputs(self, samples: NDArray[np.float32]) -> TowerInputs:
        """Convert mono samples at :attr:`rate` to a spectrum [1, bins, frames] and a mask [1, frames]."""
        batch = self.extractor(
            samples, sampling_rate=self.rate, return_attention_mask=True, return_tensors="pt", **self.padding
        )
        return {"input_features": batch["input_features"], self.mask: batch["attention_mask"]}

    @staticmethod
    def _num_positions(num_frames: int) -> int:
        return -(-num_frames // 2)

    def _num_rows(self, num_frames: int) -> int:
        return self._num_positions(num_frames) // 2


class PaddedAudio(AudioProcessor):
    """Audio whose padding the tower computes as well."""

    __slots__ = ()

    def check(self, tower: Any) -> None:
        AudioProcessor.check(self, tower)
        frames = "the frames by chunk_length, sampling_rate and hop_length of preprocessor_config.json"
        require(frames, self.extractor.nb_max_frames, 2 * tower.max_source_positions)

    def num_pixels(self, item: MediaRef) -> int:
        return self._num_positions(self.extractor.nb_max_frames) * PIXELS_PER_POSITION


class UnpaddedAudio(AudioProcessor):
    """Unpadded audio of any length. Blocks of 100 frames become 13 rows each, the last one fewer."""

    __slots__ = ()
    padding: ClassVar = {"padding": True, "truncation": False}

    @property
    def max_seconds(self) -> float:
        return math.inf

    def check(self, tower: Any) -> None:
        AudioProcessor.check(self, tower)
        for where, owner in (("audio_config", tower), ("preprocessor_config.json", self.extractor)):
            require(f"n_window of {where}", getattr(owner, "n_window", _HALF_BLOCK), _HALF_BLOCK)

    def num_frames(self, item: MediaRef) -> int:
        return int(item.audio.count_at(self.rate) // self.extractor.hop_length)

    def num_pixels(self, item: MediaRef) -> int:
        return self.num_tokens(item) * PIXELS_PER_POSITION

    def _num_rows(self, num_frames: int) -> int:
        blocks, rest = divmod(num_frames, 2 * _HALF_BLOCK)
        for _ in range(3):  # convolutions of stride 2
            rest = self._num_positions(rest)
        return 13 * blocks + rest


class SpeechAudio(UnpaddedAudio):
    """Unpadded audio of any length, but padded to a least length."""

    __slots__ = ()
    kind = "Qwen3ASRFeatureExtractor"
    mask = "input_features_mask"

    def num_frames(self, item: MediaRef) -> int:
        return int(max(item.audio.count_at(self.rate), self.extractor.min_length) // self.extractor.hop_length)


class ConformerAudio(UnpaddedAudio):
    """Unpadded audio of up to 30 seconds; two convolutions keep every fourth frame."""

    __slots__ = ()
    kind = "Gemma4AudioFeatureExtractor"

    @property
    def max_seconds(self) -> float:
        return _MOST_SAMPLES / self.rate

    def check(self, tower: Any) -> None:
        self.check_kind()
        require("padding_side of the feature extractor", self.extractor.padding_side, "right")
        quarter = "a quarter of feature_size of preprocessor_config.json"
        require(quarter, -(-self.extractor.feature_size // 4), tower.subsampling_conv_channels[0] // 4)

    def num_frames(self, item: MediaRef) -> int:
        self.check_length(item)
        window = self.extractor.frame_length - self.extractor.frame_length // 2 + 1
        count: int = (item.audio.count_at(self.rate) - window) // self.extractor.hop_length + 1
        return max(count, 0)

    def _num_rows(self, num_frames: int) -> int:
        return -(-num_frames // 4)

    def inputs(self, samples: NDArray[np.float32]) -> TowerInputs:
        batch = self.extractor([samples], return_tensors="pt")
        return {name: batch[name] for name in ("input_features", "input_features_mask")}


class WaveAudio(ConformerAudio):
    """Unpadded audio of any length; a fixed number of samples becomes a row."""

    __slots__ = ()
    kind = "Gemma4UnifiedAudioFeatureExtractor"
    max_seconds = math.inf

    def check(self, tower: Any) -> None:
        self.check_kind()
        found = self.extractor.audio_samples_per_token
        require("audio_samples_per_token of preprocessor_config.json", found, tower.audio_embed_dim)

    def num_frames(self, item: MediaRef) -> int:
        return -(-item.audio.count_at(self.rate) // int(self.extractor.audio_samples_per_token))

    def _num_rows(self, num_frames: int) -> int:
        return num_frames


#: Samples at which transformers' extractor of Gemma 4 truncates audio.
_MOST_SAMPLES = 480_000
#: Frames of half a block of Qwen3's audio towers.
_HALF_BLOCK = 50
