"""The families that the native engine runs, by ``model_type`` of their config.json; without torch."""

QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
LLAVA = ("llava",)
NATIVE = (*QWEN_VL, *LLAVA)
#: Their experts are not split over several devices.
MIXTURES_OF_EXPERTS = ("qwen3_vl_moe",)
