"""The families that the native engine runs, by ``model_type`` of their config.json; without torch."""

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
LLAVA = ("llava",)
#: Language models without a tower.
TEXT = ("llama", "mistral", "qwen2", "qwen3")
NATIVE = (*QWEN_VL, *LLAVA, *TEXT)
#: Their experts are not split over several devices.
MIXTURES_OF_EXPERTS = ("qwen3_vl_moe",)
