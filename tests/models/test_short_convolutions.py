"""Short convolutions: the tokens of ``generate`` in chunks of any size and in a pool that is too small."""

from __future__ import annotations

from functools import wraps
from pathlib import Path

import pytest
import tiny_models
import torch
from engine_bench import BLOCK_SIZE, EngineBench
from reference import Reference

from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.models.recurrent_states import cache_argument
from epd_serve.sched.schedule import Budget

QUESTIONS = ("Say apple", "What is this?", "Repeat: " + "apple banana " * 6, "What is 2 + 3?")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("lfm2", tmp_path_factory.mktemp("model") / "lfm2")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    reference = Reference(path)
    answers = [reference.generate(text, max_tokens=MAX_TOKENS) for text in QUESTIONS]
    assert all(len(set(answer[:10])) >= 5 for answer in answers), "answers that say little"
    return answers


@pytest.mark.parametrize("num_tokens", [1, 7, 2048])
@pytest.mark.parametrize("is_small", [False, True], ids=["room", "preempted"])
def test_tokens_are_those_of_generate(
    path: Path, expected: list[list[int]], num_tokens: int, is_small: bool
) -> None:
    bench = EngineBench(path, Budget(max_num_tokens=num_tokens, max_num_seqs=8))
    sequences = [bench.sequence(text, text, [], max_tokens=MAX_TOKENS) for text in QUESTIONS]
    if is_small:
        longest = max(num_blocks_for(s.num_prompt_tokens + s.max_tokens, BLOCK_SIZE) for s in sequences)
        bench.shrink(longest + 2 + 2 * bench.pool.state_blocks)
    for sequence in sequences:
        bench.engine.submit(sequence)
    answers = bench.collect(len(sequences))
    assert [answers[text, 0] for text in QUESTIONS] == expected
    assert bench.pool.state_blocks > 0
    if is_small and num_tokens > 1:
        assert bench.num_preemptions > 0
    bench.check_idle()
    bench.close()


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
