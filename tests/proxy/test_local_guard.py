"""A gateway without keys on the loopback interface answers no web page."""

import json

CHAT = "/v1/chat/completions"


async def asked(gateway, method, path, headers, body=b""):
    """(status, error code) of the answer to a request with exactly these headers."""
    async with gateway.session.request(
        method, gateway.url + path, data=body, headers=headers, skip_auto_headers=["Content-Type"]
    ) as answer:
        return answer.status, (await answer.json())["error"]["code"] if answer.status >= 400 else ""


JSON = {"content-type": "application/json"}


async def test_only_loopback_names_are_answered(start, kit):
    gateway, body = await start("a0:EPD"), json.dumps(kit.chat()).encode()
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "192.168.0.7", ""):
        for method, path, sent in (("POST", CHAT, body), ("GET", "/v1/models", b""), ("GET", "/", b"")):
            assert await asked(gateway, method, path, {"host": host, **JSON}, sent) == (403, "cross_site")
    assert not gateway["a0"].got("/stage/prefill")
    for host in ("localhost", "LocalHost:1", "127.0.0.1", "127.8.9.10:8000", "[::1]", "[::1]:8000"):
        assert (await asked(gateway, "POST", CHAT, {"host": host, **JSON}, body))[0] == 200
        assert (await asked(gateway, "GET", "/v1/models", {"host": host}))[0] == 200


async def test_bodies_that_pages_may_send_are_refused(start, kit):
    gateway, body = await start("a0:EPD"), json.dumps(kit.chat()).encode()
    form = "application/x-www-form-urlencoded", "multipart/form-data; boundary=b"
    for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize"):
        for kind in ("text/plain", "text/json", *form):
            headers = {"content-type": kind, "origin": "https://evil.example"}
            assert await asked(gateway, "POST", path, headers, body) == (415, "unsupported_media_type")
        assert await asked(gateway, "POST", path, {}, body) == (415, "unsupported_media_type")
    assert not gateway["a0"].got("/stage/prefill")
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await asked(gateway, "POST", CHAT, headers, body))[0] == 200


async def test_forms_of_other_origins_are_refused(start):
    gateway = await start("a0:EPD")
    path, form = "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=b"}
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        assert await asked(gateway, "POST", path, form | {"origin": origin}, b"--b--") == (403, "cross_site")
    own = gateway.url.removesuffix("/")
    for headers in (form, form | {"origin": own}):
        status, code = await asked(gateway, "POST", path, headers, b"--b--")
        assert status == 400 and code != "cross_site"


async def test_with_a_key_any_name_is_answered(start, kit):
    gateway = await start("a0:EPD", api_key="a-key-of-sixteen-bytes")
    headers = {"host": "api.example.com", "authorization": "Bearer a-key-of-sixteen-bytes"}
    assert (await asked(gateway, "POST", CHAT, headers, json.dumps(kit.chat()).encode()))[0] == 200


async def test_pages_of_named_origins_may_ask(start, kit):
    gateway = await start("a0:EPD", cors=("https://a.example", "http://b.example:3000"), api_key="k")
    url, session, key = gateway.url + CHAT, gateway.session, {"authorization": "Bearer k"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origin, may in (("https://a.example", 1), ("http://b.example:3000", 1), ("https://c.example", 0)):
        allowed = origin if may else None
        async with session.options(url, headers={"origin": origin, **ask}) as answer:
            assert (answer.status == 200) == may
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert not may or "authorization" in answer.headers["access-control-allow-headers"]
        for stream in (False, True):
            async with gateway.post(kit.chat(stream=stream), headers={**key, "origin": origin}) as answer:
                assert answer.status == 200
                assert answer.headers.getall("access-control-allow-origin", []) == [origin] * may
        async with gateway.post(kit.chat(), headers={"origin": origin}) as answer:
            assert (answer.status, answer.headers.get("access-control-allow-origin")) == (401, allowed)
    plain = await start("a0:EPD")
    async with plain.post(kit.chat(), headers={"origin": "https://a.example"}) as answer:
        assert answer.status == 200 and "access-control-allow-origin" not in answer.headers
    async with plain.session.options(plain.url + CHAT, headers={"origin": "https://a.example", **ask}) as answer:
        assert answer.status == 405
