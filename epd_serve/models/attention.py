"""The hook by which a transformers vision tower attends with the device's operators."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from device.base import AttentionOps


class TowerAttention:
    """An attention function in transformers' convention over ``ops.encode``; one for each tower.

    Its name has "flash" in it: transformers then hands over all images of a batch at once with their borders,
    instead of looping over them.
    """

    def __init__(self, ops: AttentionOps) -> None:
        self.name = f"epd_flash_{id(self):x}"
        self._ops = ops
        self._borders: Any = WeakTensorKeyDictionary()
        ALL_ATTENTION_FUNCTIONS.register(self.name, self)

    def install(self, tower: nn.Module) -> None:
        """Let every attention layer of the tower call this function."""
        for module in tower.modules():
            config: Any = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = self.name

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Query, key and value [B, H, T, D]; borders of segments [S + 1] where B is 1, else each row is a segment.

        Returns:
            [B, T, H, D] and no weights.
        """
        assert attention_mask is None, "the towers of the known families mask nothing"
        batch, heads, length, head_dim = query.shape
        if cu_seq_lens_q is None:
            borders = list(range(0, batch * length + 1, length))
        else:
            borders = self.borders(cu_seq_lens_q)
        scale = head_dim**-0.5 if scaling is None else scaling
        # transformers has swapped tokens and heads: for one row this only swaps them back
        query, key, value = (
            states.transpose(1, 2).reshape(batch * length, heads, head_dim) for states in (query, key, value)
        )
        output = self._ops.encode(query, key, value, borders, scale)
        return output.view(batch, length, heads, head_dim), None

    def borders(self, borders: Tensor) -> list[int]:
        """Borders of segments, on the host. All layers get the same tensor: it is read back once."""
        if borders not in self._borders:
            self._borders[borders] = borders.tolist()
        host: list[int] = self._borders[borders]
        return host
