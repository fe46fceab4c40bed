"""The registry: one class for each family, found without torch; layouts of items with text between their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from tiny_families import TINY
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from epd_serve.demo import weights_dir
from epd_serve.instance.text.prompt import MediaLayouts
from epd_serve.models.families import FAMILIES, TEXT
from epd_serve.models.family import Family, Size
from epd_serve.protocol.wire import MediaRef


def test_a_model_type_is_of_one_family() -> None:
    towers = [(name, tower) for name, families in FAMILIES.items() for one in families for tower in one.towers]
    assert {tiny.model_type for tiny in TINY.values()} <= set(FAMILIES)
    assert set(Counter(towers).values()) == {1}
    assert set(TEXT) == set(tiny_models.TEXT_KINDS)


class Rows(Family):
    """Rows of three tokens, each with text before it."""

    def parts(self, size: Size) -> Sequence[int | str]:
        return [part for row in range(size[1] // 10) for part in (f"{self.before}row {row}", 3)]

    before = "<|vision_start|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(weights_dir())


def family(tokenizer: Any) -> Rows:
    return Rows(SimpleNamespace(image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>")), None)


def test_an_item_may_have_several_runs_of_rows(tokenizer: Any) -> None:
    layouts = MediaLayouts(family(tokenizer), tokenizer)
    layout = layouts.of(MediaRef("a", 5, 30))
    text = "".join(f"<|vision_start|>row {row}" + "<|image_pad|>" * 3 for row in range(3))
    assert layout.ids == tokenizer.encode(text, add_special_tokens=False)
    assert [(length, offset) for _, length, offset in layout.runs] == [(3, 0), (3, 3), (3, 6)]
    image = family(tokenizer).token_ids["image"]
    places = [begin + row for begin, length, _ in layout.runs for row in range(length)]
    assert places == [place for place, token in enumerate(layout.ids) if token == image]
    assert layouts.of(MediaRef("b", 5, 30)) is layout, "made once"


def test_text_that_grows_together_with_the_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space and a word are one token in most vocabularies."""
    monkeypatch.setattr(Rows, "before", "")
    core = Tokenizer(BPE({"a": 0, "r": 1, "\u0120": 2, "\u0120r": 3}, [("\u0120", "r")]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.add_special_tokens(["<|image_pad|>"])
    merging = PreTrainedTokenizerFast(tokenizer_object=core)
    with pytest.raises(ValueError, match="differently within a text than alone"):
        MediaLayouts(family(merging), merging)
