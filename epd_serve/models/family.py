"""A model family's media tokens, tower inputs and rotary positions. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.wire import MediaRef
from epd_serve.types import PLURALS, AudioFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from epd_serve.models.audio_processor import AudioProcessor
    from epd_serve.models.video_processor import VideoProcessor

#: RGB of an image, [height, width, 3].
Pixels: TypeAlias = "NDArray[np.uint8]"

#: Tower inputs of one item by argument name; a batch concatenates them along dimension 0.
TowerInputs: TypeAlias = "dict[str, Tensor]"

#: Displayed size of an image in pixels: width, height.
Size: TypeAlias = tuple[int, int]

#: Fused layers, or transformers' layers over the paged cache.
DecoderKind: TypeAlias = Literal["fused", "generic"]

#: Image sizes for checking a family's arithmetic against its processor.
TRIED_SIZES = ((64, 64), (200, 50), (50, 300))
#: The same for audio, in seconds.
TRIED_SECONDS = (0.31, 1.7)
#: Size of a typical item.
_TYPICAL_SIZE, _TYPICAL_S = (448, 448), 10.0


def names(*texts: str) -> frozenset[str]:
    """Return the set of words of some texts."""
    return frozenset(" ".join(texts).split())


#: Fields of towers over square patches, such as CLIP's, honoured by encoders.
PATCH_TOWER = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size",
    "hidden_act layer_norm_eps",
)

#: Fields of every language model honoured by the generic decoder.
TEXT = names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads",
    "max_position_embeddings rope_parameters tie_word_embeddings",
)

#: Fields of towers like Whisper's honoured by encoders.
AUDIO_TOWER = names(
    "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model activation_function",
    "scale_embedding max_source_positions",
)


def require(name: str, found: Any, expected: Any) -> None:
    """Raise ValueError unless a value in a checkpoint's files is the one that its other files require."""
    if found != expected:
        raise ValueError(f"{name} is {found!r}; the checkpoint's other files require {expected!r}")


class Family:
    """Base of the families in :mod:`epd_serve.models.families`.

    Attributes:
        title: names of its models.
        model_types: values of ``model_type`` in config.json.
        other_parts: prefixes of weight names of unused parts of a checkpoint.
        modalities: modalities of its tower; empty for text-only families.
        fields: honoured top-level fields of its configuration.
        towers: honoured fields of tower configurations, by ``model_type``.
        decoder: the decoder that runs its language model.
        texts: fields of language model configurations honoured by the generic decoder, by ``model_type``.
        num_position_axes: axes of the rotary positions: 3 for M-RoPE, otherwise 1.
        input_names: outputs of the image processor that the tower takes.
        joins: True if the tower takes several items in one call, joined along dimension 0.
        takes_size_tensors: True if its tower accepts the positions and borders that follow from image sizes.
        splits_videos: True if several encoders may share a video, because temporal patches are independent.
        tokens: special tokens in the text between the rows of an image's feature.
        processor_options: arguments of the image processor.
        processor_fields: required values of processor_config.json, from the rest of the checkpoint.
        picture_fields: required values of the image processor's file, from config.json.
        token_ids: placeholder token of an item in a chat, by modality.
        row_token_ids: placeholder tokens of the rows of a feature.
        both_ways_tokens: maximum tokens of a run with bidirectional attention; 0: causal attention only.
        both_ways_in_windows: True if attention is bidirectional only in sliding-window layers, within the window.
        as_padding: configuration fields of tokens to embed as padding in an answer.
        audio_processor: class of its audio's layout; unset without audio.
        video: sampling and layout of videos; None if unsupported.
        audio: layout of audio; None if unsupported.
    """

    title: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    other_parts: ClassVar[tuple[str, ...]] = ()
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    fields: ClassVar[frozenset[str]] = frozenset()
    towers: ClassVar[dict[str, frozenset[str]]] = {}
    decoder: ClassVar[DecoderKind] = "fused"
    texts: ClassVar[dict[str, frozenset[str]]] = {}
    num_position_axes: ClassVar[int] = 1
    input_names: ClassVar[tuple[str, ...]] = ("pixel_values",)
    joins: ClassVar[bool] = True
    takes_size_tensors: ClassVar[bool] = False
    splits_videos: ClassVar[bool] = True
    tokens: ClassVar[tuple[str, ...]] = ()
    both_ways_in_windows: ClassVar[bool] = False
    as_padding: ClassVar[tuple[str, ...]] = ()
    audio_processor: ClassVar[type[AudioProcessor]]

    video: VideoProcessor | None = None
    both_ways_tokens: int = 0
    audio: AudioProcessor | None = None

    def __init__(self, config: Any, image_processor: Any) -> None:
        """``image_processor``: None if images are unsupported."""
        self.processor_options: dict[str, Any] = {}
        self.processor_fields: dict[str, Any] = {}
        self.picture_fields: dict[str, Any] = {}
        self.config = config
        self.token_ids: dict[str, int] = {}
        if "image" in self.modalities:
            self.token_ids["image"] = getattr(config, "image_token_id", None) or config.image_token_index
        self.row_token_ids = self.token_ids
        self.processor = image_processor

    def read_video(self, processor: Any) -> VideoProcessor:
        """Return the video processor around transformers' ``processor``."""
        from epd_serve.models import video_processor

        return video_processor.VideoProcessor(processor)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        """Return the output of transformers' tower; ``pooler_output`` holds all items' features in order."""
        if "input_features" in inputs:
            return model.get_audio_features(**inputs, return_dict=True)
        return model.get_image_features(**inputs, return_dict=True)

    def placeholders(self, tokenizer: Any) -> dict[str, str]:
        """Return the placeholder text of an item in a prompt, with the tokens around it, by modality."""
        texts = {}
        for modality, token in self.token_ids.items():
            ids: list[Any] = [token]
            for kind in (modality,) if modality == "audio" else ("vision", modality):
                around = [getattr(self.config, f"{kind}_{side}_token_id", None) for side in ("start", "end")]
                if None not in around:
                    ids = [around[0], token, around[1]]
            texts[modality] = "".join(tokenizer.convert_ids_to_tokens(ids))
        return texts

    def parts_of(self, item: MediaRef) -> Sequence[int | str]:
        """Return :meth:`parts` of an item. Raises InvalidRequest if the model cannot take it."""
        if item.modality == "image" and "image" in self.token_ids:
            return self.of(item).parts((item.width, item.height))
        return self.audio_parts(item) if item.modality == "audio" else self.video_parts(item)

    def of(self, item: MediaRef) -> Self:
        """Return the family with the processor options of an item's request. Raises InvalidRequest."""
        if not item.processing:
            return self
        asked: dict[str, Any] = msgspec.json.decode(item.processing)
        try:
            return self.with_options(asked)
        except ValueError as error:
            raise InvalidRequest(f"mm_processor_kwargs: {error}", param="mm_processor_kwargs") from error

    def with_options(self, asked: Mapping[str, Any]) -> Self:
        """Return the family with ``min_pixels`` or ``max_pixels`` of images. Raises ValueError if unsupported."""
        raise ValueError(f"{self.title} fixes the sizes of its pictures; leave out {', '.join(asked)}")

    def num_tokens(self, item: MediaRef) -> int:
        """Return the rows of an item's feature. Raises like :meth:`parts_of`."""
        if item.segment is not None:  # the text between rows belongs to the whole video
            return self._video_processor(item).num_tokens(item)
        return sum(part for part in self.parts_of(item) if isinstance(part, int))

    def pixels_of(self, item: MediaRef) -> int:
        """Return an item's work in pixels: two frames count as an image, audio positions as patches."""
        if item.modality == "image":
            return self.of(item).num_pixels((item.width, item.height))
        if item.modality == "audio" and self.audio is not None:
            return self.audio.num_pixels(item)
        return self._video_processor(item).num_pixels(item)

    def audio_parts(self, item: MediaRef) -> Sequence[int | str]:
        """Return :meth:`parts` of audio: one run."""
        if self.audio is None:
            raise _unsupported(item)
        return (self.audio.num_tokens(item),)

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        """Return :meth:`parts` of a video: one run."""
        return (self._video_processor(item).num_tokens(item),)

    def _video_processor(self, item: MediaRef) -> VideoProcessor:
        if self.video is None:
            raise _unsupported(item)
        return self.video

    def parts(self, size: Size) -> Sequence[int | str]:
        """Return the tokens of an image: numbers of rows of its feature, and the text between such runs.

        Raises InvalidRequest for a size that the model cannot take.
        """
        raise NotImplementedError

    @property
    def typical(self) -> MediaRef:
        """A typical item."""
        if "image" in self.token_ids:
            return picture(_TYPICAL_SIZE)
        assert self.audio is not None, "there are no items"
        return sound(min(_TYPICAL_S, self.audio.max_seconds), self.audio.rate)

    def num_image_tokens(self, size: Size) -> int:
        """Return the rows of an image's feature. Raises like :meth:`parts`."""
        return sum(part for part in self.parts(size) if isinstance(part, int))

    def num_pixels(self, size: Size) -> int:
        """Return the pixels of an image after resizing for the tower. Raises like :meth:`parts`."""
        raise NotImplementedError

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        """Convert RGB pixels [height, width, 3] to tower inputs, which do not share their memory."""
        batch = self.processor(
            images=[pixels], input_data_format="channels_last", return_tensors="pt", **self.processor_options
        )
        return {name: batch[name] for name in self.input_names}

    def blank_inputs(self, size: Size) -> TowerInputs:
        """Return the tower's inputs for a grey image."""
        return self.preprocess(blank(size))

    def check(self) -> None:
        """Raise ValueError if the processors' inputs do not match the towers' configurations."""
        if self.audio is not None:
            self.audio.check(self.config.audio_config)
        if self.video is not None and not self.video.processor.do_resize:
            raise ValueError("do_resize of the video processor is false; frames must be resized")
        for name, expected in self.picture_fields.items():
            require(f"{name} of preprocessor_config.json", getattr(self.processor, name), expected)
        if "image" in self.token_ids:
            self.check_pictures()

    def check_pictures(self) -> None:
        """Raise ValueError if processed images differ from the computed sizes."""
        for size in TRIED_SIZES:
            made = self.preprocess(blank(size))["pixel_values"].numel() // 3
            require(f"the pixels that preprocessor_config.json makes of {size}", made, self.num_pixels(size))

    def positions(self, ids: Sequence[int], items: Sequence[MediaRef], model: Any) -> tuple[Tensor, int]:
        """Return rotary positions [axes, len(ids)] of a prompt with these items, and the decode delta."""
        import torch

        return torch.arange(len(ids)).unsqueeze(0), 0


class SoundFamily(Family):
    """A family for audio only; it is measured with a typical silence instead of images."""

    modalities = ("audio",)

    def num_pixels(self, size: Size) -> int:
        assert self.audio is not None
        return self.audio.num_pixels(self.typical)

    def blank_inputs(self, size: Size) -> TowerInputs:
        import numpy as np

        assert self.audio is not None
        return self.audio.inputs(np.zeros(self.typical.num_samples, np.float32))


def _unsupported(item: MediaRef) -> InvalidRequest:
    return InvalidRequest(
        f"the model takes no {PLURALS[item.modality]}", param="messages", code="unsupported_media"
    )


def picture(size: Size) -> MediaRef:
    return MediaRef("", *size)


def sound(seconds: float, rate: int) -> MediaRef:
    return MediaRef.of_audio(AudioFacts(round(seconds * rate), rate, 1))


def blank(size: Size) -> Pixels:
    """Return a grey image of that width and height."""
    import numpy as np

    return np.full((size[1], size[0], 3), 128, np.uint8)
