"""Why the native engine cannot run some model families as it runs others. Without torch."""

from __future__ import annotations

_CROSS = "its decoder reads what its encoder makes by cross-attention"
_LATENT = "its KV is latent"
_CHOSEN = "its layers choose the tokens that they attend to"
_NO_FEATURES = "transformers has no function that makes its features alone"
_HEARS = "each token of its answer comes with a piece of the sound"
_OTHER = "its answer is no text of one token after the other"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


#: The reason by ``model_type``; any other family that has no file in epd_serve/models/families is refused by name.
NOT_RUN = {
    "internvl_chat": "it is in another format than transformers'; take the checkpoint whose name ends with -hf",
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
