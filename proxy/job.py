"""A request as it is run, and what it is run on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.protocol.wire import ChatMessage, OutputOptions, PromptOptions
from epd_serve.routing.policy import Policy
from epd_serve.routing.table import InstanceTable
from epd_serve.telemetry.gateway import GatewayMetrics
from epd_serve.telemetry.trace_file import TraceWriter
from epd_serve.types import SamplingParams
from proxy.health import Health
from proxy.media import MediaItem
from proxy.pairs import Pairs
from proxy.poller import Poller
from proxy.settings import Current
from proxy.stealing import Stealing
from proxy.trail import Trail

if TYPE_CHECKING:
    from proxy.dispatch import Dispatch


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, ready to be sent to instances.

    ``id`` is unique; ``trace_id`` may be the client's. A chat has ``messages``, a completion ``prompt``.
    ``arrived_s`` is monotonic. ``loop`` runs it.
    """

    id: str
    trace_id: str
    model: str
    output: OutputOptions
    sampling: SamplingParams
    messages: list[ChatMessage] | None
    prompt: str | list[int] | None
    items: list[MediaItem]
    arrived_s: float
    trail: Trail
    prompting: PromptOptions
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, kw_only=True)
class Instances:
    """The instances as the gateway uses them."""

    table: InstanceTable
    calls: Mapping[str, StageCalls]
    policy: Policy
    poller: Poller
    metrics: GatewayMetrics
    health: Health
    pairs: Pairs
    settings: Current
    stealing: Stealing[Dispatch]
    trace: TraceWriter | None = None
