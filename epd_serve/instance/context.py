"""Everything that the stages of an instance share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from device.base import Device
from epd_serve.config import InstanceOptions
from epd_serve.engine.batching import Batching
from epd_serve.engine.dual_stream import DualStream
from epd_serve.instance.kv_delivery import Pulls
from epd_serve.instance.metrics import InstanceMetrics
from epd_serve.instance.peers import Peers
from epd_serve.instance.rates import StageRates
from epd_serve.instance.refusals import Refusals
from epd_serve.instance.request_processor import RequestProcessor
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.models.family import Family
from epd_serve.telemetry.span import SpanStream
from epd_serve.telemetry.timeline import Timeline
from epd_serve.transfer.feature_store import FeatureStore
from epd_serve.transfer.transport import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceContext:
    """One process's devices, connections and figures. Another role gets another context of mostly the same parts.

    Attributes:
        options, store, batching: those of the present role.
        fingerprint: see :class:`epd_serve.protocol.wire.InstanceInfo`.
        spawn: runs a clean-up in the background, owned by the instance.
    """

    options: InstanceOptions
    path: Path
    url: str
    device: Device
    dtype: torch.dtype
    fingerprint: str
    family: Family
    loop: asyncio.AbstractEventLoop
    transport: Transport
    store: FeatureStore
    peers: Peers
    pulls: Pulls
    refusals: Refusals
    processor: RequestProcessor
    decoders: DecoderPool
    streams: DualStream
    batching: Batching
    metrics: InstanceMetrics
    spans: SpanStream
    timeline: Timeline
    rates: StageRates
    spawn: Callable[[asyncio.Task[None]], None]
