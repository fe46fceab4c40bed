"""Stage calls to vLLM's OpenAI servers, which exchange features and KV by connectors.

A stage call is one request to vLLM: a picture to E, the prompt with ``max_tokens: 1`` to P, the whole request to
D, all at once if the connectors allow it. The client gets D's events; P's token is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from blake3 import blake3

from epd_serve.backends import vllm_request
from epd_serve.backends.native import NativeConnections
from epd_serve.backends.vllm_answer import (
    Correction,
    Events,
    KnownTokens,
    PrefillAnswer,
    ReplayedTokens,
    VllmAnswer,
    error_of,
)
from epd_serve.backends.vllm_command import FEATURE_PORT, KV_PORT, Connectors
from epd_serve.backends.vllm_metrics import VllmFigures, read_figures
from epd_serve.errors import Conflict, InstanceFailed, InstanceLost, InvalidRequest, ServeError, StageTimeout
from epd_serve.protocol import instance_state, wire
from epd_serve.rpc.http import HttpServer
from epd_serve.topology.remembered import remember_role, remembered_role
from epd_serve.types import Modality, Role, SamplingParams

#: All are passed on; vLLM refuses those that its model does not take.
_MODALITIES = ("image", "video", "audio")
INFO_TIMEOUT_S = 10.0
#: Additional time to answer a probe for each open call: vLLM reads requests on the event loop that answers.
_CALL_S = 0.1
#: Interval between two checks of an instance that should become empty.
_CHECK_S = 0.1
#: Time without progress after which an engine with requests is stuck. Its counters change at the end of a step,
#: and a step may compile first.
STUCK_S = 300.0
#: The first request of a process compiles and allocates.
WARM_UP_TIMEOUT_S = 300.0
#: Request id of the gateway's own requests.
_TRIAL = "warm-up"
#: Modalities to warm up with; the first that the model takes is used.
_TRIED: tuple[Modality, ...] = ("image", "audio")
#: Requests that make a decoding process compile its sampler, for one sequence and for several.
_FIRST_USES: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"logprobs": 1, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 8, "seed": 0},
    {"n": 2, "temperature": 1.0, "top_p": 0.9},
)


@dataclass(frozen=True, kw_only=True)
class VllmTarget:
    """A vLLM instance of the deployment file; vLLM itself does not know its role.

    Attributes:
        continues: whether the rest of an answer, computed apart, equals that of the whole.
    """

    role: Role
    device: str
    dtype: str
    model_path: str
    connectors: Connectors = field(default_factory=Connectors)
    continues: bool = True

    @property
    def roles(self) -> frozenset[Role]:
        """The possible roles of its process."""
        return self.connectors.roles_of(self.role)

    @property
    def waits_for_features(self) -> bool:
        return self.connectors.features is not None and self.role.prefills and not self.role.encodes


@dataclass(eq=False)
class _Exchange:
    """A request shared by its P and its D.

    Attributes:
        request: the request for the rest of the answer, if it ``continues``.
        continues: whether the answer depends only on its tokens, so that its beginning can be part of the prompt.
        is_for_d: whether D computes the prompt itself.
        correction: how the client's answer differs from D's.
        kv: P's parameters of its KV; None if D computes the prompt itself.
        awaited: items whose features P lacks.
        encoded: set when ``awaited`` is empty.
    """

    request: wire.PrefillRequest
    media: Sequence[bytes]
    prefill: VllmInstance
    continues: bool
    is_for_d: bool
    correction: Correction
    awaited: set[str]
    kv: asyncio.Future[dict[str, Any] | None] = field(default_factory=lambda: asyncio.Future())
    encoded: asyncio.Event = field(default_factory=asyncio.Event)

    def note_encoded(self, *names: str) -> None:
        """Record that P no longer waits for items."""
        self.awaited.difference_update(names)
        if not self.awaited:
            self.encoded.set()

    def expected_features(self) -> dict[str, Any]:
        """Return the fields that make P wait for features."""
        target = self.prefill.target
        if not (target.waits_for_features and target.connectors.features == "store" and self.request.items):
            return {}
        names = [ref.mm_hash for ref in self.request.items]
        return {"ec_transfer_params": {"request_id": self.request.request_id, "expect": True, "names": names}}


class VllmStageCall:
    """A prefill or decode (:class:`epd_serve.backends.base.StageCall`).

    Attributes:
        opened: the task of its HTTP calls, which returns the answer.
        num_tokens: text tokens of a prompt, until P has computed it.
    """

    def __init__(
        self,
        instance: VllmInstance,
        steps: Coroutine[Any, Any, VllmAnswer | PrefillAnswer],
        exchange: _Exchange | None = None,
    ) -> None:
        """``exchange``: that of a prefill, which ends with this call."""
        self._instance = instance
        self._exchange = exchange
        self.num_tokens = 0 if exchange is None else vllm_request.size_of(exchange.request)
        self.opened: asyncio.Future[Any] = asyncio.get_running_loop().create_task(steps)
        self.opened.add_done_callback(self._note_opened)
        instance.open_calls.add(self)

    def _note_opened(self, opened: asyncio.Future[Any]) -> None:
        self.num_tokens = 0
        error = None if opened.cancelled() else opened.exception()
        if error is not None and self._exchange is not None and not self._exchange.kv.done():
            self._exchange.kv.set_exception(error)
        if opened.cancelled() or error is not None or opened.result().decode_follows:  # D may decode for long
            self._instance.open_calls.discard(self)

    def close(self) -> None:
        """End the call; cancels the work unless the answer has been read to the end. Idempotent."""
        self._instance.open_calls.discard(self)
        if not self.opened.done():
            self.opened.cancel()
        elif not self.opened.cancelled() and self.opened.exception() is None:
            self.opened.result().close()
        if self._exchange is not None:
            self._instance.end_exchange(self._exchange)


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
        instance = VllmInstance(self, name, url, replace(alike, role=wanted))
        self.by_url[instance.url] = instance
        return instance


class VllmInstance(HttpServer):
    """:class:`epd_serve.backends.base.StageCalls` of one vLLM server.

    Attributes:
        target: its entry in the deployment file, in its present role.
        open_calls: this caller's that the instance works on.
    """

    def __init__(self, others: VllmInstances, name: str, url: str, target: VllmTarget) -> None:
        super().__init__(name, url, others.connections.http)
        self.target = target
        self.open_calls: set[VllmStageCall] = set()
        self._others = others
        self._encodes: dict[object, int] = {}  # pixels of this caller's items
        self._model = ""
        self._warm: float | None = None  # start of the process being warmed up
        self._seen: VllmFigures | None = None
        self._moved_at = 0.0  # when the engine last made progress
        self._engine_id: tuple[float | None, str] | None = None
        self._ordered = target.role

    # ------------------------------------------------------------------ state

    async def info(self) -> instance_state.InstanceInfo:
        """Return the instance's info, after warming up a new process.

        Raises InstanceLost also for answers of other servers.
        """
        models, figures = await asyncio.gather(self._ask_json(self, "/v1/models"), self._figures())
        try:
            model = models["data"][0]
            self._model, length = str(model["id"]), int(model["max_model_len"] or 0)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InstanceLost(f"{self.url}/v1/models is not an answer of vLLM ({error!r})") from error
        if self._warm != figures.started_at:
            await self._warm_up()
            self._warm = figures.started_at
        seen, self._seen = self._seen, figures
        if not figures.num_running or seen is None or _progress(seen) != _progress(figures):
            self._moved_at = asyncio.get_running_loop().time()
        target = self.target
        return instance_state.InstanceInfo(
            name=self.name,
            role=str(target.role),
            url=self.url,
            model=self._model,
            model_path=target.model_path,
            max_model_len=length,
            media_fingerprint=blake3(f"vllm {target.model_path} {target.dtype}".encode()).hexdigest(),
            device=target.device,
            dtype=target.dtype,
            pid=int(figures.started_at * 1000),
            ready=True,
            load=instance_state.Load(
                num_running=figures.num_running,
                num_waiting=figures.num_waiting,
                # what vLLM does not report is this caller's own
                num_waiting_tokens=sum(call.num_tokens for call in self.open_calls),
                num_waiting_encodes=len(self._encodes),
                num_waiting_pixels=sum(self._encodes.values()),
                free_blocks=round(figures.num_blocks * (1 - figures.kv_usage)),
                total_blocks=figures.num_blocks,
            ),
            block_size=figures.block_size,
            modalities=_MODALITIES,
        )

    @property
    def _num_calls(self) -> int:
        """The open calls of this caller."""
        return len(self.open_calls) + len(self._encodes)

    async def probe(self, timeout_s: float) -> None:
        """Return if the server answers in time and its engine does not hang. Raises ServeError.

        vLLM's counters change when a step ends, and a step that compiles takes long, so the engine is judged by
        minutes.
        """
        timeout_s += _CALL_S * self._num_calls
        try:
            async with asyncio.timeout(timeout_s):
                await self.ask("GET", "/health")
        except TimeoutError as error:
            raise StageTimeout(f"instance {self.name} does not answer within {timeout_s:g} s") from error
        is_busy = self._seen is not None and self._seen.num_running
        if is_busy and asyncio.get_running_loop().time() - self._moved_at > STUCK_S:
            raise StageTimeout(f"instance {self.name} has work and has computed nothing for {STUCK_S:g} s")

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
        return instance_state.RoleChanged(str(old), str(role), seconds, seconds)

    async def leave(self, order: instance_state.LeaveOrder) -> instance_state.Left:
        began = asyncio.get_running_loop().time()
        await self._wait_empty(order.deadline_s, self._ordered)
        return instance_state.Left(asyncio.get_running_loop().time() - began)

    async def _wait_empty(self, deadline_s: float, ordered: Role) -> None:
        """Return when all requests and blocks are gone. Raises Conflict if another role is ordered."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    figures = await self._figures()
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

    async def _warm_up(self) -> None:
        """Send a new process the requests that make it compile and allocate. Raises ServeError."""
        short = {"model": self._model, "prompt": [1], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                if self.target.role.has_language_model:
                    for fields in ({}, *(_FIRST_USES if self.target.role.decodes else ())):
                        await self._post(vllm_request.COMPLETION, short | fields, _TRIAL)
                for modality in _TRIED:
                    with contextlib.suppress(InvalidRequest):  # not supported by the model
                        trial = vllm_request.trial_body(self._model, modality)
                        await self._post(vllm_request.CHAT, trial, _TRIAL)
                        break
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} computed nothing in {WARM_UP_TIMEOUT_S:g} s") from error

    async def _figures(self) -> VllmFigures:
        return read_figures((await self._get(self, "/metrics")).decode("utf-8", "replace"))

    # ------------------------------------------------------------------ the stages

    async def encode(self, request: wire.EncodeRequest, *, trace_id: str) -> wire.EncodeReply:
        """Encode an item, or let an instance that prefills encode it with its prompt."""
        ref, target = request.ref, self.target
        exchange = self._others.exchanges.get(request.request_id)
        if target.role.has_language_model:
            if target.waits_for_features and target.connectors.features == "store":  # end P's wait
                withdrawn = wire.FeatureWithdrawn(request.request_id, ref.mm_hash)
                url = f"http://{self.address(FEATURE_PORT)}"
                async with self._others.connections.link(self.name, url) as link:
                    await link.ask("/feature/withdraw", [wire.encode(withdrawn)])
            if exchange is not None:
                exchange.note_encoded(ref.mm_hash)
            return wire.EncodeReply(cached=False)
        model = (exchange.request.output.model if exchange is not None else "") or self._model
        body = vllm_request.encode_body(model, ref, request.media)
        prefill = self._others.by_url.get(request.announce_to)
        if prefill is not None and prefill.target.connectors.features == "store":
            body["ec_transfer_params"] = {
                "request_id": request.request_id,
                "announce_to": prefill.address(FEATURE_PORT),
                "names": [ref.mm_hash],
            }
        key = object()
        self._encodes[key] = ref.num_pixels
        try:
            answer = await self._post(vllm_request.CHAT, body, request.request_id)
        finally:
            del self._encodes[key]
        about = (answer.get("ec_transfer_params") or {}).get(ref.mm_hash, {})
        if exchange is not None:
            exchange.note_encoded(ref.mm_hash)
        return wire.EncodeReply(cached=bool(about.get("cached")))

    def prefill(
        self, request: wire.PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()
    ) -> VllmStageCall:
        """Begin the whole request if this instance also decodes it, otherwise its prompt."""
        decodes = self if request.decode_url is None else self._others.by_url.get(request.decode_url, self)
        continues = decodes.target.continues and vllm_request.can_continue(request)
        copies = vllm_request.num_copies(request.sampling)
        # one transfer cannot feed several sampled choices; KV lacks the prompt's log-probabilities
        is_for_d = request.sampling.n > copies or vllm_request.needs_whole_prompt(request)
        exchange = _Exchange(
            request=vllm_request.rest_of(request) if continues else request,
            media=media,
            prefill=self,
            continues=continues,
            is_for_d=request.decode_url is not None and is_for_d,
            correction=Correction(copies=copies, first_index=request.output.first_index),
            awaited={ref.mm_hash for ref in request.items} if self.target.waits_for_features else set(),
        )
        exchange.note_encoded()
        self._others.exchanges[request.request_id] = exchange
        steps = self._answer(exchange) if request.decode_url is None else self._compute_prompt(exchange)
        return VllmStageCall(self, steps, exchange)

    def end_exchange(self, exchange: _Exchange) -> None:
        """Forget a request whose prefill call is closed. Idempotent."""
        if self._others.exchanges.get(exchange.request.request_id) is exchange:
            del self._others.exchanges[exchange.request.request_id]
        if not exchange.kv.cancel() and not exchange.kv.cancelled():
            exchange.kv.exception()  # mark it as retrieved

    async def _compute_prompt(self, exchange: _Exchange) -> PrefillAnswer:
        """Let P compute the prompt and keep its KV for D, unless D computes the prompt."""
        request, connectors = exchange.request, self.target.connectors
        if connectors.features == "file":  # vLLM looks for it only when it schedules the prompt
            await exchange.encoded.wait()
        if exchange.is_for_d:
            exchange.kv.set_result(None)
            return PrefillAnswer()
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if connectors.pulls:
            params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        else:
            params["transfer_id"] = request.request_id
        body = vllm_request.prefill_body(request, exchange.media) | exchange.expected_features()
        body["kv_transfer_params"] = params
        prompt = await self._append_generated(exchange, body)
        answer = await self._post(vllm_request.path_of(request), body, request.request_id)
        usage = answer.get("usage") or {}
        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        exchange.correction.num_cached = num_cached
        exchange.kv.set_result(answer.get("kv_transfer_params") or {})
        count = usage.get("prompt_tokens")
        return PrefillAnswer(count and count - (len(request.generated) if prompt else 0), num_cached)

    def decode(self, request: wire.DecodeRequest, *, trace_id: str) -> VllmStageCall:
        """Begin the decode of a request whose prefill has begun at P."""
        exchange = self._others.exchanges.get(request.request_id)
        if exchange is None:
            raise InstanceFailed(f"instance {self.name} got a request that no instance prefills")
        return VllmStageCall(self, self._answer(exchange))

    async def _answer(self, exchange: _Exchange) -> VllmAnswer:
        """Begin the answer, with KV from P or with the prompt computed here."""
        request, correction, is_whole = exchange.request, exchange.correction, exchange.prefill is self
        body = vllm_request.answer_body(request, exchange.media)
        if is_whole and self.target.connectors.features == "file":
            await exchange.encoded.wait()
        if is_whole:
            body |= exchange.expected_features()
        elif (kv := await self._find_kv(exchange)) is not None:
            body["kv_transfer_params"] = kv
        prompt = await self._append_generated(exchange, body)
        events: Events
        if vllm_request.can_be_replayed(request):
            kind = KnownTokens if exchange.continues else ReplayedTokens
            events = kind(self.name, correction, request, prompt)
            body["return_token_ids"] = True
        else:
            changes = correction.first_index or correction.copies > 1 or not is_whole
            events = Events(self.name, correction if changes else None)
        # vLLM derives the answer's id from the request's
        request_id = request.output.id.partition("-")[2] or request.request_id
        response = await self.send(
            "POST", vllm_request.path_of(request), msgspec.json.encode(body), _headers(request_id)
        )
        if response.status >= 400:
            async with response:
                raise self.error(response.status, await self.read_error(response))
        return VllmAnswer(self, response, events)

    async def _find_kv(self, exchange: _Exchange) -> dict[str, Any] | None:
        """Return the parameters by which D finds the KV; None if it computes the prompt itself."""
        if exchange.is_for_d or self.target.connectors.pulls:
            # shielded, as P answers even if this D is given up
            kv = await asyncio.shield(exchange.kv)
            if kv is not None and not kv.get("do_remote_prefill"):
                raise InstanceFailed(f"instance {exchange.prefill.name} did not return the address of its KV")
            return kv
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": exchange.request.request_id,
            "remote_bootstrap_addr": f"http://{exchange.prefill.address(KV_PORT)}",
            "remote_engine_id": await exchange.prefill.engine_id(),
        }

    async def _append_generated(self, exchange: _Exchange, body: dict[str, Any]) -> list[int] | None:
        """Append the generated tokens to a body's prompt; return that prompt, or None if it is unchanged."""
        request = exchange.request
        if not request.generated or not exchange.continues:
            return None
        prompt = request.prompt
        if not isinstance(prompt, list):
            asked = vllm_request.prompt_body(request, ())
            prompt = (await self._post("/tokenize", asked, request.request_id))["tokens"]
        tokens = [*prompt, *request.generated]
        vllm_request.set_prompt_tokens(body, tokens)
        return tokens

    async def engine_id(self) -> str:
        """Return the instance's id at Mooncake's bootstrap server. Raises InstanceLost without one."""
        if self._engine_id is None or self._engine_id[0] != self._warm:
            bootstrap = HttpServer(self.name, f"http://{self.address(KV_PORT)}", self._others.connections.http)
            answer = await self._ask_json(bootstrap, "/query")
            try:
                engine_id = str(next(iter(answer.values()))["engine_id"])
            except (AttributeError, LookupError, TypeError, StopIteration) as error:
                raise InstanceLost(f"{bootstrap.url}/query is not an answer of Mooncake ({error!r})") from error
            self._engine_id = (self._warm, engine_id)
        return self._engine_id[1]

    def address(self, offset: int) -> str:
        """Return ``host:port`` of the instance's server at an offset from its HTTP port."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        return f"{host}:{(parts.port or 80) + offset}"

    # ------------------------------------------------------------------ the tokenizer

    async def tokenize(self, request: wire.TokenizeRequest, *, trace_id: str) -> wire.TokenizeReply:
        if request.items:
            raise InvalidRequest("tokenize: vLLM counts only tokens of text; remove the media")
        prompt = wire.PrefillRequest(
            request_id=trace_id,
            output=wire.OutputOptions(kind="chat", id="", created=0, model=self._model),
            sampling=SamplingParams(seed=0),
            items=[],
            messages=request.messages,
            prompt=request.prompt,
            prompting=request.prompting,
        )
        if isinstance(request.prompt, list):
            tokens = request.prompt
        else:
            tokens = (await self._post("/tokenize", vllm_request.prompt_body(prompt, ()), trace_id))["tokens"]
        texts = [await self._text([token], trace_id) for token in tokens] if request.with_texts else None
        return wire.TokenizeReply(tokens=tokens, texts=texts)

    async def detokenize(self, request: wire.DetokenizeRequest, *, trace_id: str) -> wire.DetokenizeReply:
        return wire.DetokenizeReply(text=await self._text(request.tokens, trace_id))

    async def _text(self, tokens: list[int], trace_id: str) -> str:
        body = {"model": self._model, "tokens": tokens}
        return str((await self._post("/detokenize", body, trace_id))["prompt"])

    # ------------------------------------------------------------------ HTTP

    def error(self, status: int, body: bytes) -> ServeError:
        return error_of(status, body, self.name)

    async def _post(self, path: str, body: dict[str, Any], request_id: str) -> dict[str, Any]:
        found = await self.ask("POST", path, msgspec.json.encode(body), _headers(request_id))
        try:
            answer: dict[str, Any] = msgspec.json.decode(found)
        except ValueError as error:  # also invalid UTF-8
            raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error
        return answer

    async def _get(self, server: HttpServer, path: str) -> bytes:
        """Get a path of this server or another one of the instance."""
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                return await server.ask("GET", path)
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} did not answer within {INFO_TIMEOUT_S:g} s") from error

    async def _ask_json(self, server: HttpServer, path: str) -> Any:
        try:
            return msgspec.json.decode(await self._get(server, path))
        except ValueError as error:  # also invalid UTF-8
            raise InstanceLost(f"{server.url}{path} is not an answer of vLLM ({error})") from error


def _progress(figures: VllmFigures) -> tuple[float, int]:
    return figures.started_at, figures.progress


def _headers(request_id: str) -> dict[str, str]:
    return {"content-type": "application/json", wire.REQUEST_ID_HEADER: request_id}
