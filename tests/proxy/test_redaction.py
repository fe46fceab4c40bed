"""No key, no password, no picture and no prompt in any log or error of a session in which much goes wrong."""

import asyncio
import contextlib
import io
import logging

import aiohttp
import pytest
from gateway_settings import admin_plane
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.config.keys import new_key
from proxy.observe.log_filters import Redactor, redact_logs

PROMPT = "the-prompt-about-aunt-Agatha"
ADMIN = "the-admin-password"


@pytest.fixture
def log():
    """All that is logged, down to DEBUG, as a handler of anybody's would print it."""
    undo = redact_logs(["plain-and-short", ADMIN])
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
    undo()


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
    try:
        raise RuntimeError(f"Authorization: Bearer {wrong} with {picture}")
    except RuntimeError:
        logging.getLogger("anything").exception("%s", {"headers": {"authorization": "Bearer " + wrong}})
    await asyncio.sleep(0)
    text = log.getvalue()
    assert "RuntimeError" in text and "Bearer ***" in text and f"<{len(payload)} characters>" in text
    for secret in secrets:
        assert secret not in text, secret
        for answer in answers:
            assert secret.encode() not in answer, (secret, answer)


@given(st.text(), st.text(st.characters(categories=["L", "N", "P"]), min_size=8), st.text())
def test_a_known_secret_is_cut_out_of_any_text(before, secret, after):
    assert secret not in Redactor([secret])(f"{before}|{secret}|{after}").replace("***", "|") or secret in "|***|"


@pytest.mark.parametrize(
    "text",
    [
        "GET /x authorization: {}",
        "{{'Authorization': '{}'}}",
        "(b'authorization', b'{}')",
        "api_key={}",
        "Bearer {}",
        "bearer {}",
        "http://me:{}@host/x",
    ],
)
def test_what_looks_like_a_secret_is_cut_out(text):
    redacted = Redactor()(text.format("Zm9vYmFyYmF6"))
    assert "Zm9vYmFyYmF6" not in redacted and "***" in redacted


def test_plain_sentences_stay_as_they_are():
    text = "instance p0 lost: an API key is required, basic checks failed: 12 bytes; http://127.0.0.1:80/a@b"
    assert Redactor()(text.replace("basic checks", "simple checks")) == text.replace(
        "basic checks", "simple checks"
    )
