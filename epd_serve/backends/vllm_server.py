"""One vLLM server: its HTTP calls, its metrics, its tokenizer, and a watch of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from blake3 import blake3

from epd_serve.backends import vllm_chat
from epd_serve.backends.vllm_answer import VllmCall, Work
from epd_serve.backends.vllm_command import Connectors, roles_of
from epd_serve.errors import InstanceLost, InvalidRequest, StageTimeout
from epd_serve.protocol import wire
from epd_serve.protocol.instance_state import Load
from epd_serve.protocol.wire import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from epd_serve.rpc.http import HttpServer
from epd_serve.types import Modality, Role, SamplingParams

INFO_TIMEOUT_S = 10.0
#: The first request of a process compiles and allocates.
WARM_UP_TIMEOUT_S = 300.0

#: Request id of the gateway's own requests.
_TRIAL = "warm-up"
#: Modalities to warm up with; the first that the model takes is used.
_TRIED: tuple[Modality, ...] = ("image", "audio")
_GREEDY = SamplingParams(seed=0, temperature=0.0)
#: Requests that make a decoding process compile its sampler, for one sequence and for several.
_FIRST_USES: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"logprobs": 1, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 8, "seed": 0},
    {"n": 2, "temperature": 1.0, "top_p": 0.9},
)


class VllmServer:
    """One vLLM server. Attributes: ``name``, ``url``, and ``target``, its entry in the deployment file."""

    def __init__(self, server: HttpServer, target: VllmTarget) -> None:
        self.server = server
        self.name = server.name
        self.url = server.url
        self.target = target

    # ------------------------------------------------------------------ prompts

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        if request.items:
            raise InvalidRequest("tokenize: vLLM counts only tokens of text; remove the media")
        prefill = wire.PrefillRequest(
            request_id=trace_id,
            output=wire.OutputOptions(kind="chat", id="", created=0, model=await self.model_name()),
            sampling=_GREEDY,
            items=[],
            messages=request.messages,
            prompt=request.prompt,
            prompting=request.prompting,
        )
        if isinstance(request.prompt, list):
            tokens = request.prompt
        else:
            body = vllm_chat.prompt_body(prefill, ())
            tokens = (await self.post("/tokenize", body, trace_id))["tokens"]
        texts = [await self._text([token], trace_id) for token in tokens] if request.with_texts else None
        return TokenizeReply(tokens=tokens, texts=texts)

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        return DetokenizeReply(text=await self._text(request.tokens, trace_id))

    async def _text(self, tokens: list[int], trace_id: str) -> str:
        model = await self.model_name()
        return str((await self.post("/detokenize", {"model": model, "tokens": tokens}, trace_id))["prompt"])

    # ------------------------------------------------------------------ HTTP

    async def warm_up(self, model: str) -> None:
        """Send a new process the requests that make it compile and allocate. Raises ServeError."""
        bodies: list[dict[str, Any]] = []
        if self.target.role.decodes:
            bodies += [_short_completion(model) | fields for fields in _FIRST_USES]
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                if self.target.role.has_language_model:
                    for body in (_short_completion(model), *bodies):
                        await self.post(vllm_chat.COMPLETION, body, _TRIAL)
                for modality in _TRIED:
                    with contextlib.suppress(InvalidRequest):  # not supported by the model
                        body = vllm_chat.trial_body(model, modality, is_new=self.target.features != "file")
                        await self.post(vllm_chat.CHAT, body, _TRIAL)
                        break
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} computed nothing in {WARM_UP_TIMEOUT_S:g} s") from error

    async def model_name(self) -> str:
        return str((await self.ask_json("/v1/models"))["data"][0]["id"])

    async def figures(self) -> VllmFigures:
        return read_figures((await self.get("/metrics")).decode("utf-8", "replace"))

    async def ask_json(self, path: str, server: HttpServer | None = None) -> Any:
        """Get a path and decode its JSON; ``server``: another server of the instance."""
        try:
            return msgspec.json.decode(await self.get(path, server))
        except ValueError as error:  # also invalid UTF-8
            raise InstanceLost(
                f"{(server or self.server).url}{path} is not an answer of vLLM ({error})"
            ) from error

    async def get(self, path: str, server: HttpServer | None = None) -> bytes:
        try:
            async with asyncio.timeout(INFO_TIMEOUT_S):
                return await VllmCall(server or self.server, path).ask()
        except TimeoutError as error:
            raise InstanceLost(f"instance {self.name} did not answer within {INFO_TIMEOUT_S:g} s") from error

    async def post(
        self, path: str, body: dict[str, Any], request_id: str, work: Work | None = None
    ) -> dict[str, Any]:
        call = VllmCall(self.server, path, body, request_id)
        if work is not None:
            work.own(call)
        try:
            answer: dict[str, Any] = msgspec.json.decode(await call.ask())
        except ValueError as error:  # also invalid UTF-8
            raise InstanceLost(f"instance {self.name} gave an unreadable answer ({error})") from error
        return answer


def _short_completion(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": [1], "max_tokens": 2, "temperature": 0, "ignore_eos": True}


#: Time without progress after which an engine with requests is stuck. Its counters change at the end of a step,
#: and a step may compile first.
STUCK_S = 300.0


class EngineWatch:
    """Detects a stuck engine by its metrics."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._progress: tuple[float, int] | None = None
        self._moved_at = 0.0

    def look(self, figures: VllmFigures, now: float) -> None:
        """Raise StageTimeout if the engine is stuck."""
        progress = (figures.started_at, figures.progress)
        if progress != self._progress or not figures.num_running:
            self._progress, self._moved_at = progress, now
        elif now - self._moved_at > STUCK_S:
            raise StageTimeout(f"instance {self._name} has work and has computed nothing for {STUCK_S:g} s")


_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROGRESS = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"}
_SUMMED = {
    *_PROGRESS,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
}
#: Larger numbers are invalid.
_MOST = 1e12


@dataclass(frozen=True, kw_only=True)
class VllmFigures:
    """The metrics of one instance; missing ones are 0.

    Attributes:
        started_at: Unix time of its start, which identifies the process.
        progress: finished tokens and requests, which grow with each step.
    """

    started_at: float
    num_running: int
    num_waiting: int
    progress: int
    block_size: int
    num_blocks: int
    kv_usage: float

    def load(self, *, num_waiting_tokens: int, num_waiting_encodes: int, num_waiting_pixels: int) -> Load:
        """Return the load for the gateway; the caller adds the waiting work, which vLLM does not report."""
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=num_waiting_tokens,
            num_waiting_encodes=num_waiting_encodes,
            num_waiting_pixels=num_waiting_pixels,
            free_blocks=round(self.num_blocks * (1 - self.kv_usage)),
            total_blocks=self.num_blocks,
        )


def read_figures(text: str) -> VllmFigures:
    """Parse Prometheus' text format, skipping invalid lines."""
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0.0)
    info: dict[str, str] = {}
    started_at, num_engines = 0.0, 0
    for name, labels, value in _LINE.findall(text):
        if name in _SUMMED:
            sums[name] += _number(value)
            num_engines += name == "vllm:kv_cache_usage_perc"
        elif name == "vllm:cache_config_info":
            info = dict(_LABEL.findall(labels))
        elif name == "process_start_time_seconds":
            started_at = _number(value)
    return VllmFigures(
        started_at=started_at,
        num_running=int(sums["vllm:num_requests_running"]),
        num_waiting=int(sums["vllm:num_requests_waiting"]),
        progress=int(sum(sums[name] for name in _PROGRESS)),
        block_size=_count(info.get("block_size")),
        num_blocks=_count(info.get("num_gpu_blocks")),
        kv_usage=sums["vllm:kv_cache_usage_perc"] / max(1, num_engines),
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number <= _MOST else 0.0


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class VllmTarget:
    """A vLLM instance of the deployment file; vLLM itself does not know its role.

    Attributes:
        features, kv: its connectors, if any.
        pulls: whether D requests KV only after P's answer, with the parameters in it.
        continues: whether the rest of an answer, computed apart, equals that of the whole.
    """

    role: Role
    device: str
    dtype: str
    model_path: str
    features: Literal["store", "file"] | None = None
    kv: Literal["mooncake", "nixl"] | None = None
    pulls: bool = False
    continues: bool = True

    @property
    def roles(self) -> frozenset[Role]:
        """The possible roles of its process."""
        return roles_of(self.role, Connectors(features=self.features, kv=self.kv, pulls=self.pulls))

    @property
    def takes_features(self) -> bool:
        return self.features is not None and self.role.prefills and not self.role.encodes

    @property
    def media_fingerprint(self) -> str:
        """A hash of everything, except the media, that determines a feature."""
        return blake3(f"vllm {self.model_path} {self.dtype}".encode()).hexdigest()
