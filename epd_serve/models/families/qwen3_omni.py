"""Qwen3-Omni: Qwen2.5-Omni with the towers of Qwen3-VL and Qwen3-ASR and a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.errors import InvalidRequest
from epd_serve.models.audio_processor import AudioProcessor, UnpaddedAudio
from epd_serve.models.families.qwen3_asr import TOWER
from epd_serve.models.families.qwen_omni import QwenOmni
from epd_serve.models.families.qwen_vl import QwenVL
from epd_serve.models.family import Family, TowerInputs, names
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from torch import Tensor


class Qwen3Omni(QwenOmni):
    """Images, videos as one run of tokens, and audio of any length; only the thinker runs."""

    title = "Qwen3-Omni"
    model_types = ("qwen3_omni_moe_thinker",)
    other_parts = ("talker", "code2wav")
    fields = QwenOmni.fields | names("image_token_id video_token_id audio_token_id")
    towers: ClassVar = {
        "qwen3_omni_moe_vision_encoder": QwenVL.towers["qwen3_vl_moe_vision"],
        "qwen3_omni_moe_audio_encoder": TOWER | names("conv_chunksize max_source_positions"),
    }
    usual_fps = 1.0
    side = 32

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        return UnpaddedAudio(extractor, padded_positions=False)

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
