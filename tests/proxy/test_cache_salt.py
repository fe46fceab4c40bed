"""Requests with a ``cache_salt`` share neither cached prefixes nor encoded pictures with others."""

import pytest

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES])
async def test_the_salt_reaches_the_prompt_and_its_pictures(start, kit, path):
    gateway = await start("epd0:EPD")
    image = kit.data_url(kit.picture())
    parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": "What is it?"}]
    body = {
        CHAT: kit.chat(image),
        COMPLETION: {"prompt": "once"},
        RESPONSES: {"input": [{"role": "user", "content": parts}]},
    }[path]
    for salt in (None, "a", "a", "b"):
        await gateway.answer({**body, "cache_salt": salt}, path)
    asked = gateway["epd0"].got("/stage/prefill")[-4:]
    assert [message.prompting.cache_salt for message in asked] == ["", "a", "a", "b"]
    if path != COMPLETION:
        names = [message.items[0].mm_hash for message in asked]
        assert names[1] == names[2] and len(set(names)) == 3
        assert {len(name) for name in names} == {64}
