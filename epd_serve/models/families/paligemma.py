"""PaliGemma, PaliGemma 2: one size for every picture; all of a prompt with a picture attends both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from epd_serve.models.family import PATCH_TOWER, TEXT, Family, Size, names
from epd_serve.protocol.wire import MediaRef

if TYPE_CHECKING:
    from torch import Tensor

_TEXT = TEXT | names("head_dim rms_norm_eps attention_bias use_bidirectional_attention")


class PaliGemma(Family):
    """One size for every picture, before the prompt, which attends both ways; positions begin with 1."""

    title = "PaliGemma, PaliGemma 2"
    model_types = ("paligemma",)
    decoder = "generic"
    texts: ClassVar = {
        "gemma": _TEXT | {"hidden_act"},
        "gemma2": _TEXT
        | names("hidden_activation query_pre_attn_scalar sliding_window layer_types")
        | names("final_logit_softcapping attn_logit_softcapping"),
    }
    fields = names("image_token_index projection_dim hidden_size vocab_size tie_word_embeddings")
    towers: ClassVar = {"siglip_vision_model": PATCH_TOWER | {"vision_use_head"}}
    both_ways_prompts = True
    #: What its processor makes of a text: pictures, the beginning, the text and the end of a line.
    chat_template = (
        "{%- for message in messages if message.content is not string %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}{{ bos_token }}"
        "{%- for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
        "{% endfor %}{{ '\\n' }}"
    )

    def __init__(self, config: Any, image_processor: Any) -> None:
        super().__init__(config, image_processor)
        vision = config.vision_config
        self.both_ways_tokens = (vision.image_size // vision.patch_size) ** 2

    def parts(self, size: Size) -> Sequence[int | str]:
        return (self.both_ways_tokens,)

    def num_pixels(self, size: Size) -> int:
        return int(self.config.vision_config.image_size) ** 2

    def positions(self, ids: Sequence[int], items: Sequence[MediaRef], model: Any) -> tuple[Tensor, int]:
        positions, delta = super().positions(ids, items, model)
        return positions + 1, delta + 1

    def check_pictures(self) -> None:
        text, config = self.config.text_config, self.config
        if config.projection_dim != text.hidden_size:
            raise ValueError(f"projection_dim is {config.projection_dim}; it must be {text.hidden_size}")
        if config.image_token_id >= text.vocab_size:
            raise ValueError(f"image_token_index is {config.image_token_id}, which is not below vocab_size")
        super().check_pictures()
