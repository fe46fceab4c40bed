"""The cache argument of a module that keeps a recurrent state."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

from epd_serve.models.recurrent_states import cache_argument


def test_the_cache_has_the_name_that_transformers_gives_it() -> None:
    """transformers 5.24 has a new one, and decorates the old one's function."""

    class Module(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, cache_params: object = None) -> None:
            raise NotImplementedError

    module = Module()
    assert cache_argument(module) == "cache_params"

    def newer(hidden_states: torch.Tensor, cache: object = None) -> None:
        raise NotImplementedError

    module.forward = wraps(newer)(lambda *args, **kwargs: newer(*args, **kwargs))
    assert cache_argument(module) == "cache"
    module.forward = lambda hidden_states: None
    with pytest.raises(ValueError, match=r"Module of transformers 5\.\d+.* takes no cache, cache_params"):
        cache_argument(module)
