"""Each sampling field of a request reaches the instance by itself."""

import msgspec
import pytest

from epd_serve.protocol.openai.generation import CompletionRequest
from epd_serve.types import SAMPLING_DEFAULTS, SamplingParams

#: Field of a request → its value, the parameter that it sets, and to what.
FIELDS = {
    "seed": (5, "seed", 5),
    "max_tokens": (17, "max_tokens", 17),
    "min_tokens": (3, "min_tokens", 3),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.25, "min_p", 0.25),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.25, "frequency_penalty", 0.25),
    "stop": ("end", "stop", ("end",)),
    "stop_token_ids": ([4], "stop_token_ids", (4,)),
    "ignore_eos": (True, "ignore_eos", True),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "logprobs": (2, "logprobs", 2),
    "n": (2, "n", 2),
    "include_stop_str_in_output": (True, "include_stop", True),
    "logit_bias": ({"9": 1.5}, "logit_bias", {9: 1.5}),
    "allowed_token_ids": ([3], "allowed_token_ids", (3,)),
    "bad_words": (["no"], "bad_words", ("no",)),
    "priority": (-1, "priority", -1),
    "structured_outputs": ({"regex": "a+"}, "grammar", None),
}
#: Set by the instance, or of chats alone.
OTHERS = {"bad_word_ids", "group", "key", "neutral", "thinking", "thinking_budget"}


def sampling(fields):
    return CompletionRequest.parse(msgspec.json.encode({"prompt": "a", **fields})).sampling(1)


def test_no_parameter_is_without_a_field():
    assert {name for _, name, _ in FIELDS.values()} == set(SamplingParams.__struct_fields__) - OTHERS


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_alone_sets_its_parameter_and_no_other(field):
    value, name, expected = FIELDS[field]
    plain, changed = sampling({}), sampling({field: value})
    if expected is None:
        assert getattr(plain, name) is None and getattr(changed, name) is not None
    else:
        assert getattr(changed, name) == expected != getattr(plain, name)
    assert msgspec.structs.replace(changed, **{name: getattr(plain, name)}) == plain
    assert sampling({field: None}) == plain


@pytest.mark.parametrize(
    ("field", "value"), [*SAMPLING_DEFAULTS.items(), ("top_k", -1), ("temperature", 1), ("presence_penalty", 0)]
)
def test_a_default_that_is_asked_for_is_told_from_one_that_is_left_open(field, value):
    asked = sampling({field: value})
    assert asked.neutral == (field,)
    assert msgspec.structs.replace(asked, neutral=()) == sampling({})
