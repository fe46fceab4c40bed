"""``usage``: the tokens of the prompt that P found in its prefix cache, as P itself counts them."""

import re

import pytest
import tiny_models
from in_process import deployment

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = "apple banana cherry " * 12
CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
PATHS = (CHATS, COMPLETIONS, RESPONSES, MESSAGES)


def asked(path, text, **fields):
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    chat = {"messages": [{"role": "user", "content": text}]}
    prompt = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}.get(path, chat)
    return {**prompt, limit: 3, "temperature": 0, **fields}


def cached(usage):
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


async def hits(api, prefill):
    """P's counter; of the gateway for ""."""
    url = api.instances[prefill].url if prefill else api.url
    async with api.session.get(f"{url}/metrics") as response:
        return int(float(re.findall(r"^\S*prefix_cache_hits_total\S* (\S+)$", await response.text(), re.M)[0]))


async def streamed_usage(api, path, body):
    options = {"stream_options": {"include_usage": True}} if path in (CHATS, COMPLETIONS) else {}
    events = await api.events(path, {**body, **options})
    last = events[-2 if path == MESSAGES else -1]  # message_delta, then message_stop
    return last["response"]["usage"] if path == RESPONSES else last["usage"]


@pytest.mark.parametrize("roles", [("EPD",), ("EP", "D")])
async def test_each_api_counts_them(tmp_path, roles):
    p = f"{roles[0].lower()}0"
    async with deployment(tiny_models.make_tiny_model("qwen2_5_vl", tmp_path / "model"), *roles) as running:
        for path in PATHS:
            for number, text in enumerate((f"{path} {LONG}", f"{path} {LONG} so?", f"{path} {LONG} so?", path)):
                before = await hits(running, p)
                body = asked(path, text)
                status, answer = await running.post(path, body)
                assert status == 200, answer
                found = await hits(running, p) - before
                assert cached(answer["usage"]) == found
                assert (found > 0) == (number in (1, 2))
                again = await streamed_usage(running, path, body)
                assert cached(again) == await hits(running, p) - before - found
        several = asked(COMPLETIONS, "", prompt=[LONG, LONG + "so?"], n=2)
        await running.post(COMPLETIONS, several)
        before = await hits(running, p)
        _, answer = await running.post(COMPLETIONS, several)
        assert cached(answer["usage"]) == await hits(running, p) - before > 0
        assert await hits(running, "") == await hits(running, p)
        await running.settle()
