"""Fields that choose tokens or shape the text: each does what it says, in one piece and streamed."""

import pytest
from chat import chat
from pictures import noise
from PIL import Image

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY = {"temperature": 0, "max_tokens": 8}


async def completion(api, prompt="one two three", **fields):
    status, answer = await api.post("/v1/completions", {"prompt": prompt, **GREEDY, **fields})
    assert status == 200, answer
    return answer


async def tokens_of(api, text):
    _, answer = await api.post("/tokenize", {"prompt": text})
    return answer["tokens"]


async def test_a_bias_of_100_forces_and_of_minus_100_forbids(api):
    [forced] = await tokens_of(api, "Q")
    answer = await completion(api, logit_bias={str(forced): 100})
    assert answer["choices"][0]["text"] == "Q" * 8
    letters = [token for letter in "QRST" for token in await tokens_of(api, letter)]
    free = (await completion(api, allowed_token_ids=letters))["choices"][0]["text"]
    [first] = await tokens_of(api, free[0])
    other = await completion(api, allowed_token_ids=letters, logit_bias={str(first): -100})
    assert free[0] not in other["choices"][0]["text"] and len(other["choices"][0]["text"]) == 8


async def test_the_stop_string_stays_where_that_is_asked(api):
    free = (await completion(api, max_tokens=16))["choices"][0]["text"]
    stop = free[4:6]
    cut = (await completion(api, max_tokens=16, stop=stop))["choices"][0]
    kept = (await completion(api, max_tokens=16, stop=stop, include_stop_str_in_output=True))["choices"][0]
    assert kept["text"] == cut["text"] + stop and cut["finish_reason"] == kept["finish_reason"] == "stop"
    body = {
        "prompt": "one two three",
        **GREEDY,
        "max_tokens": 16,
        "stop": stop,
        "include_stop_str_in_output": True,
    }
    streamed = await api.events("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in streamed) == kept["text"]


async def test_echo_repeats_the_prompt(api):
    plain = (await completion(api))["choices"][0]["text"]
    echoed = await completion(api, echo=True, n=2)
    assert [c["text"] for c in echoed["choices"]] == ["one two three" + plain] * 2
    streamed = await api.events("/v1/completions", {"prompt": "one two three", **GREEDY, "echo": True})
    assert "".join(e["choices"][0]["text"] for e in streamed) == "one two three" + plain


async def test_several_prompts_are_answered_as_each_by_itself(api):
    prompts = ["one two three", "apple", [40, 41, 42]]
    alone = [(await completion(api, prompt)) for prompt in prompts]
    together = await completion(api, prompts, n=2)
    texts = [choice["text"] for choice in together["choices"]]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert texts == [one["choices"][0]["text"] for one in alone for _ in range(2)]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert together["usage"]["completion_tokens"] == 2 * sum(one["usage"]["completion_tokens"] for one in alone)
    options = {"stream_options": {"include_usage": True}}
    streamed = await api.events("/v1/completions", {"prompt": prompts, "n": 2, **GREEDY, **options})
    assert streamed[-1]["usage"] == together["usage"] and streamed[-1]["choices"] == []
    assert len({event["id"] for event in streamed}) == 1
    joined = [""] * 6
    for event in streamed[:-1]:
        joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert joined == texts


async def test_the_last_message_is_continued(api):
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "The word is"}]
    body = {"messages": messages, "continue_final_message": True, **GREEDY}
    _, continued = await api.post("/v1/chat/completions", body)
    _, counted = await api.post("/tokenize", {"messages": messages, "continue_final_message": True})
    raw = await completion(api, counted["tokens"])
    assert continued["choices"][0]["message"]["content"] == raw["choices"][0]["text"]


async def test_images_may_stand_anywhere_in_a_long_chat(api):
    first, second = noise(1), noise(2)
    picture = chat("x", first)["messages"][0]["content"][0]
    other = chat("x", second)["messages"][0]["content"][0]
    text = {"type": "text", "text": "and this?"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text, picture]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [other, text, picture]},
    ]
    status, answer = await api.post("/v1/chat/completions", {"messages": messages, **GREEDY})
    assert status == 200
    streamed = await api.events("/v1/chat/completions", {"messages": messages, **GREEDY})
    content = "".join(event["choices"][0]["delta"]["content"] for event in streamed)
    assert content == answer["choices"][0]["message"]["content"]
    swapped = [*messages[:3], {"role": "user", "content": [picture, text, other]}]
    _, moved = await api.post("/v1/chat/completions", {"messages": swapped, **GREEDY, "logprobs": True})
    _, still = await api.post("/v1/chat/completions", {"messages": messages, **GREEDY, "logprobs": True})
    assert moved["usage"]["prompt_tokens"] == still["usage"]["prompt_tokens"]
    first, other_first = (one["choices"][0]["logprobs"]["content"][0] for one in (moved, still))
    assert first["logprob"] != pytest.approx(other_first["logprob"], abs=1e-3)


async def test_low_detail_reads_the_picture_scaled_down(api):
    """As if the client had scaled it: the same size, and its own entry in the caches."""
    large = Image.effect_mandelbrot((1024, 64), (-2, -1, 1, 1), 50).convert("RGB")
    fields = {**GREEDY, "max_tokens": 1, "logprobs": True}

    async def first_token(picture, detail):
        body = chat("What is it?", picture)
        body["messages"][0]["content"][0]["image_url"]["detail"] = detail
        status, answer = await api.post("/v1/chat/completions", {**body, **fields})
        assert status == 200, answer
        return answer["usage"]["prompt_tokens"], answer["choices"][0]["logprobs"]["content"][0]["logprob"]

    low, high = await first_token(large, "low"), await first_token(large, "high")
    scaled = await first_token(large.resize((512, 32), Image.Resampling.BICUBIC), "auto")
    assert low == pytest.approx(scaled, abs=1e-4) and low != pytest.approx(high, abs=1e-3)
