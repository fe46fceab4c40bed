"""No key, no password, no picture and no prompt in any log or error of a session in which much goes wrong."""

import contextlib
import logging

import aiohttp
from gateway_settings import admin_plane

from epd_serve.config.keys import new_key

PROMPT = "the-prompt-about-aunt-Agatha"
ADMIN = "the-admin-password"


async def test_a_session_shows_no_secret(start, kit, caplog):
    caplog.set_level(logging.DEBUG)
    right, wrong = "plain-and-short", new_key()[0]
    picture = kit.data_url(kit.picture())
    payload = picture.partition(",")[2]
    gateway = await start("e0:E", "p0:P", "d0:D", api_key=right, admin=admin_plane(key=ADMIN), restart="never")
    secrets = [right, wrong, payload, payload[:60], PROMPT, ADMIN, "s3cret-password"]
    answers = []

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
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with gateway.session.get(f"{gateway.app.state.admin_url}/instances", headers=headers) as response:
        answers.append(await response.read())
    answers += [(await gateway.text(path)).encode() for path in ("/metrics", "/health")]
    assert caplog.text
    for text in (caplog.text.encode(), *answers):
        assert not [secret for secret in secrets if secret.encode() in text], text
