"""Reasons for model families that the native engine cannot run. Does not import torch."""

from __future__ import annotations

_CROSS = "its decoder uses cross-attention to its encoder"
_LATENT = "its KV is latent"
_CHOSEN = "its layers use sparse attention"
_NO_FEATURES = "transformers lacks a function that returns only its features"
_HEARS = "each token of its answer consumes a piece of audio"
_OTHER = "its answer is not autoregressive text"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


#: Reason by ``model_type``; other families without a file in epd_serve/models/families are refused by name.
NOT_RUN = {
    "internvl_chat": "it is not in transformers' format; use the checkpoint whose name ends with -hf",
    **_each("blip evolla idefics mllama", _CROSS),
    **_each("canary cohere_asr dia florence2 moonshine moonshine_streaming pix2struct pop2piano", _CROSS),
    **_each("pp_formulanet seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5", _CROSS),
    **_each("t5gemma2 udop vision-encoder-decoder whisper", _CROSS),
    **_each("deepseek_v2 deepseek_v3 dots3_note glm5_next kimi_k25 mistral4 mistral_large4", _LATENT),
    "qwen4_exp": _CHOSEN,
    **_each("git kosmos-2.5 phi4_multimodal", _NO_FEATURES),
    **_each("kyutai_speech_to_text voxtral_realtime", _HEARS),
    **_each("diffusion_gemma pi0 shieldgemma2 vibevoice", _OTHER),
}
