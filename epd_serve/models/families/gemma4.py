"""Gemma 4: images, frames and audio; layers have several widths, and some share an earlier layer's KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.audio_processor import ConformerAudio, WaveAudio
from epd_serve.models.family import TEXT, Family, Pixels, Size, TowerInputs, names, require
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from epd_serve.models.video_processor import VideoProcessor


class Gemma4(Family):
    """Images keep their aspect ratio within a budget of tokens; each frame of a video follows its timestamp.

    E2B and E4B accept audio of up to 30 seconds.
    """

    title = "Gemma 4"
    model_types = ("gemma4",)
    decoder = "generic"
    texts: ClassVar = {
        "gemma4_text": TEXT
        | names(
            "head_dim per_layer_config hidden_activation rms_norm_eps attention_bias sliding_window layer_types",
            "final_logit_softcapping",
            "use_bidirectional_attention vocab_size_per_layer_input hidden_size_per_layer_input attention_k_eq_v",
            "num_kv_shared_layers use_double_wide_mlp enable_moe_block num_experts top_k_experts",
            "moe_intermediate_size",
        )
    }
    fields = names(
        "image_token_id boi_token_id eoi_token_id video_token_id audio_token_id boa_token_id eoa_token_index",
        "tie_word_embeddings",
    )
    towers: ClassVar = {
        "gemma4_vision": names(
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
            "hidden_activation rms_norm_eps rope_parameters attention_bias pooling_kernel_size patch_size",
            "position_embedding_size use_clipped_linears standardize",
        ),
        "gemma4_audio": names(
            "hidden_size num_hidden_layers num_attention_heads hidden_act subsampling_conv_channels",
            "conv_kernel_size residual_weight attention_chunk_size attention_context_left",
            "attention_context_right attention_logit_cap attention_invalid_logits_value use_clipped_linears",
            "rms_norm_eps gradient_clipping output_proj_dims",
        ),
    }
    modalities = ("image", "video", "audio")
    input_names = ("pixel_values", "image_position_ids")
    tokens = ("<|image>", "<image|>", "<|audio>", "<audio|>")
    both_ways_in_windows = True
    as_padding = ("image_token_id", "video_token_id", "audio_token_id")
    audio_processor = ConformerAudio

    def __init__(self, config: Any, image_processor: Any) -> None:
        from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

        super().__init__(config, image_processor)
        self._fit = get_aspect_ratio_preserving_size
        self._kernel: int = image_processor.pooling_kernel_size
        vision = config.vision_config
        self.picture_fields = {name: getattr(vision, name) for name in ("patch_size", "pooling_kernel_size")}
        if config.text_config.use_bidirectional_attention == "vision":
            self.both_ways_tokens = image_processor.max_soft_tokens

    def read_video(self, processor: Any) -> VideoProcessor:
        from epd_serve.models.video_processor import FrameProcessor

        return FrameProcessor(processor)

    def video_parts(self, item: MediaRef) -> Sequence[int | str]:
        start, end, *_ = self.tokens
        processor = self._video_processor(item)
        times = [int(seconds) for seconds in processor.timestamps(item)]
        num_rows = processor.num_tokens(item) // len(times)
        parts: list[int | str] = []
        for number, seconds in enumerate(times):
            before = f"{end} " if number else ""
            parts += (f"{before}{seconds // 60:02d}:{seconds % 60:02d} {start}", num_rows)
        return [*parts, end]

    def audio_parts(self, item: MediaRef) -> Sequence[int | str]:
        *_, start, end = self.tokens
        return (start, *super().audio_parts(item), end)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        if "input_features" not in inputs:
            return Family.features(model, inputs)
        output = model.model.get_audio_features(**inputs, return_dict=True)
        pairs = zip(output.pooler_output, output.attention_mask, strict=True)
        output.pooler_output = [rows[is_sound] for rows, is_sound in pairs]
        return output

    def fitted(self, size: Size) -> tuple[int, int]:
        """Return the height and width after resizing an image. Raises like :meth:`parts`."""
        processor, area = self.processor, self._kernel**2
        most_patches = processor.max_soft_tokens * area
        try:
            height, width = self._fit(size[1], size[0], processor.patch_size, most_patches, self._kernel)
        except ValueError as error:
            raise InvalidRequest(f"an image of {size[0]}x{size[1]} pixels cannot be used: {error}") from error
        return height, width

    def num_pixels(self, size: Size) -> int:
        height, width = self.fitted(size)
        return height * width

    def parts(self, size: Size) -> Sequence[int | str]:
        start, end, *_ = self.tokens
        return start, self.num_pixels(size) // (self._kernel * self.processor.patch_size) ** 2, end

    def preprocess(self, pixels: Pixels) -> TowerInputs:
        """Return the patches without padding."""
        inputs = super().preprocess(pixels)
        is_patch = (inputs["image_position_ids"][0] >= 0).all(-1)
        return {name: values[:, is_patch] for name, values in inputs.items()}

    def check_pictures(self) -> None:
        vision = self.config.vision_config
        longest = self.processor.max_soft_tokens
        if self.video is not None:
            frames = self.video.processor
            side = frames.patch_size * frames.pooling_kernel_size
            require(
                "patch_size * pooling_kernel_size of the video processor", side, vision.patch_size * self._kernel
            )
            longest = max(longest, frames.max_soft_tokens)
            self.both_ways_tokens = longest if self.both_ways_tokens else 0
        self.check_tower(longest)
        if self.config.text_config.use_bidirectional_attention == "all":
            raise ValueError(
                "text_config.use_bidirectional_attention is 'all'; an answer attends only to earlier tokens"
            )
        if self.config.text_config.pad_token_id is None:
            raise ValueError("text_config.pad_token_id is missing; it stands for media among embeddings by layer")
        super().check_pictures()

    def check_tower(self, num_tokens: int) -> None:
        """Raise ValueError if the tower has too few positions for a row of ``num_tokens`` tokens."""
        vision = self.config.vision_config
        if (most := num_tokens * self._kernel) > vision.position_embedding_size:
            raise ValueError(
                f"vision_config.position_embedding_size must be {most}, the patches of a side, or more"
            )
        require("vision_config.num_key_value_heads", vision.num_key_value_heads, vision.num_attention_heads)


class Gemma4Unified(Gemma4):
    """Gemma 4's images and videos, and audio of any length with rows of 40 milliseconds."""

    title = "Gemma 4 12B"
    model_types = ("gemma4_unified",)
    texts: ClassVar = {"gemma4_unified_text": Gemma4.texts["gemma4_text"]}
    towers: ClassVar = {
        "gemma4_unified_vision": names(
            "patch_size pooling_kernel_size mm_embed_dim mm_posemb_size rms_norm_eps output_proj_dims"
        ),
        "gemma4_unified_audio": names("audio_embed_dim rms_norm_eps"),
    }
    both_ways_in_windows = False
    audio_processor = WaveAudio

    def check_tower(self, num_tokens: int) -> None:
        if num_tokens > (places := self.config.vision_config.mm_posemb_size):
            raise ValueError(f"vision_config.mm_posemb_size is {places}; it must be {num_tokens} or more")
