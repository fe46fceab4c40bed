"""KV from P to D in groups of layers during the forward pass: a vLLM KV connector for caches in host memory.

D's scheduler allocates blocks and its worker asks P to write into them (reserve); P's worker is told by vLLM after
each layer, and pushes whole groups of layers of a chunk while the next are computed (write); P's answer ends the
request's wait at D (complete). P keeps a prompt's blocks until then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.request import RequestStatus

from epd_serve.factories import as_it_is, factory
from epd_serve.protocol.engine_notices import WITH_PIXELS
from epd_serve.rpc.cluster import cluster_key
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.grouping import GroupSizer, group_ends
from epd_serve.vllm_plugin.kv_layout import LayerMemory, layer_memory
from epd_serve.vllm_plugin.kv_receiving import KVReceiver, Receive
from epd_serve.vllm_plugin.kv_sending import Chunk, KVHandOvers
from epd_serve.vllm_plugin.notices import NoticeServer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


#: A step without tokens lasts so long, or until a transfer ends: nothing can be done but wait for one.
_EMPTY_STEP_S = 0.005


@dataclass
class _Prompt:
    """A prompt that is computed for D: all of its blocks so far, and the end of what is computed in them."""

    transfer_id: str
    checksum: str
    num_tokens: int
    blocks: list[int]
    end_token: int = 0

    def next_chunk(self, request_id: str, end_token: int, block_size: int) -> Chunk:
        begin, self.end_token = self.end_token, end_token
        first = begin // block_size
        return Chunk(
            request_id=request_id,
            transfer_id=self.transfer_id,
            prompt=self.checksum,
            first_block=first,
            blocks=self.blocks[first : -(-end_token // block_size)],
            num_tokens=end_token - begin,
            last=end_token >= self.num_tokens,
        )


@dataclass
class StepKV(KVConnectorMetadata):
    """The KV work of a step, as the scheduler tells it to the workers."""

    chunks: list[Chunk] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    declines: list[tuple[str, str]] = field(default_factory=list)
    #: (transfer, whether it was computed) of prompts that P is through with.
    finished: list[tuple[str, bool]] = field(default_factory=list)
    #: Requests that D is through with while their KV may still come.
    cancelled: list[str] = field(default_factory=list)
    #: Whether the step computes nothing: vLLM makes such steps one after the other while a request waits.
    is_empty: bool = False


def prompt_checksum(token_ids: list[int], mm_hashes: list[str]) -> str:
    """Return a checksum of everything from which a prompt is computed."""
    return blake3(f"{token_ids}{mm_hashes}".encode()).hexdigest()


class GroupedKVConnector(KVConnectorBase_V1):
    """``kv_connector: GroupedKVConnector``: an heir in the scheduler's process, another in each worker's."""

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> GroupedKVConnector:
        return object.__new__(Scheduler if role is KVConnectorRole.SCHEDULER else Worker)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """It keeps addresses of the KV cache, which sleep mode maps anew (asked from vLLM 0.33 on)."""
        return False

    # ------------------------------------------------------------------ a worker's

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return StepKV()

    # ------------------------------------------------------------------ the scheduler's

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        """KV is here before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


class Scheduler(GroupedKVConnector):
    """The prompts that are handed over, and those that are expected."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._sending: dict[str, _Prompt] = {}
        self._step = StepKV()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        count = len(request.prompt_token_ids or ()) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if not num_external_tokens or not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once: what is computed again is computed here
        num_tokens = len(request.prompt_token_ids)
        first_block = (num_tokens - num_external_tokens) // self._block_size
        self._step.receives.append(
            Receive(
                request_id=request.request_id,
                transfer_id=params["transfer_id"],
                address=params["address"],
                prompt=_checksum_of(request.prompt_token_ids, request.mm_features),
                first_block=first_block,
                blocks=blocks.get_block_ids()[0][first_block : -(-num_tokens // self._block_size)],
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepKV:
        step, self._step = self._step, StepKV()
        step.is_empty = not scheduler_output.total_num_scheduled_tokens
        counts = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            params = (getattr(new.sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
            if params.get("do_remote_decode") and new.prompt_token_ids:
                prompt = self._sending[new.req_id] = _Prompt(
                    transfer_id=params["transfer_id"],
                    checksum=_checksum_of(new.prompt_token_ids, new.mm_features),
                    num_tokens=len(new.prompt_token_ids),
                    blocks=list(new.block_ids[0]),
                )
                end = new.num_computed_tokens + counts[new.req_id]  # what was cached here goes along
                step.chunks.append(prompt.next_chunk(new.req_id, end, self._block_size))
        self._go_on(scheduler_output, step)
        return step

    def _go_on(self, scheduler_output: SchedulerOutput, step: StepKV) -> None:
        """With prompts whose chunks were computed in earlier steps."""
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            prompt, is_resumed = self._sending.get(request_id), request_id in cached.resumed_req_ids
            if prompt is None or (prompt.end_token >= prompt.num_tokens and not is_resumed):
                continue
            if is_resumed:
                prompt.blocks, prompt.end_token = [], 0
            if new_blocks := cached.new_block_ids[index]:
                prompt.blocks += new_blocks[0]
            end = cached.num_computed_tokens[index] + scheduler_output.num_scheduled_tokens[request_id]
            step.chunks.append(prompt.next_chunk(request_id, end, self._block_size))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._step.declines.append((params["address"], params["transfer_id"]))
        elif "address" in params:
            self._step.cancelled.append(request.request_id)
        if not params.get("do_remote_decode"):
            return False, None
        prompt = self._sending.pop(request.request_id, None)
        is_whole = prompt is not None and prompt.end_token >= prompt.num_tokens
        computed = bool(is_whole and block_ids and request.status is not RequestStatus.FINISHED_ABORTED)
        self._step.finished.append((params["transfer_id"], computed))
        return computed, None


class Worker(GroupedKVConnector):
    """One rank's memory, and the threads that move it. It may hand KV over and take it over."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._extra: dict[str, Any] = config.kv_connector_extra_config
        self._produces, self._consumes = config.is_kv_producer, config.is_kv_consumer
        self._block_size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = parallel.rank % parallel.tensor_parallel_size
        self._host, self._port = str(self._extra["host"]), int(self._extra["port"]) + self._rank
        self._layer_of: dict[str, int] = {}
        self._layers: list[LayerMemory] = []
        self._sender: KVHandOvers | None = None
        self._receiver: KVReceiver | None = None
        self._step = StepKV()
        self._chunks: list[Chunk] = []
        self._ends: frozenset[int] = frozenset()
        self._next_layer = 0
        self._began_at = 0.0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if hasattr(torch.cpu, "_init_amx"):
            # D's first attention may be that of a decode step, whose tiles nothing has asked the kernel for yet.
            torch.cpu._init_amx()
        self._layers = [layer_memory(cache, self._num_blocks) for cache in kv_caches.values()]
        self._layer_of = {name: index for index, name in enumerate(kv_caches)}
        transport = EmbeddedTransport(self._host, key=cluster_key())
        if self._consumes:
            self._receiver = KVReceiver(transport, self._layers)
        if not self._produces:
            return
        trace = self._extra.get("trace")
        self._sizer = GroupSizer(num_layers=len(self._layers))
        self._sender = KVHandOvers(
            factory("transport", as_it_is)(transport),
            self._layers,
            self._sizer,
            trace=None if trace is None else Path(trace),
        )
        self._server = NoticeServer(self._host, self._port, self._sender.handle)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        step = cast(StepKV, connector_metadata)
        self._step, self._next_layer, self._began_at = step, 0, time.monotonic()
        self._chunks = []
        if self._sender is None:
            return
        for transfer_id, computed in step.finished:
            self._sender.finish(transfer_id, computed=computed)
        for chunk in step.chunks:
            self._sender.begin(chunk)
        self._chunks = step.chunks
        if not self._chunks:
            return
        num_blocks = sum(len(chunk.blocks) for chunk in self._chunks)
        layer_bytes = num_blocks * self._layers[0].block_bytes * self._layers[0].planes
        num_tokens = max(1, num_blocks * self._block_size)
        size = self._sizer.group_size(self._sender.last_link, num_tokens, layer_bytes)
        self._ends = group_ends(len(self._layers), size)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's KV is written."""
        layer = self._layer_of.get(layer_name)
        if layer is None or not self._chunks or self._sender is None or layer not in self._ends:
            return
        self._push(layer + 1)

    def wait_for_save(self) -> None:
        """After the forward pass: what vLLM has not told of goes now."""
        if not self._chunks or self._sender is None:
            return
        self._push(len(self._layers))
        num_tokens = sum(chunk.num_tokens for chunk in self._chunks)
        self._sizer.observe_compute(num_tokens, time.monotonic() - self._began_at)
        self._chunks = []

    def _push(self, end: int) -> None:
        assert self._sender is not None
        if end <= self._next_layer:
            return
        layers, self._next_layer = range(self._next_layer, end), end
        for chunk in self._chunks:
            self._sender.push(layers, chunk, last=end == len(self._layers))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._receiver is None:
            return
        step = self._step
        for request_id in step.cancelled:
            self._receiver.cancel(request_id)
        for address, transfer_id in step.declines:
            self._receiver.decline(_of_rank(address, self._rank), transfer_id)
        for wanted in step.receives:
            self._receiver.receive(replace(wanted, address=_of_rank(wanted.address, self._rank)))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for mover in (self._receiver, self._sender):
            if self._step.is_empty and mover is not None:
                mover.wait(_EMPTY_STEP_S)
        if self._receiver is not None:
            ended = self._receiver.take_ended()
            results.finished_recving, results.failed_recving = ended.done, ended.failed
        if self._sender is not None:
            results.finished_sending = self._sender.take_sent()
        return results


def _checksum_of(token_ids: Any, features: Any) -> str:
    return prompt_checksum(list(token_ids), [one.identifier.removesuffix(WITH_PIXELS) for one in features or ()])


def _of_rank(address: str, rank: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"
