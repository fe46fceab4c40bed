"""Instances that are drained, added and removed, limits that change, all under requests that go on."""

from __future__ import annotations

import asyncio
import logging

import pytest
from gateway_settings import admin_plane, changed

from epd_serve.config.gateway import ApiKeyConfig
from epd_serve.config.keys import hash_key
from proxy.admin.reload import Reloader


async def test_a_drained_instance_finishes_what_it_has(start, kit):
    gateway = await start("a0:EPD", "a1:EPD", admin=admin_plane(), restart="never")
    go_on = asyncio.Event()
    for name in ("a0", "a1"):
        gateway[name].scripts["/stage/prefill"] = lambda _: [go_on.wait, kit.NONE, kit.WHOLE]
    running = [asyncio.create_task(gateway.answer(kit.chat())) for _ in range(4)]
    await gateway.until(lambda: len(gateway["a0"].calls) + len(gateway["a1"].calls) == 4)
    before = len(gateway["a0"].calls)

    async def order(what: str) -> tuple[int, dict]:
        async with gateway.session.post(f"{gateway.app.state.admin_url}/admin/instances/{what}") as response:
            return response.status, await response.json()

    status, state = await order("a0/drain")
    assert (status, state["draining"], state["in_flight"]) == (200, True, before)
    go_on.set()
    answers = await asyncio.gather(*running, *(gateway.answer(kit.chat()) for _ in range(4)))
    assert answers == [(200, kit.WHOLE)] * 8
    assert len(gateway["a0"].calls) == before > 0
    status, state = await order("a9/drain")
    assert status == 404 and "there are: a0, a1" in state["error"]["message"]
    await order("a1/drain")
    assert (await gateway.error(kit.chat()))[0] == 503
    assert (await order("a0/undrain"))[1]["draining"] is False
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_instances_come_and_go_without_a_dropped_stream(start, kit):
    gateway = await start("a0:EPD", "a1:EPD")
    both = [("a0", gateway["a0"].url), ("a1", gateway["a1"].url)]
    settings = gateway.app.state.control.settings.now
    gateway.app.state.control.apply(settings, both[:1])
    gateway["a0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, kit.FIRST, 0.4, kit.REST + kit.DONE]
    stream = asyncio.create_task(gateway.answer(kit.chat(stream=True)))
    await gateway.until(lambda: bool(gateway["a0"].calls))
    gateway.app.state.control.apply(settings, both[1:])
    await gateway.until(lambda: gateway.table["a1"].ready)
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)
    assert gateway["a1"].calls and [record.name for record in gateway.table] == ["a1"]
    assert await stream == (200, kit.FIRST + kit.REST + kit.DONE)
    gateway["a1"].scripts["/stage/prefill"] = lambda _: [kit.NONE, kit.FIRST, 0.3, kit.DIE]
    stream = asyncio.create_task(gateway.raw(kit.chat(stream=True)))
    await gateway.until(lambda: len(gateway["a1"].calls) == 2)
    gateway.app.state.control.apply(settings, [])
    assert b'"error"' in await stream, "it dies after it was taken out"
    gateway.app.state.control.apply(settings, both[1:])
    gateway["a1"].scripts.clear()
    await gateway.until(lambda: gateway.table["a1"].ready)
    with pytest.raises(ValueError, match="unique"):
        gateway.app.state.control.apply(settings, [both[0], both[0]])
    assert [record.name for record in gateway.table] == ["a1"]
    assert await gateway.answer(kit.chat()) == (200, kit.WHOLE)


async def test_limits_change_for_the_next_requests(start, kit, caplog):
    gateway = await start("a0:EPD")
    control, members = gateway.app.state.control, [("a0", gateway["a0"].url)]
    before = control.settings.now
    with caplog.at_level(logging.INFO):
        control.apply(changed(before, max_body_bytes=64, routing="round_robin"), members)
    assert "gateway.routing needs another start" in caplog.text
    status, error = await gateway.error(kit.chat())
    assert status == 413 and "64 bytes" in error["message"]
    control.apply(changed(before, request_timeout_s=0.2), members)
    gateway["a0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
    assert (await gateway.error(kit.chat()))[0] == 504


async def test_media_limits_change_for_the_next_requests(start, kit, tmp_path):
    gateway = await start("a0:EPD", media={"allowed_file_dirs": (tmp_path,)})
    control, members = gateway.app.state.control, [("a0", gateway["a0"].url)]
    (tmp_path / "picture.png").write_bytes(kit.picture(20, 20))
    inline, file = kit.data_url(kit.picture(20, 20)), f"file://{tmp_path}/picture.png"
    for urls in ([inline], [file], [inline, file]):
        assert await gateway.answer(kit.chat(*urls)) == (200, kit.WHOLE)
    before = control.settings.now
    for urls, changes, words in (
        ([inline], {"max_pixels": 100}, "at most 100 are accepted"),
        ([inline], {"max_bytes": 10}, "at most 10 are accepted"),
        ([file], {"max_bytes": 10}, "more than 10 bytes"),
        ([inline, file], {"max_items": 1}, "at most 1 are accepted"),
        ([file], {"allowed_file_dirs": ()}, "from the directories that the gateway allows"),
        (["http://127.0.0.1:1/a.png"], {"allowed_domains": ("b.org",)}, "allowed are b.org"),
        (["http://127.0.0.1:1/a.png"], {"allowed_ports": (443,)}, "allowed are 443"),
    ):
        control.apply(changed(before, media=changes), members)
        status, error = await gateway.error(kit.chat(*urls))
        assert status in (400, 413) and words in error["message"]
    control.apply(before, members)
    assert await gateway.answer(kit.chat(inline, file)) == (200, kit.WHOLE)


async def test_keys_change_while_requests_run(start, kit, caplog):
    """A key that is taken out is refused at once; what was asked with it is answered."""
    mine, other = ApiKeyConfig(name="mine", hash=hash_key("one")), ApiKeyConfig(name="other", hash=hash_key("two"))
    gateway = await start("a0:EPD", api_keys=(mine,))
    control, members = gateway.app.state.control, [("a0", gateway["a0"].url)]

    async def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{gateway.url}/v1/chat/completions"
        async with gateway.session.post(url, json=kit.chat(), headers=headers) as response:
            await response.read()
            return response.status

    assert [await status("one"), await status("two")] == [200, 401]
    gateway["a0"].scripts["/stage/prefill"] = lambda _: [0.3, kit.NONE, kit.WHOLE]
    running, num_calls = asyncio.create_task(status("one")), len(gateway["a0"].calls)
    await gateway.until(lambda: len(gateway["a0"].calls) > num_calls)
    with caplog.at_level(logging.INFO):
        control.apply(changed(control.settings.now, api_keys=(other,)), members)
    assert [await status("one"), await status("two"), await running] == [401, 200, 200]
    assert "api_keys" in caplog.text and other.hash not in caplog.text
    [holder] = gateway.app.state.admission.authenticator.clients
    limited = ApiKeyConfig(name="mine", hash=hash_key("one"), max_concurrent=1)
    control.apply(changed(control.settings.now, api_keys=(other, limited), api_key="three"), members)
    assert [await status(key) for key in ("one", "two", "three", "four")] == [200, 200, 200, 401]
    assert gateway.app.state.admission.authenticator.clients[0] is holder, "it stayed as it was, and is counted on"


async def test_a_refused_file_changes_nothing(tmp_path, caplog):
    file = tmp_path / "deployment.yaml"
    file.write_text("good: 1")
    taken = []

    def apply() -> None:
        text = file.read_text()
        if "good" not in text:
            raise ValueError("line 1: no such key")
        taken.append(text)

    reloader = Reloader(file, apply, look_s=0.02)
    running = asyncio.create_task(reloader.run())
    await asyncio.sleep(0.1)
    assert taken == [], "it has not changed"
    with caplog.at_level(logging.INFO):
        for text, is_seen in (
            ("good: 22", lambda: taken == ["good: 22"]),
            ("bad: 333", lambda: "is refused" in caplog.text),
            ("good: 4444", lambda: len(taken) > 1),
        ):
            file.write_text(text)
            async with asyncio.timeout(300):
                while not is_seen():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    assert taken == ["good: 22", "good: 4444"]
    assert "no such key" in caplog.text
    reloader.ask()
    async with asyncio.timeout(300):
        while len(taken) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert taken[-2:] == ["good: 4444"] * 2
    file.write_text("good: 55555")
    reloader.take()
    looks, stamp = [], reloader._stamp
    reloader._stamp = lambda: looks.append(True) or stamp()  # type: ignore[method-assign, func-returns-value]
    async with asyncio.timeout(300):
        while len(looks) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert taken[3:] == ["good: 55555"], "once"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
