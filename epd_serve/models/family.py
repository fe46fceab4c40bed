"""A model family's conventions: the tokens of its media, its tower's inputs, rotary positions. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from epd_serve.errors import InvalidRequest
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from epd_serve.models.video_processor import VideoProcessor

#: Tower inputs of one item by argument name; a batch concatenates them along dimension 0.
TowerInputs: TypeAlias = "dict[str, Tensor]"

#: Pixels of a picture as it is displayed: width, height.
Size: TypeAlias = tuple[int, int]

#: Layers of ours, with fused products; or transformers' own over our paged cache.
DecoderKind: TypeAlias = Literal["fused", "generic"]

#: Sizes of pictures that a family's arithmetic is held against its processor with.
TRIED_SIZES = ((64, 64), (200, 50), (50, 300))


def names(*texts: str) -> frozenset[str]:
    """The words of some texts."""
    return frozenset(" ".join(texts).split())


#: What encoders honour of towers over square patches, such as CLIP's.
PATCH_TOWER = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size",
    "hidden_act layer_norm_eps",
)


class Family:
    """One family; a class in :mod:`epd_serve.models.families` overrides what it does in its own way.

    Attributes:
        title: names of its models.
        model_types: the ``model_type`` of the config.json of its models.
        mixtures: those of them whose experts are not split over several devices.
        modalities: that its tower takes; a family of text alone has none, and no other part of a tower.
        fields: what the engine honours at the top level of its configuration.
        towers: what it honours of each tower's configuration, by the tower's ``model_type``.
        decoder: computes the layers of its language model.
        texts: of a family of the generic decoder: what it honours of each language model's configuration, by the
            language model's ``model_type``.
        num_position_axes: axes of the rotary positions: 3 for M-RoPE, 1 else.
        input_names: what the tower takes of the image processor's output.
        joins: whether the tower takes several items in one call, their inputs joined along dimension 0.
        tokens: special ones in the text between the rows of a picture's feature.
        processor_options: arguments that the family's processor gives to its image processor.
        processor_fields: what processor_config.json must say, as the rest of the checkpoint says it.
        image_token_id: the token that stands for a picture in a chat.
        token_ids: these tokens for each modality that the checkpoint takes.
        row_token_ids: those that stand for each row of a feature.
        both_ways_tokens: tokens of a run of rows that see each other, earlier and later ones; 0: all see those
            before them.
        video: how videos are sampled and cut; None where they are not taken.
    """

    title: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    mixtures: ClassVar[tuple[str, ...]] = ()
    modalities: ClassVar[tuple[str, ...]] = ("image",)
    fields: ClassVar[frozenset[str]] = frozenset()
    towers: ClassVar[dict[str, frozenset[str]]] = {}
    decoder: ClassVar[DecoderKind] = "fused"
    texts: ClassVar[dict[str, frozenset[str]]] = {}
    num_position_axes: ClassVar[int] = 1
    input_names: ClassVar[tuple[str, ...]] = ("pixel_values",)
    joins: ClassVar[bool] = True
    tokens: ClassVar[tuple[str, ...]] = ()

    video: VideoProcessor | None = None
    both_ways_tokens: int = 0

    def __init__(self, config: Any, image_processor: Any) -> None:
        self.processor_options: dict[str, Any] = {}
        self.processor_fields: dict[str, Any] = {}
        self.config = config
        self.image_token_id: int = getattr(config, "image_token_id", None) or config.image_token_index
        self.processor = image_processor

    @property
    def token_ids(self) -> dict[str, int]:
        ids = {"image": self.image_token_id} if self.modalities else {}
        return ids if self.video is None else {**ids, "video": self.config.video_token_id}

    @property
    def row_token_ids(self) -> dict[str, int]:
        return self.token_ids

    @staticmethod
    def read_video(settings: Mapping[str, Any]) -> VideoProcessor:
        """How a checkpoint's videos are sampled and cut, by its file. Raises ValueError for what is not known."""
        raise NotImplementedError

    def parts_of(self, item: MediaRef) -> Sequence[int | str]:
        """:meth:`parts` of an item. Raises InvalidRequest for one that the model cannot take."""
        return self.parts((item.width, item.height)) if item.modality == "image" else self.video_parts(item)

    def num_tokens(self, item: MediaRef) -> int:
        """Rows of an item's feature. Raises as :meth:`parts_of`."""
        return sum(part for part in self.parts_of(item) if isinstance(part, int))

    def pixels_of(self, item: MediaRef) -> int:
        """:meth:`num_pixels` of an item; two frames of a video are one picture. Raises as :meth:`parts_of`."""
        if item.modality == "image":
            return self.num_pixels((item.width, item.height))
        return self._video_processor(item).num_pixels(item)

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        """:meth:`parts` of a video: one run."""
        return (self._video_processor(item).num_tokens(item),)

    def _video_processor(self, item: MediaRef) -> VideoProcessor:
        if self.video is None:
            raise InvalidRequest(
                f"the model takes no {item.modality}s", param="messages", code="unsupported_media"
            )
        return self.video

    def parts(self, size: Size) -> Sequence[int | str]:
        """The tokens of a picture in their order: how many rows of its feature, and the text between such runs.

        Raises InvalidRequest for a size that the model cannot take.
        """
        raise NotImplementedError

    def num_image_tokens(self, size: Size) -> int:
        """Rows of a picture's feature. Raises as :meth:`parts`."""
        return sum(part for part in self.parts(size) if isinstance(part, int))

    def num_pixels(self, size: Size) -> int:
        """Pixels of a picture that the tower sees, once it is resized. Raises as :meth:`parts`."""
        raise NotImplementedError

    def preprocess(self, pixels: NDArray[np.uint8]) -> TowerInputs:
        """RGB pixels [height, width, 3] → tower inputs, which share no memory with them."""
        batch = self.processor(
            images=[pixels], input_data_format="channels_last", return_tensors="pt", **self.processor_options
        )
        return {name: batch[name] for name in self.input_names}

    def blank_inputs(self, size: Size) -> TowerInputs:
        """The tower's inputs of a grey picture."""
        return self.preprocess(blank(size))

    def check(self) -> None:
        """Raise ValueError where the processor makes other inputs than the tower's configuration is for."""
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


def picture(size: Size) -> MediaRef:
    """A picture of a size, without a name."""
    return MediaRef("", *size)


def blank(size: Size) -> NDArray[np.uint8]:
    """A grey picture of that width and height."""
    import numpy as np

    return np.full((size[1], size[0], 3), 128, np.uint8)
