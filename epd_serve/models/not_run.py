"""Families of models that the native engine does not run, each with the reason. Without torch."""

from __future__ import annotations

_CROSS = "its decoder reads what its encoder makes by cross-attention"
_LATENT = "its KV is latent"
_CHOSEN = "its layers choose the tokens that they attend to"
_NO_FEATURES = "transformers has no function that makes its features alone"
_HEARS = "each token of its answer comes with a piece of the sound"
_OTHER = "its answer is no text of one token after the other"
_NO_FILE = "it has no file in epd_serve/models/families yet"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


#: The reason by ``model_type``: all families with media that transformers has, and others that are well known.
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
    **_each(
        "aria blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2", _NO_FILE
    ),
    **_each("deepseek_vl deepseek_vl_hybrid emu3 ernie4_5_vl_moe exaone4_5 fast_vlm fun_asr_nano fuyu", _NO_FILE),
    **_each("gemma3n glm_ocr glmasr glmga got_ocr2 granite4_vision granite_docling", _NO_FILE),
    **_each("granite_speech granite_speech_plus hunyuan_vl hyperclovax_vision_v2 idefics2 inkling2", _NO_FILE),
    **_each("inkling_mm_model instructblip instructblipvideo janus kosmos-2 lfm3_vl lighton_ocr", _NO_FILE),
    **_each("llava_next_video minicpm_ocr minicpmv4_7 minimax_m3_vl molmo2 moss_transcribe_diarize", _NO_FILE),
    **_each("muse_glimmer muse_spark nemo_speechlm nemotron_h_omni ovis2 paddleocr_vl perception_lm", _NO_FILE),
    **_each("pp_chart2table qianfan_ocr step3p7 unlimited_ocr vibevoice_asr video_llama_3 video_llava", _NO_FILE),
    "vipllava": _NO_FILE,
}
