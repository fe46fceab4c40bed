"""No key, no password, no picture and no prompt in any log or error of a session in which much goes wrong."""

import asyncio
import contextlib
import io
import logging

import aiohttp
import pytest
from gateway_settings import admin_plane

from epd_serve.config.keys import new_key

PROMPT = "the-prompt-about-aunt-Agatha"
ADMIN = "the-admin-password"


@pytest.fixture
def log():
    """All that is logged, down to DEBUG, as a handler of anybody's would print it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield stream
    root.setLevel(level)
    root.removeHandler(handler)


async def test_a_session_shows_no_secret(start, kit, log):
    right, wrong = "plain-and-short", new_key()[0]
    picture = kit.data_url(kit.picture())
    payload = picture.partition(",")[2]
    gateway = await start("e0:E", "p0:P", "d0:D", api_key=right, admin=admin_plane(key=ADMIN), restart="never")
    secrets = [right, wrong, payload, payload[:60], PROMPT, ADMIN, "s3cret-password"]
    answers: list[bytes] = []

    async def ask(body, key=right, path="/v1/chat/completions", scheme="Bearer "):
        headers = {"authorization": scheme + key}
        async with gateway.post(body, path, headers=headers) as response:
            with contextlib.suppress(aiohttp.ClientPayloadError):  # a stream that breaks off
                async for chunk in response.content.iter_any():
                    answers.append(chunk)

    chat = kit.chat(picture)
    chat["messages"][0]["content"][1]["text"] = PROMPT
    await ask(chat)
    await ask(chat, key=wrong)
    await ask(chat, key=right + "x", scheme="Basic ")
    await ask(b'{"messages": [' + PROMPT.encode())
    await ask(chat | {"stop": [PROMPT] * 20})
    await ask(kit.chat("http://alice:s3cret-password@127.0.0.1:1/x.png"))
    await ask(kit.chat(picture[:-8] + "!!!!"))
    await ask({"prompt": PROMPT, "suffix": PROMPT}, path="/v1/completions")
    for failing in ([kit.DIE], kit.fail(500, "it broke"), [kit.NONE, kit.FIRST, kit.DIE]):
        gateway["p0"].scripts["/stage/prefill"] = lambda _, script=failing: script
        for stream in (False, True):
            await ask(chat | {"stream": stream})
    async with gateway.session.get(
        f"{gateway.app.state.admin_url}/instances", headers={"authorization": f"Bearer {ADMIN}"}
    ) as response:
        answers.append(await response.read())
    for path in ("/metrics", "/health"):
        async with gateway.session.get(gateway.url + path) as response:
            answers.append(await response.read())
    await asyncio.sleep(0)
    text = log.getvalue()
    for secret in secrets:
        assert secret not in text, secret
        for answer in answers:
            assert secret.encode() not in answer, (secret, answer)
