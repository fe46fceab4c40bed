"""Stage calls to vLLM's OpenAI servers, which exchange features and KV by connectors.

A stage call is one request to vLLM: a picture to E, the prompt with ``max_tokens: 1`` to P, the whole request to
D, all at once if the connectors allow it. The client gets D's events; P's token is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from epd_serve.backends import vllm_chat
from epd_serve.backends.base import StageCall
from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm_answer import PrefillAnswer, VllmCall, Work
from epd_serve.backends.vllm_command import FEATURE_PORT, KV_PORT
from epd_serve.backends.vllm_server import EngineWatch, VllmFigures, VllmServer, VllmTarget
from epd_serve.backends.vllm_stream import (
    KnownTokens,
    ReplayedTokens,
    can_be_replayed,
    can_continue,
    rest_of,
    set_prompt_tokens,
)
from epd_serve.errors import Conflict, InstanceFailed, InstanceLost, InvalidRequest, StageTimeout
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.http import HttpServer
from epd_serve.topology.remembered import remember_role, remembered_role
from epd_serve.types import Role

#: All are passed on; vLLM refuses those that its model does not take.
_MODALITIES = ("image", "video", "audio")
#: Additional time to answer a probe for each open call: vLLM reads requests on the event loop that answers.
_CALL_S = 0.1
#: Interval between two checks of an instance that should become empty.
_CHECK_S = 0.1


@dataclass(eq=False)
class _Exchange:
    """A request shared by its P and its D.

    Attributes:
        continues: whether the answer depends only on its tokens, so that its beginning can be part of the prompt.
        answered: P's parameters of its KV; None if D computes the prompt itself.
        awaited: items whose features P lacks.
        encoded: set when ``awaited`` is empty.
        is_for_d: whether D computes the prompt itself.
        num_cached: prompt tokens in P's prefix cache; None: D's own count is right.
    """

    request: wire.PrefillRequest
    media: Sequence[bytes]
    prefill: VllmInstance
    continues: bool
    answered: asyncio.Future[dict[str, Any] | None] = field(default_factory=lambda: asyncio.Future())
    awaited: set[str] = field(default_factory=set)
    encoded: asyncio.Event = field(default_factory=asyncio.Event)
    is_for_d: bool = False
    num_cached: int | None = None

    def correct_usage(self, usage: dict[str, Any] | None) -> None:
        """Set the cached tokens of D's answer to P's count: D got all KV from P."""
        if usage and self.num_cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.num_cached, usage["prompt_tokens"])}


class VllmInstances:
    """All :class:`VllmInstance` of a caller, and the state that the calls of a request share."""

    def __init__(
        self, connections: NativeConnections, targets: Mapping[str, VllmTarget], directory: Path | None = None
    ) -> None:
        """``directory``: keeps the roles of switched instances."""
        self.connections = connections
        self.targets = targets
        self.directory = directory
        self.by_url: WeakValueDictionary[str, VllmInstance] = WeakValueDictionary()
        self.exchanges: dict[str, _Exchange] = {}

    def connect(self, name: str, url: str, role: str | None = None) -> VllmInstance:
        """Return the instance's object; a name outside the topology takes the target of its ``role``.

        Raises ValueError if the topology has neither.
        """
        remembered = None if self.directory is None else remembered_role(self.directory, name)
        given = self.targets.get(name)
        wanted = remembered or (given.role if given is not None else None) or (Role.parse(role) if role else None)
        able = (one for one in (given, *self.targets.values()) if one is not None and wanted in one.roles)
        alike = next(able, None)
        if wanted is None or alike is None:
            raise ValueError(f"instance {name}: the topology has only {', '.join(self.targets)}")
        target = replace(alike, role=wanted)
        instance = VllmInstance(self, name, url, target)
        self.by_url[instance.url] = instance
        return instance


class VllmInstance(VllmServer):
    """:class:`epd_serve.backends.base.StageCalls` of one vLLM server."""

    def __init__(self, others: VllmInstances, name: str, url: str, target: VllmTarget) -> None:
        super().__init__(HttpServer(name, url, others.connections.http), target)
        self._others = others
        self._warm: float | None = None
        self._seen: VllmFigures | None = None
        self._num_decodes = 0
        self._engine = EngineWatch(name)
        self._prompts: dict[object, int] = {}
        self._encodes: dict[object, int] = {}
        self._engine_id: tuple[float, str] | None = None
        self._bootstrap: HttpServer | None = None
        self._ordered = target.role

    # ------------------------------------------------------------------ state

    async def info(self) -> instance_state.InstanceInfo:
        """Return the instance's info, after warming up a new process.

        Raises InstanceLost also for answers of other servers.
        """
        models, figures = await asyncio.gather(self.ask_json("/v1/models"), self.figures())
        try:
            model = models["data"][0]
            name, length = str(model["id"]), int(model["max_model_len"] or 0)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InstanceLost(f"{self.url}/v1/models is not an answer of vLLM ({error!r})") from error
        if self._warm != figures.started_at:
            await self.warm_up(name)
            self._warm = figures.started_at
        self._seen = figures
        target = self.target
        return instance_state.InstanceInfo(
            name=self.name,
            role=str(target.role),
            url=self.url,
            model=name,
            model_path=target.model_path,
            max_model_len=length,
            media_fingerprint=target.media_fingerprint,
            device=target.device,
            dtype=target.dtype,
            pid=int(figures.started_at * 1000),
            ready=True,
            load=figures.load(
                num_waiting_tokens=sum(self._prompts.values()),
                num_waiting_encodes=len(self._encodes),
                num_waiting_pixels=sum(self._encodes.values()),
            ),
            block_size=figures.block_size,
            modalities=_MODALITIES,
        )

    @property
    def _num_calls(self) -> int:
        """The open calls of this caller."""
        return len(self._prompts) + len(self._encodes) + self._num_decodes

    async def probe(self, timeout_s: float) -> None:
        """Return if the server answers in time and its engine does not hang. Raises ServeError.

        vLLM's counters change when a step ends, and a step that compiles takes long, so the engine is judged by
        minutes (:class:`EngineWatch`).
        """
        timeout_s += _CALL_S * self._num_calls
        try:
            async with asyncio.timeout(timeout_s):
                await self.get("/health")
        except TimeoutError as error:
            raise StageTimeout(f"instance {self.name} does not answer within {timeout_s:g} s") from error
        if self._seen is not None:
            self._engine.look(self._seen, asyncio.get_running_loop().time())

    async def switch(self, order: instance_state.RoleOrder) -> instance_state.RoleChanged:
        """Use the same process in another role, once it is empty if the two roles share no stage."""
        began, old, role = asyncio.get_running_loop().time(), self.target.role, Role.parse(order.role)
        if role not in self.target.roles:
            possible = ", ".join(sorted(str(one) for one in self.target.roles - {self.target.role}))
            raise InvalidRequest(
                f"vLLM's instance {self.name} can become {possible or 'nothing else'}, but not {role}; 'epd-serve "
                "apply' with a file of these roles starts other instances first",
                param="role",
            )
        self._ordered = role
        if old.stages.isdisjoint(role.stages):
            try:
                await self._wait_empty(order.deadline_s, role)
            except BaseException:
                self._ordered = old
                raise
        self.target = replace(self.target, role=role)
        if self._others.directory is not None:
            remember_role(self._others.directory, self.name, role)
        seconds = asyncio.get_running_loop().time() - began
        return instance_state.RoleChanged(str(old), str(role), 0, seconds, seconds)

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        began = asyncio.get_running_loop().time()
        await self._wait_empty(order.deadline_s, self._ordered)
        return instance_state.Left(asyncio.get_running_loop().time() - began)

    async def _wait_empty(self, deadline_s: float, ordered: Role) -> None:
        """Return when all requests and blocks are gone. Raises Conflict if another role is ordered."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    figures = await self.figures()
                    if self._ordered != ordered:
                        raise Conflict(f"instance {self.name} was meanwhile ordered to serve {self._ordered}")
                    if not (figures.num_running or figures.num_waiting or figures.kv_usage or self._num_calls):
                        return
                    await asyncio.sleep(_CHECK_S)
        except TimeoutError as error:
            raise StageTimeout(
                f"instance {self.name} still had requests after {deadline_s:g} s; it serves {self.target.role}"
            ) from error

    async def reports(self) -> AsyncGenerator[instance_state.Report, None]:
        """Raise InvalidRequest: vLLM sends no reports, so the caller asks for its info instead."""
        if self.url:
            raise InvalidRequest(f"instance {self.name} sends no reports")
        yield instance_state.Report(load=instance_state.Load())

    # ------------------------------------------------------------------ the stages

    async def encode(self, request: wire.EncodeRequest, *, trace_id: str) -> wire.EncodeReply:
        """Encode an item, or let an instance that prefills encode it with its prompt."""
        ref = request.ref
        if self.target.role.has_language_model:
            if self.target.takes_features and self.target.features == "store":  # end P's wait
                withdrawn = wire.FeatureWithdrawn(request.request_id, ref.mm_hash)
                address = self.address(FEATURE_PORT)
                async with self._others.connections.link(self.name, f"http://{address}") as link:
                    await link.ask("/feature/withdraw", [wire.encode(withdrawn)])
            self._end_wait(request)
            return wire.EncodeReply(cached=False, num_tokens=0)
        exchange = self._others.exchanges.get(request.request_id)
        model = (exchange.request.output.model if exchange is not None else "") or await self.model_name()
        body = vllm_chat.encode_body(model, ref, request.media)
        prefill = self._others.by_url.get(request.announce_to)
        if prefill is not None and prefill.target.features == "store":
            address = prefill.address(FEATURE_PORT)
            body["ec_transfer_params"] = {
                "request_id": request.request_id,
                "announce_to": address,
                "names": [ref.mm_hash],
            }
        key = object()
        self._encodes[key] = ref.num_pixels
        try:
            answer = await self.post(vllm_chat.CHAT, body, request.request_id)
        finally:
            del self._encodes[key]
        about = (answer.get("ec_transfer_params") or {}).get(ref.mm_hash, {})
        self._end_wait(request)
        return wire.EncodeReply(cached=bool(about.get("cached")), num_tokens=int(about.get("tokens", 0)))

    def prefill(self, request: wire.PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()) -> StageCall:
        """Begin the whole request if this instance also decodes it, otherwise its prompt."""
        decodes = self if request.decode_url is None else self._others.by_url.get(request.decode_url, self)
        continues = decodes.target.continues and can_continue(request)
        exchange = _Exchange(rest_of(request) if continues else request, media, self, continues)
        # one transfer cannot feed several sampled choices; KV lacks the prompt's log-probabilities
        several = request.sampling.n > vllm_chat.num_copies(request.sampling)
        exchange.is_for_d = request.decode_url is not None and (several or vllm_chat.needs_whole_prompt(request))
        if self.target.takes_features:
            exchange.awaited = {ref.mm_hash for ref in request.items}
        if not exchange.awaited:
            exchange.encoded.set()
        self._others.exchanges[request.request_id] = exchange
        key = object()
        self._prompts[key] = vllm_chat.size_of(request)

        def over() -> None:
            self._prompts.pop(key, None)
            self._others.exchanges.pop(request.request_id, None)
            if not exchange.answered.done():
                exchange.answered.cancel()
            elif not exchange.answered.cancelled():
                exchange.answered.exception()

        async def steps(work: Work) -> Any:
            try:
                if self.target.features == "file":  # vLLM looks for it only when it schedules the prompt
                    await exchange.encoded.wait()
                compute = self._answer if request.decode_url is None else self._compute_prompt
                return await compute(work, exchange)
            except Exception as error:
                if not exchange.answered.done():
                    exchange.answered.set_exception(error)
                raise
            finally:
                self._prompts.pop(key, None)

        return Work(steps, over)

    async def _compute_prompt(self, work: Work, exchange: _Exchange) -> PrefillAnswer:
        """Let P compute the prompt and keep its KV for D, unless D computes the prompt."""
        request = exchange.request
        if exchange.is_for_d:
            exchange.answered.set_result(None)
            return PrefillAnswer()
        body = vllm_chat.prefill_body(request, exchange.media)
        body |= self._expected(exchange)
        body["kv_transfer_params"] = self._hand_over(request)
        prompt = await self._continue(exchange, body, work)
        answer = await self.post(vllm_chat.path_of(request), body, request.request_id, work)
        exchange.answered.set_result(answer.get("kv_transfer_params") or {})
        usage = answer.get("usage") or {}
        count = usage.get("prompt_tokens")
        exchange.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return PrefillAnswer(count and count - (len(request.generated) if prompt else 0), exchange.num_cached)

    async def _continue(self, exchange: _Exchange, body: dict[str, Any], work: Work) -> list[int] | None:
        """Append the generated tokens to a body's prompt; return that prompt, or None if it is unchanged."""
        request = exchange.request
        if not request.generated or not exchange.continues:
            return None
        prompt = request.prompt
        if not isinstance(prompt, list):
            asked = vllm_chat.prompt_body(request, ())
            prompt = (await self.post("/tokenize", asked, request.request_id, work))["tokens"]
        tokens = [*prompt, *request.generated]
        set_prompt_tokens(body, tokens)
        return tokens

    def decode(self, request: wire.DecodeRequest, *, trace_id: str) -> StageCall:
        """Begin the decode of a request whose prefill has begun at P."""
        exchange = self._others.exchanges.get(request.request_id)
        if exchange is None:
            raise InstanceFailed(f"instance {self.name} got a request that no instance prefills")

        async def steps(work: Work) -> Any:
            return await self._answer(work, exchange, await self._take_over(exchange))

        def over() -> None:
            self._num_decodes -= 1

        self._num_decodes += 1
        return Work(steps, over)

    async def _answer(self, work: Work, exchange: _Exchange, kv: dict[str, Any] | None = None) -> VllmCall:
        """Begin the answer, with KV from P or with the prompt computed here."""
        body = vllm_chat.answer_body(exchange.request, exchange.media)
        if exchange.prefill is self:
            body |= self._expected(exchange)
        if kv is not None:
            body["kv_transfer_params"] = kv
        call = self._answer_call(exchange, body, await self._continue(exchange, body, work))
        work.own(call)
        call.send()
        await call.opened
        return call

    # ------------------------------------------------------------------ parameters of connectors

    def _expected(self, exchange: _Exchange) -> dict[str, Any]:
        """Return the fields that make P wait for features."""
        if not (self.target.takes_features and self.target.features == "store" and exchange.request.items):
            return {}
        names = [ref.mm_hash for ref in exchange.request.items]
        params = {"request_id": exchange.request.request_id, "expect": True, "names": names}
        return {"ec_transfer_params": params}

    def _hand_over(self, request: wire.PrefillRequest) -> dict[str, Any]:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if not self.target.pulls:
            return {**params, "transfer_id": request.request_id}
        nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return {**params, **nothing}

    async def _take_over(self, exchange: _Exchange) -> dict[str, Any] | None:
        """Return the parameters by which D finds the KV; None if it computes the prompt itself."""
        if exchange.is_for_d:
            await asyncio.shield(exchange.answered)
            return None
        prefill, transfer_id = exchange.prefill, exchange.request.request_id
        params: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}
        if self.target.pulls:
            answered = await asyncio.shield(exchange.answered)
            if answered is not None and not answered.get("do_remote_prefill"):
                raise InstanceFailed(f"instance {prefill.name} did not return the address of its KV")
            return answered
        bootstrap = f"http://{prefill.address(KV_PORT)}"
        return {**params, "remote_bootstrap_addr": bootstrap, "remote_engine_id": await prefill.engine_id()}

    async def engine_id(self) -> str:
        """Return the instance's id at Mooncake's bootstrap server. Raises InstanceLost without one."""
        if self._engine_id is None or self._engine_id[0] != self._warm:
            if self._bootstrap is None:
                self._bootstrap = HttpServer(
                    self.name, f"http://{self.address(KV_PORT)}", self._others.connections.http
                )
            answer = await self.ask_json("/query", self._bootstrap)
            try:
                engine_id = next(iter(answer.values()))["engine_id"]
            except (AttributeError, LookupError, TypeError, StopIteration) as error:
                raise InstanceLost(
                    f"{self._bootstrap.url}/query is not an answer of Mooncake ({error!r})"
                ) from error
            self._engine_id = (self._warm or 0.0, str(engine_id))
        return self._engine_id[1]

    def address(self, offset: int) -> str:
        """Return ``host:port`` of the instance's server at an offset from its HTTP port."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        return f"{host}:{(parts.port or 80) + offset}"

    def _end_wait(self, request: wire.EncodeRequest) -> None:
        """Record that P no longer waits for an item."""
        if (exchange := self._others.exchanges.get(request.request_id)) is not None:
            exchange.awaited.discard(request.ref.mm_hash)
            if not exchange.awaited:
                exchange.encoded.set()

    def _answer_call(self, exchange: _Exchange, body: dict[str, Any], prompt: list[int] | None) -> VllmCall:
        """Return the call for an answer; ``prompt``: the tokens before it, if it is the rest of an answer."""
        request = exchange.request
        path, output = vllm_chat.path_of(request), request.output
        request_id = output.id.partition("-")[2] or request.request_id  # vLLM derives the answer's id from it
        if can_be_replayed(request):
            call_type = KnownTokens if exchange.continues else ReplayedTokens
            return call_type(self.server, path, body, request_id, request, prompt, exchange.correct_usage)
        call = VllmCall(self.server, path, body, request_id)
        copies = vllm_chat.num_copies(request.sampling)

        def rewrite(answer: dict[str, Any]) -> None:
            if output.first_index or copies > 1:
                _multiply(answer, copies, output.first_index)
            exchange.correct_usage(answer.get("usage"))

        if output.first_index or copies > 1 or exchange.prefill is not self:
            call.rewrite = rewrite
        return call


def _multiply(answer: dict[str, Any], copies: int, first_index: int) -> None:
    """Repeat each choice ``copies`` times, with indices from ``first_index``."""
    answer["choices"] = [
        {**choice, "index": first_index + choice["index"] + copy}
        for copy in range(copies)
        for choice in answer.get("choices", ())
    ]
    if usage := answer.get("usage"):
        usage["completion_tokens"] *= copies
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
