"""Log-probabilities are of the tokens that the text consists of, with their bytes; and of a prompt's."""

import pytest
from chat import chat
from reference import logprobs_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: What a random model says at this temperature is full of fragments of characters.
WILD = {"temperature": 1.6, "max_tokens": 40, "ignore_eos": True}


async def chats(api, **fields):
    """Content and listed tokens, in one piece and streamed."""
    body = {**chat("What is this?"), "logprobs": True, "top_logprobs": 3, **WILD, **fields}
    status, answer = await api.post("/v1/chat/completions", body)
    assert status == 200, answer
    whole = answer["choices"][0]
    pieces = [event["choices"][0] for event in await api.events("/v1/chat/completions", body)]
    text = ""
    listed = []
    for piece in pieces:
        text += piece["delta"]["content"]
        listed += piece["logprobs"]["content"]
        told = b"".join(bytes(token["bytes"]) for token in listed)
        assert text in told.decode(errors="replace")  # none comes after its text
    assert text == whole["message"]["content"]
    assert [token["bytes"] for token in listed] == [t["bytes"] for t in whole["logprobs"]["content"]]
    return text, listed, answer["usage"]["completion_tokens"]


async def completions(api, **fields):
    body = {"prompt": "one two three", "logprobs": 3, **WILD, **fields}
    status, answer = await api.post("/v1/completions", body)
    assert status == 200, answer
    whole = answer["choices"][0]
    pieces = [event["choices"][0] for event in await api.events("/v1/completions", body)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name in ("tokens", "text_offset"):
        assert [one for piece in pieces for one in piece["logprobs"][name]] == whole["logprobs"][name]
    return whole["text"], whole["logprobs"], answer["usage"]


@pytest.mark.parametrize("seed", range(4))
async def test_the_bytes_of_the_tokens_are_the_message(api, seed):
    text, listed, count = await chats(api, seed=seed)
    assert b"".join(bytes(token["bytes"]) for token in listed).decode(errors="replace") == text
    fragments = [token for token in listed if token["token"].startswith("bytes:\\x")]
    assert fragments and len(listed) <= count
    for token in listed:
        if token not in fragments:
            assert token["token"].encode() == bytes(token["bytes"])
        assert max(top["logprob"] for top in token["top_logprobs"]) == token["top_logprobs"][0]["logprob"]


async def test_no_token_is_listed_that_is_not_in_the_message(api):
    text, _, _ = await chats(api, seed=1)
    place = next(i for i in range(8, 30) if "\ufffd" not in text[i - 2 : i + 4])
    for stop in (text[place], text[place : place + 3]):
        cut, kept, count = await chats(api, seed=1, stop=stop)
        assert cut == text[: text.find(stop)] and count >= len(kept)
        told = b"".join(bytes(token["bytes"]) for token in kept).decode(errors="replace")
        assert told.startswith(cut)
        last = len(bytes(kept[-1]["bytes"]).decode(errors="replace"))
        assert len(told) - len(cut) < last  # of a token that is cut in its middle a part is in the message
    shown, kept, _ = await chats(api, seed=1, stop=text[place], include_stop_str_in_output=True)
    assert b"".join(bytes(token["bytes"]) for token in kept).decode(errors="replace") == shown


@pytest.mark.parametrize("seed", range(3))
async def test_completions_tell_fragments_apart_and_where_tokens_begin(api, seed):
    text, told, _ = await completions(api, seed=seed)
    assert any(token.startswith("bytes:\\x") for token in told["tokens"])
    for token, own, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert 3 <= len(top) <= 4 and top[token] == own
    assert told["text_offset"] == sorted(told["text_offset"]) and told["text_offset"][-1] < len(text)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


@pytest.fixture(scope="session")
def reference(api):
    return logprobs_of(next(iter(api.instances.values())).options.model)


@pytest.mark.parametrize(("max_tokens", "n"), [(0, 2), (1, 1), (5, 2)])
async def test_echo_tells_the_prompts_log_probabilities(api, reference, max_tokens, n):
    """As evaluators ask: context and continuation as tokens, and as much as one token of an answer."""
    _, tokenized = await api.post("/tokenize", {"prompt": "one two three ✓ four " * 6})
    prompt = tokenized["tokens"]
    expected = reference(prompt)
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "n": n}
    status, answer = await api.post("/v1/completions", body)
    assert status == 200, answer
    plain = {"prompt": prompt, "max_tokens": max(max_tokens, 1), "temperature": 0}
    _, alone = await api.post("/v1/completions", plain)
    pieces = [event["choices"][0] for event in await api.events("/v1/completions", body)]
    assert answer["usage"]["completion_tokens"] == n * max_tokens
    for choice in answer["choices"]:
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(prompt) + max_tokens
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        own = [float(expected[i - 1, prompt[i]]) for i in range(1, len(prompt))]
        assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(own, abs=1e-3)
        for i in range(1, len(prompt)):
            best = max(told["top_logprobs"][i].values())
            assert best == pytest.approx(float(expected[i - 1].max()), abs=1e-3)
        answered = alone["choices"][0]["text"] if max_tokens else ""
        assert choice["text"] == "one two three ✓ four " * 6 + answered
        assert told["text_offset"][-1] <= len(choice["text"])
        assert choice["finish_reason"] == "length"
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        streamed = [one for piece in mine for one in piece["logprobs"]["tokens"]]
        assert streamed == told["tokens"]
    await api.settle()
