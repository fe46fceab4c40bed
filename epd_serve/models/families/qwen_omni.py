"""Qwen2.5-Omni, Qwen3-Omni: images, videos and audio in, text out, by the thinker alone, without soundtracks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.audio_processor import AudioProcessor, UnpaddedAudio
from epd_serve.models.families.qwen_audio import QWEN3_TOWER
from epd_serve.models.families.qwen_vl import QwenVL
from epd_serve.models.family import AUDIO_TOWER, Family, TowerInputs, names
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from torch import Tensor

    from epd_serve.models.video_processor import VideoProcessor


class QwenOmni(QwenVL):
    """Qwen2.5-VL's images and videos, and audio of up to 5 minutes as one run; only the thinker runs."""

    title = "Qwen2.5-Omni"
    model_types = ("qwen2_5_omni_thinker",)
    other_parts = ("talker", "token2wav")
    fields = names(
        "image_token_index video_token_index audio_token_index vision_start_token_id vision_end_token_id",
        "audio_start_token_id audio_end_token_id position_id_per_seconds tie_word_embeddings",
    )
    towers: ClassVar = {
        "qwen2_5_omni_vision_encoder": QwenVL.towers["qwen2_5_vl_vision"],
        "qwen2_5_omni_audio_encoder": AUDIO_TOWER | names("n_window output_dim"),
    }
    modalities = ("image", "video", "audio")
    audio_processor = AudioProcessor
    usual_fps: ClassVar[float] = 2.0
    side: ClassVar[int] = 28  # pixels per token

    def read_video(self, processor: Any) -> VideoProcessor:
        """Override the file's size: transformers' processor requests 128 to 768 tokens per two frames."""
        size = {"shortest_edge": 128 * self.side**2, "longest_edge": 768 * self.side**2}
        processor.size = type(processor.size)(**size)
        return super().read_video(processor)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        output = Family.features(model, inputs)
        if "input_features" in inputs:
            frames = inputs["feature_attention_mask"].sum(-1)
            _, counts = model.model.audio_tower._get_feat_extract_output_lengths(frames)
            output.pooler_output = output.pooler_output.split(counts.tolist())
        return output

    def check_pictures(self) -> None:
        super().check_pictures()
        self.check_width("audio_config.output_dim", self.config.audio_config.output_dim)

    def position_facts(self, tokens: Tensor, items: Sequence[MediaRef]) -> dict[str, Tensor]:
        """Return further arguments, with the requested or default rate of videos."""
        import torch

        assert self.audio is not None
        frames = [self.audio.num_frames(item) for item in items if item.modality == "audio"]
        rates = [item.sampling.processor_fps or self.usual_fps for item in items if item.modality == "video"]
        step: int = self.config.vision_config.temporal_patch_size
        return {
            "attention_mask": torch.ones_like(tokens),
            "audio_seqlens": torch.tensor(frames),
            "second_per_grids": torch.tensor([step / rate for rate in rates]),
        }


class Qwen3Omni(QwenOmni):
    """Images, videos as one run of tokens, and audio of any length; only the thinker runs."""

    title = "Qwen3-Omni"
    model_types = ("qwen3_omni_moe_thinker",)
    other_parts = ("talker", "code2wav")
    fields = QwenOmni.fields | names("image_token_id video_token_id audio_token_id")
    towers: ClassVar = {
        "qwen3_omni_moe_vision_encoder": QwenVL.towers["qwen3_vl_moe_vision"],
        "qwen3_omni_moe_audio_encoder": QWEN3_TOWER | names("conv_chunksize max_source_positions"),
    }
    audio_processor = UnpaddedAudio
    usual_fps = 1.0
    side = 32

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        """Return features with zeros for audio in the layers to which image features are added."""
        import torch

        output = Family.features(model, inputs)
        if "input_features" in inputs:
            levels = model.config.vision_config.deepstack_visual_indexes
            rows = output.pooler_output.unflatten(0, (len(inputs["input_features"]), -1))
            output.pooler_output = rows
            output.deepstack_features = [list(torch.zeros_like(rows)) for _ in levels]
        return output

    def position_facts(self, tokens: Tensor, items: Sequence[MediaRef]) -> dict[str, Tensor]:
        facts = super().position_facts(tokens, items)
        steps = facts["second_per_grids"] * self.config.position_id_per_seconds
        if steps.frac().any():
            raise InvalidRequest(
                "at this rate the model uses fractional video timestamps, which the native engine lacks; "
                "send another mm_processor_kwargs.fps, such as 1 or 2",
                param="mm_processor_kwargs",
            )
        return facts
