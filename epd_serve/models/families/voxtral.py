"""Voxtral: a sound of any length is one run; its tower computes blocks of 30 seconds, padding among them."""

from __future__ import annotations

from typing import Any, ClassVar

from epd_serve.models.audio_processor import AudioProcessor, LongAudio
from epd_serve.models.family import AUDIO_TOWER, Family, SoundFamily, TowerInputs, names


class Voxtral(SoundFamily):
    """Whisper's tower over blocks of 30 seconds, four positions of which are a row; plain rotary positions."""

    title = "Voxtral"
    model_types = ("voxtral",)
    fields = names("audio_token_id projector_hidden_act hidden_size tie_word_embeddings")
    towers: ClassVar = {
        "voxtral_encoder": AUDIO_TOWER
        | names("hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size")
    }

    @staticmethod
    def read_audio(extractor: Any, config: Any) -> AudioProcessor:
        return LongAudio(extractor, padded_positions=True)

    @staticmethod
    def features(model: Any, inputs: TowerInputs) -> Any:
        output = Family.features(model, inputs)
        output.pooler_output = output.pooler_output.unflatten(0, (len(inputs["input_features"]), -1))
        return output

    def check(self) -> None:
        super().check()
        audio = self.config.audio_config
        if audio.intermediate_size != 4 * audio.hidden_size:
            raise ValueError(
                f"audio_config.intermediate_size is {audio.intermediate_size}; it must be 4 times hidden_size, "
                f"{audio.hidden_size}, as four positions are joined into one row"
            )
