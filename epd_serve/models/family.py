"""A model family's conventions: the tokens of its media, its tower's inputs, rotary positions. Without torch."""

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

#: RGB of a picture, [height, width, 3].
Pixels: TypeAlias = "NDArray[np.uint8]"

#: Tower inputs of one item by argument name; a batch concatenates them along dimension 0.
TowerInputs: TypeAlias = "dict[str, Tensor]"

#: Pixels of a picture as it is displayed: width, height.
Size: TypeAlias = tuple[int, int]

#: Layers of ours, with fused products; or transformers' own over our paged cache.
DecoderKind: TypeAlias = Literal["fused", "generic"]

#: Sizes of pictures that a family's arithmetic is held against its processor with.
TRIED_SIZES = ((64, 64), (200, 50), (50, 300))
#: The same for sounds, in seconds.
TRIED_SECONDS = (0.31, 1.7)
#: Of an item as clients often send it.
_TYPICAL_SIZE, _TYPICAL_S = (448, 448), 10.0


def names(*texts: str) -> frozenset[str]:
    """The words of some texts."""
    return frozenset(" ".join(texts).split())


#: What encoders honour of towers over square patches, such as CLIP's.
PATCH_TOWER = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size",
    "hidden_act layer_norm_eps",
)

#: What every language model of the generic decoder has honoured.
TEXT = names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads",
    "max_position_embeddings rope_parameters tie_word_embeddings",
)

#: What encoders honour of towers like Whisper's.
AUDIO_TOWER = names(
    "num_mel_bins encoder_layers encoder_attention_heads encoder_ffn_dim d_model activation_function",
    "scale_embedding max_source_positions",
)


class Family:
    """One family; a class in :mod:`epd_serve.models.families` overrides what it does in its own way.

    Attributes:
        title: names of its models.
        model_types: the ``model_type`` of the config.json of its models.
        other_parts: of a checkpoint beside what is run: the beginnings of their weights' names.
        modalities: that its tower takes; a family of text alone has none, and no other part of a tower.
        fields: what the engine honours at the top level of its configuration.
        towers: what it honours of each tower's configuration, by the tower's ``model_type``.
        decoder: computes the layers of its language model.
        texts: what the generic decoder honours of each language model's configuration, by its ``model_type``.
        num_position_axes: axes of the rotary positions: 3 for M-RoPE, 1 else.
        input_names: what the tower takes of the image processor's output.
        joins: whether the tower takes several items in one call, their inputs joined along dimension 0.
        captures: whether its tower may be captured as a graph (:mod:`epd_serve.models.tower_graphs`).
        splits_videos: whether several encoders may share a video: the tower sees its patches in time one by one.
        tokens: special ones in the text between the rows of a picture's feature.
        processor_options: arguments that the family's processor gives to its image processor.
        processor_fields: what processor_config.json must say, as the rest of the checkpoint says it.
        picture_fields: what the image processor's file must say, as config.json says it.
        token_ids: the token that stands for an item in a chat, for each modality that the checkpoint takes.
        row_token_ids: those that stand for each row of a feature.
        both_ways_tokens: most tokens of a run of rows that all see each other; 0: tokens see those before them.
        both_ways_in_windows: whether they do so in layers of a sliding window alone, and inside it.
        as_padding: fields of its configuration with tokens that are embedded as padding where an answer has them.
        video: how videos are sampled and cut; None where they are not taken.
        audio: what sounds become; None where they are not taken.
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
    captures: ClassVar[bool] = False
    splits_videos: ClassVar[bool] = True
    tokens: ClassVar[tuple[str, ...]] = ()
    both_ways_in_windows: ClassVar[bool] = False
    as_padding: ClassVar[tuple[str, ...]] = ()

    video: VideoProcessor | None = None
    both_ways_tokens: int = 0
    audio: AudioProcessor | None = None

    def __init__(self, config: Any, image_processor: Any) -> None:
        """``image_processor``: None where no pictures are taken."""
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
        """Return how a checkpoint's videos are sampled and cut, by transformers' processor of it."""
        from epd_serve.models import video_processor

        return video_processor.VideoProcessor(processor)

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        """What a checkpoint's sounds become. Raises ValueError for what is not known."""
        raise NotImplementedError

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        """Return what transformers' tower makes: ``pooler_output`` are the features of all items, in order."""
        if "input_features" in inputs:
            return model.get_audio_features(**inputs, return_dict=True)
        return model.get_image_features(**inputs, return_dict=True)

    def placeholders(self, tokenizer: Any) -> dict[str, str]:
        """Return the text that stands for an item of each modality in a prompt, with the tokens around it."""
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
        """:meth:`parts` of an item. Raises InvalidRequest for one that the model cannot take."""
        if item.modality == "image" and "image" in self.token_ids:
            return self.of(item).parts((item.width, item.height))
        return self.audio_parts(item) if item.modality == "audio" else self.video_parts(item)

    def of(self, item: MediaRef) -> Self:
        """The family with the processor that an item's request asks for. Raises InvalidRequest."""
        if not item.processing:
            return self
        asked: dict[str, Any] = msgspec.json.decode(item.processing)
        try:
            return self.with_options(asked)
        except ValueError as error:
            raise InvalidRequest(f"mm_processor_kwargs: {error}", param="mm_processor_kwargs") from error

    def with_options(self, asked: Mapping[str, Any]) -> Self:
        """The family with ``min_pixels`` or ``max_pixels`` of pictures. Raises ValueError where it has no such."""
        raise ValueError(f"pictures of {self.title} have sizes of its own; leave out {', '.join(asked)}")

    def num_tokens(self, item: MediaRef) -> int:
        """Rows of an item's feature. Raises as :meth:`parts_of`."""
        if item.segment is not None:  # what stands between its rows is that of the whole video
            return self._video_processor(item).num_tokens(item)
        return sum(part for part in self.parts_of(item) if isinstance(part, int))

    def pixels_of(self, item: MediaRef) -> int:
        """Return the pixels of an item's work: two frames are a picture, a sound's positions patches."""
        if item.modality == "image":
            return self.of(item).num_pixels((item.width, item.height))
        if item.modality == "audio" and self.audio is not None:
            return self.audio.num_pixels(item)
        return self._video_processor(item).num_pixels(item)

    def audio_parts(self, item: MediaRef) -> Sequence[int | str]:
        """:meth:`parts` of a sound: one run."""
        if self.audio is None:
            raise _unsupported(item)
        return (self.audio.num_tokens(item),)

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        """:meth:`parts` of a video: one run."""
        return (self._video_processor(item).num_tokens(item),)

    def _video_processor(self, item: MediaRef) -> VideoProcessor:
        if self.video is None:
            raise _unsupported(item)
        return self.video

    def parts(self, size: Size) -> Sequence[int | str]:
        """Return the tokens of a picture: numbers of rows of its feature, and the text between such runs.

        Raises InvalidRequest for a size that the model cannot take.
        """
        raise NotImplementedError

    @property
    def typical(self) -> MediaRef:
        """An item as clients often send it."""
        if "image" in self.token_ids:
            return picture(_TYPICAL_SIZE)
        assert self.audio is not None, "there are no items"
        return sound(min(_TYPICAL_S, self.audio.max_seconds), self.audio.rate)

    def num_image_tokens(self, size: Size) -> int:
        """Rows of a picture's feature. Raises as :meth:`parts`."""
        return sum(part for part in self.parts(size) if isinstance(part, int))

    def num_pixels(self, size: Size) -> int:
        """Pixels of a picture that the tower sees, once it is resized. Raises as :meth:`parts`."""
        raise NotImplementedError

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        """RGB pixels [height, width, 3] → tower inputs, which share no memory with them."""
        batch = self.processor(
            images=[pixels], input_data_format="channels_last", return_tensors="pt", **self.processor_options
        )
        return {name: batch[name] for name in self.input_names}

    def blank_inputs(self, size: Size) -> TowerInputs:
        """The tower's inputs of a grey picture."""
        return self.preprocess(blank(size))

    def check(self) -> None:
        """Raise ValueError where the processors make other inputs than the towers' configurations are for."""
        if self.audio is not None:
            self.audio.check(self.config.audio_config)
        if self.video is not None and not self.video.processor.do_resize:
            raise ValueError("do_resize of the video processor is false; frames must be resized")
        for name, expected in self.picture_fields.items():
            if (found := getattr(self.processor, name)) != expected:
                raise ValueError(
                    f"{name} of preprocessor_config.json is {found!r}; by config.json it is {expected!r}"
                )
        if "image" in self.token_ids:
            self.check_pictures()

    def check_pictures(self) -> None:
        """Raise ValueError where pictures have other sizes than are counted."""
        for size in TRIED_SIZES:
            expected, made = self.num_pixels(size), self.preprocess(blank(size))["pixel_values"].numel() // 3
            if expected != made:
                raise ValueError(
                    f"preprocessor_config.json makes {made} pixels of a picture of {size}, where the tower of "
                    f"config.json takes {expected}; use the files that belong together"
                )

    def positions(self, ids: Sequence[int], items: Sequence[MediaRef], model: Any) -> tuple[Tensor, int]:
        """Rotary positions [axes, len(ids)] of a prompt with these items, and the decode delta."""
        import torch

        return torch.arange(len(ids)).unsqueeze(0), 0


class SoundFamily(Family):
    """A family that takes sounds alone: where others are measured by a picture, it is by a silence."""

    modalities = ("audio",)

    def num_pixels(self, size: Size) -> int:
        """Of a silence that is about as much work as a picture of that size."""
        assert self.audio is not None
        return self.audio.num_pixels(self._like(size))

    def blank_inputs(self, size: Size) -> TowerInputs:
        """The tower's inputs of that silence."""
        import numpy as np

        assert self.audio is not None
        return self.audio.inputs(np.zeros(self._like(size).num_samples, np.float32))

    def _like(self, size: Size) -> MediaRef:
        assert self.audio is not None
        seconds = size[0] * size[1] / sound(1.0, self.audio.rate).num_pixels
        return sound(min(max(seconds, 0.1), self.audio.max_seconds), self.audio.rate)


def _unsupported(item: MediaRef) -> InvalidRequest:
    return InvalidRequest(
        f"the model takes no {PLURALS[item.modality]}", param="messages", code="unsupported_media"
    )


def picture(size: Size) -> MediaRef:
    return MediaRef("", *size)


def sound(seconds: float, rate: int) -> MediaRef:
    return MediaRef.of_audio(AudioFacts(round(seconds * rate), rate, 1))


def blank(size: Size) -> Pixels:
    """A grey picture of that width and height."""
    import numpy as np

    return np.full((size[1], size[0], 3), 128, np.uint8)
