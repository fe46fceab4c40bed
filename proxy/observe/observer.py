"""The observer of requests: metrics, access log, traces and the live page get what they show from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from msgspec.structs import replace

from epd_serve.config import GatewayConfig
from epd_serve.randomness import random_block
from epd_serve.telemetry.gateway import GatewayMetrics
from epd_serve.telemetry.otel import span_export
from epd_serve.telemetry.trace_context import TRACEPARENT_HEADER, TRACESTATE_HEADER, join
from proxy.observe.access_log import AccessLog
from proxy.observe.figures import Figures
from proxy.observe.tracing import RequestExport
from proxy.observe.trail import Pace, Trail
from proxy.workers.ledger import Ledger

#: A clock read at every token of every answer would cost more than the rest of what is observed.
_PACED_EVERY = 32
#: What is over is taken account of so much later, many requests together: the second one costs half of the first.
_LATER_S = 0.02

_TRACEPARENT, _TRACESTATE = TRACEPARENT_HEADER.encode(), TRACESTATE_HEADER.encode()


class Observer:
    """For one event loop; plain objects, for any kind of server. ``begin`` and ``finish`` take a microsecond.

    Args:
        access_log: None: there is none.
        tracing: None: no spans are recorded here; trace contexts are passed on all the same.

    Attributes:
        on_finish: told of each request that is over.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        access_log: AccessLog | None = None,
        tracing: RequestExport | None = None,
    ) -> None:
        self.metrics = metrics
        self._figures = Figures()
        self._finished: list[Trail] = []
        self.access_log = access_log
        self.tracing = tracing
        self._num_begun = 0
        self.on_finish: Callable[[Trail], None] | None = None
        self.started_s = time.monotonic()
        metrics.before_render = self.take_account
        if access_log is not None:
            metrics.watch_access_log(lambda: access_log.num_written, lambda: access_log.num_dropped)

    def begin(self, endpoint: str, headers: Mapping[bytes, bytes]) -> Trail:
        """A request has come; ``headers`` by their names in lower case."""
        parent, state = headers.get(_TRACEPARENT, b""), headers.get(_TRACESTATE, b"")
        context = join(parent.decode("latin-1"), state.decode("latin-1"))
        if self.tracing is not None and self.tracing.samples(context, endpoint) != context.sampled:
            context = replace(context, sampled=not context.sampled)
        trail = Trail(endpoint, context, random_block().hex(), time.monotonic())
        if not self._num_begun % _PACED_EVERY:  # the first of all is one of them
            trail.pace = Pace(self.metrics.inter_token.observe)
        self._num_begun += 1
        return trail

    def first_token(self, trail: Trail) -> None:
        """A streamed answer begins."""
        trail.first_s = time.monotonic()
        self.metrics.first_token(trail.endpoint, trail.modality, trail.first_s - trail.arrived_s)

    def finish(self, trail: Trail, status: int, error: str = "") -> None:
        """It is over, however it went."""
        trail.finish(status, error)
        if not self._finished:
            asyncio.get_running_loop().call_later(_LATER_S, self.take_account)
        self._finished.append(trail)

    @property
    def figures(self) -> Figures:
        """The figures of all requests that are over."""
        self.take_account()
        return self._figures

    def take_account(self) -> None:
        """Take account of all requests that are over by now."""
        finished, self._finished = self._finished, []
        for trail in finished:
            trail.complete()
            self.metrics.finished(
                endpoint=trail.endpoint,
                modality=trail.modality,
                status=trail.status,
                finish_reason=trail.finish_reason,
                duration_s=trail.duration_s,
                tpot_s=trail.tpot_s,
                prompt_tokens=trail.prompt_tokens,
                output_tokens=trail.output_tokens,
                stages=[(hop.stage, (hop.end_s or hop.start_s) - hop.start_s, hop.source) for hop in trail.hops],
            )
            self._figures.add(trail)
            if self.on_finish is not None:
                self.on_finish(trail)
            if self.access_log is not None:
                self.access_log.put(trail)
            if self.tracing is not None and trail.context.sampled:
                self.tracing.put(trail)

    def close(self) -> None:
        """Write what is waiting, after :meth:`take_account`.

        Blocks, for some seconds where a collector of spans does not answer.
        """
        if self.access_log is not None:
            self.access_log.close()
        if self.tracing is not None:
            self.tracing.close()


def new_observer(gateway: GatewayConfig, metrics: GatewayMetrics, ledger: Ledger | None = None) -> Observer:
    """As the configuration, and for spans the environment (:mod:`epd_serve.telemetry.otel`), have it.

    ``ledger``: where several workers write one access log.
    """
    export = span_export("gateway")
    writing = nullcontext if ledger is None else ledger.writing
    return Observer(
        metrics,
        access_log=AccessLog(gateway.access_log, writing=writing) if gateway.access_log else None,
        tracing=None if export is None else RequestExport(export),
    )
