"""Instances that fail, clients that leave: what the client sees and what is cancelled."""

import asyncio
import json
import logging

import pytest
from gateway_settings import gateway_settings
from instance_info import instance_info

from epd_serve.errors import InvalidRequest
from epd_serve.routing.routes import RoutePolicy
from epd_serve.rpc import items
from proxy.fleet import Fleet

STREAMS = pytest.mark.parametrize("stream", [True, False])


def red(kit):
    return kit.data_url(kit.picture())


@STREAMS
@pytest.mark.parametrize("status", [400, 503])
async def test_an_error_of_p_is_the_answer_and_cancels_the_rest(start, kit, stream, status):
    gateway = await start("e0:E", "p0:P", "d0:D", restart="never")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [0.05, *kit.fail(status, "no, because of this and that")]
    for name, path in (("e0", "/stage/encode"), ("d0", "/stage/decode")):
        gateway[name].scripts[path] = lambda _: [kit.FOREVER]
    found, error = await gateway.error(kit.chat(red(kit), stream=stream))
    assert (found, error["message"]) == (status, "no, because of this and that")
    await gateway.until(lambda: len(gateway["e0"].cancelled) == len(gateway["d0"].cancelled) == 1)
    await gateway.settle()


@STREAMS
@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_an_instance_lost_before_the_first_token_is_replaced(start, kit, stream, lost):
    gateway = await start("p0:P", "d0:D", "p1:P", "d1:D")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.DIE] if lost == "p0" else [kit.FOREVER]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.DIE] if lost == "d0" else [kit.FOREVER]
    status, data = await gateway.answer(kit.chat(stream=stream))
    assert (status, data) == (200, kit.FIRST + kit.REST + kit.DONE if stream else kit.WHOLE)
    if lost == "p0":
        [first], [second] = gateway["p0"].got("/stage/prefill"), gateway["p1"].got("/stage/prefill")
        assert first.request_id != second.request_id
        assert first.output == second.output and first.sampling == second.sampling
    await gateway.settle()


@STREAMS
async def test_an_instance_lost_without_a_substitute_is_a_502(start, kit, stream):
    gateway = await start("p0:P", "d0:D")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.DIE]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    status, error = await gateway.error(kit.chat(stream=stream))
    assert status == 502
    assert "p0" in error["message"]
    await gateway.until(lambda: len(gateway["d0"].cancelled) == len(gateway["d0"].got("/stage/decode")) > 0)
    await gateway.settle()


@STREAMS
async def test_an_empty_200_is_never_passed_on(start, kit, stream):
    gateway = await start("pd0:PD")
    gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE]
    status, _ = await gateway.error(kit.chat(stream=stream))
    assert status == 502


async def test_a_whole_answer_cut_short_is_a_502(start, kit):
    gateway = await start("p0:P", "d0:D", restart="never")
    gateway["d0"].scripts["/stage/decode"] = lambda _: [0.05, (200, {}), kit.WHOLE[:9], kit.DIE]
    status, _ = await gateway.error(kit.chat())
    assert status == 502


def events_of(answer):
    """The chunks of a chunked answer that was aborted: no terminating chunk may follow them."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        assert int(size, 16) > 0, "the terminating chunk makes it look complete"
        chunks.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return chunks


@pytest.mark.parametrize(
    "script",
    [["REST", "DIE"], ["REST", "half", "DIE"], ["REST"], ["DIE"]],
    ids=["connection lost", "lost within an event", "clean end without [DONE]", "lost before its first byte"],
)
async def test_a_break_after_the_first_token_is_an_error_event_and_an_abort(start, kit, script, caplog):
    """In a stream of two choices, which cannot continue at another instance."""
    gateway = await start("p0:P", "d0:D")
    rest = kit.sent(kit.REST)
    steps = [{"REST": rest, "half": rest[:-3], "DIE": kit.DIE}[step] for step in script]
    head = [] if script == ["DIE"] else [(200, {})]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [0.05, *head, *steps]
    with caplog.at_level(logging.WARNING):
        chunks = events_of(await gateway.raw(kit.chat(stream=True, n=2)))
    *tokens, last = chunks
    assert b"".join(tokens) == kit.FIRST + (kit.REST if "REST" in script else b"")
    assert last.startswith(b'data: {"error":{') and last.endswith(b"}}\n\n")
    assert json.loads(last[6:])["error"]["type"] == "instance_error"
    assert not any(record.exc_info for record in caplog.records), "a fault of an instance is no traceback of ours"
    await gateway.settle()


@pytest.mark.parametrize("end", ["DIE", None])
async def test_an_error_event_of_the_instance_is_not_doubled(start, kit, end):
    gateway = await start("p0:P", "d0:D")
    event = b'data: {"error":{"message":"KV lost","type":"server_error","param":null,"code":null}}\n\n'
    tail = [kit.DIE] if end else []
    body = kit.sent(kit.REST) + items.pack(items.ERROR, (), event)
    gateway["d0"].scripts["/stage/decode"] = lambda _: [0.05, (200, {}), body, *tail]
    assert b"".join(events_of(await gateway.raw(kit.chat(stream=True)))) == kit.FIRST + kit.REST + event
    # It aborted on purpose: it is no lost instance.
    assert gateway.table["d0"].ready


@STREAMS
@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_cancels_everything(start, kit, stream, begun):
    """All are called at once: nobody waits for E before calling P, or for P before calling D."""
    gateway = await start("e0:E", "p0:P", "d0:D")
    answer = [kit.DECODE, *([kit.sent(kit.FIRST)] if stream else [])] if begun else []
    gateway["e0"].scripts["/stage/encode"] = lambda _: [kit.FOREVER]
    gateway["p0"].scripts["/stage/prefill"] = lambda _: [*answer, kit.FOREVER]
    gateway["d0"].scripts["/stage/decode"] = lambda _: [kit.FOREVER]
    request = asyncio.create_task(gateway.answer(kit.chat(red(kit), stream=stream)))
    await gateway.until(lambda: all(gateway[name].calls for name in ("e0", "p0", "d0")))
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await gateway.until(lambda: all(len(gateway[name].cancelled) == 1 for name in ("e0", "p0", "d0")))
    await gateway.settle()
    assert 'status="499"} 1.0' in await gateway.text("/metrics")


async def test_the_deadline_is_a_504(start, kit):
    for limit_s in (0.2, 2, 20):  # until P has been asked before
        gateway = await start("p0:P", "d0:D", request_timeout_s=limit_s)
        gateway["p0"].scripts["/stage/prefill"] = lambda _: [kit.FOREVER]
        status, error = await gateway.error(kit.chat())
        assert status == 504
        assert f"{limit_s:g} s" in error["message"]
        if is_asked := bool(gateway["p0"].got("/stage/prefill")):
            break
    assert is_asked
    await gateway.until(lambda: len(gateway["p0"].cancelled) == 1)
    await gateway.settle()


async def test_the_deadline_within_a_stream_is_an_error_event(start, kit):
    for limit_s in (0.3, 3, 30):  # until the stream has begun before
        gateway = await start("pd0:PD", request_timeout_s=limit_s)
        gateway["pd0"].scripts["/stage/prefill"] = lambda _: [kit.NONE, kit.sent(kit.FIRST), kit.FOREVER]
        answer = await gateway.raw(kit.chat(stream=True))
        if not answer.startswith(b"HTTP/1.1 504 "):
            break
    first, last = events_of(answer)
    assert first == kit.FIRST
    assert json.loads(last[6:])["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_the_gateway_is_a_counted_500_that_ends_the_connection(start, kit, stream, monkeypatch):
    def choose_route(*_, **__):
        raise LookupError("a bug")

    monkeypatch.setattr(RoutePolicy, "choose_route", choose_route)
    gateway = await start("pd0:PD")
    async with gateway.post(kit.chat(stream=stream)) as response:
        assert (response.status, response.headers["connection"]) == (500, "close")
        assert "LookupError" in json.loads(await response.read())["error"]["message"]
    assert 'endpoint="chat",modality="text",status="500"} 1.0' in await gateway.text("/metrics")


async def test_a_loss_reported_during_a_poll_is_asked_about_at_once():
    """The answer of an instance that has died since is older than the news of its death."""
    asked, reply = asyncio.Queue(), asyncio.Event()

    class Calls:
        async def info(self):
            asked.put_nowait(None)
            await reply.wait()
            return instance_info("p0")

        async def probe(self, timeout_s):
            pass

        async def reports(self):
            raise InvalidRequest("it makes none")
            yield  # a generator

    fleet = Fleet(gateway_settings(poll_interval_s=1000), [("p0", "http://p0")], lambda *_: Calls())
    polling = asyncio.create_task(fleet.run())
    await asked.get()
    fleet.report_lost("p0")
    reply.set()
    async with asyncio.timeout(300):
        await asked.get()
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)


async def test_a_503_says_when_to_come_back(start, kit):
    gateway = await start("p0:P", "d0:D")
    gateway["p0"].scripts["/stage/prefill"] = lambda _: kit.fail(503, "no room for the KV", code="no_room")
    async with gateway.post(kit.chat()) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) > 0
        assert json.loads(await response.read())["error"]["code"] == "no_room"
    gateway["p0"].scripts["/stage/prefill"] = lambda _: kit.fail(500, "broken")
    async with gateway.post(kit.chat()) as response:
        assert "retry-after" not in response.headers
