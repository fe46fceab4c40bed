"""A vLLM EC connector that transfers encoder output from E to P through epd-serve's feature store.

E stores features by content hash and announces them to the P that the gateway names. P fetches them while the
request waits and schedules it once its features are here, because Model Runner V1 runs no connector code in a step
without tokens. P encodes missing features itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import prometheus_client
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from epd_serve.protocol.wire import FeatureWithdrawn, Region
from epd_serve.rpc.cluster import cluster_key
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import StoredFeature
from epd_serve.transfer.shared_memory import SharedMemoryPeers
from epd_serve.vllm_plugin.announced_features import AnnouncedFeatures, FeatureMemory
from epd_serve.vllm_plugin.links import LinkThread

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.epd_serve")

#: ``encoded`` by this instance; ``reused`` from E's store; ``fetched`` by P from an E.
EVENTS = ("encoded", "reused", "fetched")
#: Length of a step without tokens, which waits for a feature.
_IDLE_STEP_S = 0.002


@dataclass
class StepFeatures(ECConnectorMetadata):
    """The features of a step, from the scheduler to the workers.

    Attributes:
        announce: on E: (request, mm_hash, the gateway's name, address of P).
        load: on P: location of each feature of the step.
    """

    announce: list[tuple[str, str, str, str]] = field(default_factory=list)
    load: dict[str, tuple[Region, StoredFeature]] = field(default_factory=dict)


@dataclass
class KeptFeatures(ECConnectorWorkerMetadata):
    """The features stored and evicted in a step, from E's worker to its scheduler."""

    stored: set[str]
    evicted: set[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> KeptFeatures:
        assert isinstance(other, KeptFeatures)
        return KeptFeatures(self.stored | other.stored, self.evicted | other.evicted)


class FeatureStats(ECConnectorStats):
    """Counts of :data:`EVENTS` since the last report."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> FeatureStats:
        return FeatureStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class FeatureMetrics(ECConnectorPromMetrics):
    """``vllm:epd_serve_features_total`` by event."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counter = metric_types[prometheus_client.Counter](
            name="vllm:epd_serve_features",
            documentation="Encoder outputs by event: encoded, reused, fetched.",
            labelnames=[*labelnames, "event"],
        )
        self._counters = {
            (engine, event): counter.labels(*values, event)
            for engine, values in labelvalues.items()
            for event in EVENTS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, count in transfer_stats_data.items():
            self._counters[engine_idx, event].inc(count)


class StoreFeatureConnector(ECConnectorBase):
    """``ec_connector: StoreFeatureConnector``: common base of the schedulers and workers of E and P.

    Each process gets the subclass for its part; the methods here do nothing.
    """

    def __new__(cls, vllm_config: VllmConfig, role: ECConnectorRole) -> StoreFeatureConnector:
        is_scheduler, encodes = role is ECConnectorRole.SCHEDULER, vllm_config.ec_transfer_config.is_ec_producer
        of_e, of_p = (SchedulerOfE, SchedulerOfP) if is_scheduler else (WorkerOfE, WorkerOfP)
        return object.__new__(of_e if encodes else of_p)

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        config = vllm_config.ec_transfer_config
        self._host, self._port = config.ec_ip, config.ec_port
        self._extra: dict[str, Any] = config.ec_connector_extra_config
        self._capacity = int(self._extra.get("bytes", 256 << 20))
        self._counts: Counter[str] = Counter()

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepFeatures:
        """Count what a step encodes."""
        self._counts["encoded"] += sum(map(len, scheduler_output.scheduled_encoder_inputs.values()))
        return StepFeatures()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_ec_connector_stats(self) -> FeatureStats | None:
        counts, self._counts = self._counts, Counter()
        return FeatureStats(data=dict(counts)) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> FeatureStats:
        return FeatureStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FeatureMetrics:
        return FeatureMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        return

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        return

    @property
    def _step(self) -> StepFeatures:
        return cast(StepFeatures, self._get_connector_metadata())


class SchedulerOfE(StoreFeatureConnector):
    """Learns from the worker which features are stored, and skips encoding them."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._stored: set[str] = set()
        self._hits: dict[str, set[str]] = {}

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        kept = connector_output.ec_connector_worker_meta
        if isinstance(kept, KeptFeatures):
            self._stored = (self._stored | kept.stored) - kept.evicted

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._stored

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepFeatures:
        step = super().build_connector_meta(scheduler_output)
        encoded = scheduler_output.scheduled_encoder_inputs
        for new in scheduler_output.scheduled_new_reqs:
            extra_args: dict[str, Any] = getattr(new.sampling_params, "extra_args", None) or {}
            params = extra_args.get("ec_transfer_params") or {}  # the gateway's
            computed = set(encoded.get(new.req_id, ()))
            hashes = [one.identifier for one in new.mm_features]
            self._hits[new.req_id] = {h for i, h in enumerate(hashes) if i not in computed}
            self._counts["reused"] += len(self._hits[new.req_id])
            if address := params.get("announce_to"):
                names = dict(zip(hashes, _names(params, hashes), strict=True))
                step.announce += [(params.get("request_id", ""), *pair, address) for pair in names.items()]
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        hits = self._hits.pop(request.request_id, set())
        found = zip(request.mm_features, _names_of(request), strict=True)
        return False, {name: {"cached": one.identifier in hits} for one, name in found}


class SchedulerOfP(StoreFeatureConnector):
    """Lets a request run once its features are here or must be encoded here."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        transport = EmbeddedTransport(self._host, key=cluster_key())
        self._announced = AnnouncedFeatures(transport, self._capacity, float(self._extra.get("timeout_s", 30.0)))
        self._links = LinkThread()
        self._links.serve(self._host, self._port, self._announced.calls)
        self._load: dict[str, tuple[Region, StoredFeature]] = {}
        #: mm_hash → the gateway's name of held features; set by :meth:`ensure_cache_available` before each use.
        self._held: dict[str, str] = {}
        self._waiting = False

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self._held

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        params = request.ec_transfer_params or {}
        for feature, name in zip(request.mm_features, _names_of(request), strict=True):
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            if params.get("expect") and not self._announced.is_settled(
                request.request_id, params.get("request_id", ""), name
            ):
                self._waiting = True
                return False
            if self._announced.hold(request.request_id, name):
                self._held[feature.identifier] = name
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        mm_hash = request.mm_features[index].identifier
        name = self._held.get(mm_hash)
        if name is not None and (found := self._announced.locate(name, request.request_id)) is not None:
            self._load[mm_hash] = found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepFeatures:
        step = super().build_connector_meta(scheduler_output)
        step.load, self._load = self._load, {}
        self._counts["fetched"] += len(step.load)
        if self._waiting and not scheduler_output.total_num_scheduled_tokens:
            self._announced.wait(_IDLE_STEP_S)
        self._waiting = False
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._announced.forget(request.request_id)
        for feature in request.mm_features:
            self._held.pop(feature.identifier, None)
        return False, None


class WorkerOfE(StoreFeatureConnector):
    """Stores what a step encodes, and announces it and features stored before."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._memory = FeatureMemory(EmbeddedTransport(self._host, key=cluster_key()), self._capacity)
        self._pending: dict[str, list[tuple[str, str, str]]] = {}
        self._stored: set[str] = set()
        self._peers = LinkThread()

    def start_save_caches(self, **kwargs: Any) -> None:
        step, encoder_cache = self._step, kwargs["encoder_cache"]
        self._pending = {}
        for trace_id, mm_hash, name, address in step.announce:
            if mm_hash not in self._memory and mm_hash in encoder_cache:
                self._put(encoder_cache[mm_hash], mm_hash)
            if mm_hash in self._memory:
                self._announce(mm_hash, trace_id, name, address)
            else:
                self._pending.setdefault(mm_hash, []).append((trace_id, name, address))

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self._put(encoder_cache[mm_hash], mm_hash)
        for waiting in self._pending.pop(mm_hash, ()):
            self._announce(mm_hash, *waiting)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        for trace_id, name, address in chain(*self._pending.values()):
            self._withdraw(address, trace_id, name)
        self._pending = {}
        return None, None

    def build_connector_worker_meta(self) -> KeptFeatures | None:
        stored, self._stored, evicted = self._stored, set(), self._memory.take_evicted()
        return KeptFeatures(stored, evicted) if stored or evicted else None

    def _put(self, feature: torch.Tensor, mm_hash: str) -> None:
        data = feature.detach().to("cpu").contiguous()
        view = memoryview(cast(Any, data.flatten().view(torch.uint8).numpy()))
        dtype = str(data.dtype).removeprefix("torch.")
        if self._memory.put(mm_hash, view, list(data.shape), dtype, "put") is not None:
            self._memory.release("put", mm_hash)
            self._stored.add(mm_hash)

    def _announce(self, mm_hash: str, trace_id: str, name: str, address: str) -> None:
        owner = f"{trace_id}>{address}"
        kept = self._memory.acquire(mm_hash, owner)
        if kept is None:
            self._withdraw(address, trace_id, name)
            return
        event = kept.event(name, trace_id, region=self._memory.region)
        sent = self._peers.send(address, "/feature/event", event)
        sent.add_done_callback(lambda _: self._memory.release(owner, mm_hash))

    def _withdraw(self, address: str, trace_id: str, name: str) -> None:
        self._peers.send(address, "/feature/withdraw", FeatureWithdrawn(trace_id, name))


class WorkerOfP(StoreFeatureConnector):
    """Copies the features of a step from shared memory into the encoder cache."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._device = vllm_config.device_config.device
        self._peers = SharedMemoryPeers()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for mm_hash, (region, kept) in self._step.load.items():
            if mm_hash not in encoder_cache:
                data = bytearray(kept.nbytes)
                self._peers.read(region, [(kept.offset or 0, memoryview(data))])
                feature = torch.frombuffer(data, dtype=getattr(torch, kept.dtype)).reshape(kept.shape)
                encoder_cache[mm_hash] = feature.to(self._device)


def _names_of(request: Request) -> list[str]:
    return _names(request.ec_transfer_params or {}, [one.identifier for one in request.mm_features])


def _names(params: dict[str, Any], own: list[str]) -> list[str]:
    """Return the gateway's names of a request's features, which E and P use, or vLLM's ``own``.

    vLLM's names differ if a request has processor options.
    """
    names: list[str] = params.get("names") or own
    return names if len(names) == len(own) else own
