"""Calls of an instance: those it serves, their refusal and reports, and those to its peers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from epd_serve.errors import (
    DRAINING,
    PEER_UNREACHABLE,
    InstanceFailed,
    InstanceLost,
    InvalidRequest,
    ServeError,
    Unavailable,
)
from epd_serve.instance.text.request_processor import S_PER_CHARACTER
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.cluster import CLUSTER_KEY, cluster_key
from epd_serve.rpc.link import MAX_BODY_BYTES, Link
from epd_serve.rpc.server import JSON, Handler, LinkService, NoSuchCall, Reply
from epd_serve.rpc.tls import tls_files
from epd_serve.types import Stage

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_DONE = Reply()
#: Gateways expect five reports a second and take an instance without any for stalled (proxy/fleet.py).
INTERVAL_S = 0.18
#: Limits on the latest calls and features in the first report to a gateway.
_MAX_CALLS, _MAX_FEATURES = 1024, 4096
#: HTTP paths open to all, for supervisors and Prometheus.
_OPEN = frozenset({"/health", "/health/live", "/metrics"})
#: Open too on an instance without a cluster key.
_KEYLESS = _OPEN | {"/info", "/integrity"}
_NDJSON = (b"content-type", b"application/x-ndjson")


class Begins(Protocol):
    """A stage that tracks which requests or items it has begun to compute."""

    def has_begun(self, key: str) -> bool: ...


class Refusals:
    """Open calls of one instance, which it can refuse to drain. Use it on the event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: dict[asyncio.Timeout, tuple[Begins | None, str]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def error(self, kind: type[ServeError] = Unavailable) -> ServeError:
        """Return the error of a refused call, so that another instance serves it.

        ``kind`` is InstanceFailed for an answer in progress, so that another instance continues it.
        """
        return kind(f"instance {self._name} is leaving its role", code=DRAINING)

    @asynccontextmanager
    async def call(
        self, stage: Begins | None = None, key: str = "", *, kind: type[ServeError] = Unavailable
    ) -> AsyncGenerator[None]:
        """Register a call for ``key`` while its context is open. Refusal cancels the body and raises ``kind``.

        ``stage`` knows whether ``key`` has begun; a call without a stage counts as begun.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls[scope] = stage, key
                try:
                    yield
                finally:
                    del self._calls[scope]
        except TimeoutError:
            if scope.expired():
                raise self.error(kind) from None
            raise

    def refuse(self, *, begun: bool) -> None:
        """Refuse all calls if ``begun``, else only those that have not begun."""
        now = asyncio.get_running_loop().time()
        for scope, (stage, key) in list(self._calls.items()):
            has_begun = stage is None or stage.has_begun(key)
            if (begun or not has_begun) and not scope.expired():
                scope.reschedule(now)


class CleanUps:
    """Clean-up tasks in the background. Use it on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, clean_up: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(clean_up)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Wait for all tasks."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ControlCalls:
    """Handlers for the calls of gateways and other instances (table in :mod:`epd_serve.protocol.wire`)."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        state = ("/health", "/health/live", "/info", "/integrity", "/metrics", "/reports", "/role", "/leave")
        kv = ("/kv/reserve", "/kv/announce", "/kv/renew", "/kv/complete", "/kv/cancel")
        return {
            "/stage/encode": self._encode,
            "/stage/prefill": self._prefill,
            "/stage/decode": self._decode,
            "/prompt/tokenize": self._tokenize,
            "/prompt/detokenize": self._detokenize,
            "/feature/event": self._feature_event,
            **{path: partial(self._kv, path) for path in kv},
            **{path: partial(self._state, path) for path in state},
        }

    async def _encode(self, body: bytes) -> Reply:
        instance, request = self._instance, wire.decode(body, wire.EncodeRequest)
        encoder, mm_hash = instance.encoder, request.ref.mm_hash  # every role has an encoder, as a last resort
        is_own = request.announce_to == instance.url  # last resort for a prompt of this instance
        if not (is_own and request.request_id in instance.require_prefiller().requests):
            instance.check_accepting()
        instance.telemetry.add_call(request.request_id, request.traceparent, mm_hash)
        instance.reports.add_call(Stage.ENCODE, request.request_id)
        instance.reports.add_feature(mm_hash)
        try:
            async with instance.refusals.call(None if is_own else encoder, mm_hash):
                reply = await encoder.encode(request)
        except BaseException:
            instance.reports.drop_feature(mm_hash)
            raise
        instance.telemetry.metrics.encoded(reply.cached, instead=Stage.ENCODE not in instance.options.role.stages)
        return Reply(body=wire.encode(reply))

    async def _prefill(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.PrefillRequest)
        prefiller = self._instance.require_prefiller()
        self._begin(Stage.PREFILL, request)
        async with self._instance.refusals.call(prefiller, request.request_id):
            return await prefiller.prefill(request)

    async def _decode(self, body: bytes) -> Reply:
        request = wire.decode(body, wire.DecodeRequest)
        decoder = self._instance.require_decoder()
        self._begin(Stage.DECODE, request)
        async with self._instance.refusals.call(decoder, request.request_id):
            return await decoder.decode(request)

    def _begin(self, stage: Stage, request: wire.PrefillRequest | wire.DecodeRequest) -> None:
        self._instance.check_accepting()
        self._instance.telemetry.add_call(request.request_id, request.traceparent)
        self._instance.reports.add_call(stage, request.request_id)

    async def _tokenize(self, body: bytes) -> Reply:
        prompts = self._instance.require_prefiller().prompts
        request = wire.decode(body, wire.TokenizeRequest)
        cost_s = S_PER_CHARACTER * prompts.check_size(request)
        reply = await self._instance.processor.run("text", cost_s, prompts.tokenize, request)
        return Reply(body=wire.encode(reply))

    async def _detokenize(self, body: bytes) -> Reply:
        tokens = wire.decode(body, wire.DetokenizeRequest).tokens
        prompts, cost_s = self._instance.require_prefiller().prompts, S_PER_CHARACTER * len(tokens)
        text = await self._instance.processor.run("text", cost_s, prompts.detokenize, tokens)
        return Reply(body=wire.encode(wire.DetokenizeReply(text)))

    async def _feature_event(self, body: bytes) -> Reply:
        receiver, event = self._instance.require_prefiller().receiver, wire.decode(body, wire.FeatureEvent)
        self._instance.telemetry.metrics.feature_came(event.producer)
        await receiver.receive(event)
        return _DONE

    async def _kv(self, path: str, body: bytes) -> Reply:
        if path == "/kv/reserve":
            self._instance.check_accepting()
        decoder = self._instance.require_decoder()
        match path:
            case "/kv/reserve":
                async with self._instance.refusals.call():
                    return Reply(body=wire.encode(await decoder.reserve(wire.decode(body, wire.ReserveRequest))))
            case "/kv/announce":
                return Reply(body=wire.encode(await decoder.read_kv(wire.decode(body, wire.KVAnnouncement))))
            case "/kv/complete":
                await decoder.complete(wire.decode(body, wire.Handoff))
            case "/kv/renew":
                decoder.renew(wire.decode(body, wire.TransferRef))
            case "/kv/cancel":
                decoder.cancel(wire.decode(body, wire.TransferRef))
            case _:
                raise AssertionError(path)
        return _DONE

    async def _state(self, path: str, body: bytes) -> Reply:
        """Answer about the instance's state, or change it."""
        instance = self._instance
        match path:
            case "/health":
                instance.check_ready()
                return Reply(headers=(JSON,), body=b'{"status":"ok"}')
            case "/health/live":  # even while the instance loads or drains, because a restart would not help
                return Reply(headers=(JSON,), body=b'{"status":"live"}')
            case "/info":
                return Reply(headers=(JSON,), body=msgspec.json.encode(instance.info()))
            case "/integrity":  # with the counts in use, all zero on an idle instance
                instance.check_ready()
                try:
                    instance.check_integrity()
                except AssertionError as error:
                    raise ServeError(f"integrity check failed: {error}", code="integrity") from error
                return Reply(headers=(JSON,), body=msgspec.json.encode(instance.in_use()))
            case "/metrics":
                instance.check_ready()
                headers = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
                return Reply(headers=headers, body=instance.render_metrics())
            case "/reports":
                instance.check_started()
                return Reply(headers=(_NDJSON,), stream=instance.reports.stream())
            case "/role":
                role = wire.decode(body, instance_state.RoleOrder)
                return Reply(body=wire.encode(await instance.lifecycle.switch(role)))
            case "/leave":
                leave = wire.decode(body, instance_state.LeaveOrder)
                return Reply(body=wire.encode(await instance.lifecycle.leave(leave)))
            case _:
                raise AssertionError(path)


class Reports:
    """Streams an instance's state to subscribed gateways every INTERVAL_S. Use it on the event loop."""

    def __init__(self, instance: Instance, interval_s: float = INTERVAL_S) -> None:
        self._instance = instance
        self._interval_s = interval_s
        self._is_closed = False
        self._state_changed = asyncio.Event()
        self._number = 0  # of the last call or feature
        self._calls: deque[tuple[int, str]] = deque(maxlen=_MAX_CALLS)
        self._features: OrderedDict[str, int] = OrderedDict()

    def add_call(self, stage: Stage, request_id: str) -> None:
        """Report a received stage call, which the load includes from now on."""
        self._number += 1
        self._calls.append((self._number, stage.value + request_id))

    def add_feature(self, mm_hash: str) -> None:
        """Report a feature stored or being encoded here, to attract other requests for it."""
        self._number += 1
        self._features[mm_hash] = self._number
        self._features.move_to_end(mm_hash)
        if len(self._features) > _MAX_FEATURES:
            self._features.popitem(last=False)

    def drop_feature(self, mm_hash: str) -> None:
        """Stop reporting a feature that could not be encoded."""
        self._features.pop(mm_hash, None)

    def send_now(self) -> None:
        """Send a report at once, after a state change."""
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    def close(self) -> None:
        """End all streams, each with a last report that the instance accepts no work."""
        self._is_closed = True
        self.send_now()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield reports, one line of JSON each."""
        named = 0
        while True:
            changed = self._state_changed
            report = instance_state.Report(
                load=self._instance.load(),
                ready=self._instance.is_accepting and not self._is_closed,
                received=[key for number, key in self._calls if number > named],
                encoded=[mm_hash for mm_hash, number in self._features.items() if number > named],
                epoch=self._instance.lifecycle.epoch,
            )
            named = self._number
            yield msgspec.json.encode(report) + b"\n"
            if self._is_closed:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await changed.wait()


class LookApp:
    """ASGI application that serves ``GET`` requests for the paths available without a link. It reads no bodies."""

    def __init__(self, service: LinkService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        path = scope["path"]
        handler = self._service.calls.get(path)
        try:
            if path not in _OPEN and self._service.key is not None:
                raise _Unproved(f"this instance requires its deployment's cluster_key: set {CLUSTER_KEY}")
            if scope["method"] != "GET" or path not in _KEYLESS or handler is None:
                raise NoSuchCall(f"{scope['method']} {path} is not available over HTTP")
            reply = await handler(b"")
            status, headers, body = 200, reply.headers, reply.body
        except ServeError as error:
            status, headers, body = error.status, (JSON,), error.to_json()
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})


class _Unproved(InvalidRequest):
    status = 401


class Peers:
    """Calls to other instances, with msgpack bodies, over one link per instance."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    async def close(self) -> None:
        await asyncio.gather(*[link.close() for link in self._links.values()])

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        """Send a message and return the body of the answer.

        Raises the peer's ServeError, or InstanceFailed with code ``peer_unreachable`` if the peer is lost or does
        not answer within ``timeout_s``.
        """
        if (link := self._links.get(url)) is None:
            link = self._links[url] = Link(url, url, cluster_key(), tls=tls_files())
        try:
            async with asyncio.timeout(timeout_s):
                return await link.ask(path, [wire.encode(message)], MAX_BODY_BYTES)
        except (InstanceLost, TimeoutError) as error:
            reason = str(error) or f"timeout after {timeout_s:g} s"
            raise unreachable(f"{url} does not answer {path}: {reason}") from error


def unreachable(message: str) -> InstanceFailed:
    """Return the error that this instance cannot reach another one, though both may be healthy."""
    return InstanceFailed(message, code=PEER_UNREACHABLE)
