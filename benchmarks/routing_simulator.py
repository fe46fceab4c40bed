"""The gateways' real tables and policies over simulated instances, with a virtual clock: deterministic by seed.

An encoder works off its items one after the other and keeps the features of the latest; a prefill instance its
prompts likewise; a decode instance decodes all its sequences in steps. All report each ``report_s``. Times are
exactly what the reported rates say, so that what differs between policies is the policies.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from epd_serve.protocol.wire import InstanceInfo, Load, MediaRef, Report
from epd_serve.routing.choice import Router
from epd_serve.routing.policy import Demand
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Role, Stage, StageRate

Process = Iterator[Any]


class Clock:
    """Virtual seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), run))

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        self.at(self.now + seconds, run)

    def run(self, until: Callable[[], bool]) -> None:
        """Until it is so. Raises RuntimeError where nothing happens any more before that."""
        while not until():
            if not self._events:
                raise RuntimeError(f"at {self.now:.3f} s nothing is left to happen")
            self.now, _, run = heapq.heappop(self._events)
            run()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request at ``at_s``: images as (name, pixels), a prompt, and how many tokens it gets."""

    at_s: float
    images: tuple[tuple[str, int], ...] = ()
    num_tokens: int = 100
    num_output: int = 20


@dataclass(slots=True)
class _Job:
    key: str
    units: float
    done: Callable[[bool], None]
    mm_hash: str = ""


@dataclass(kw_only=True)
class SimulatedInstance:
    """One instance. ``rates`` as in a report; ``num_features`` is how many it keeps."""

    name: str
    role: str
    rates: dict[str, StageRate]
    num_features: int = 10_000
    num_blocks: int = 10_000
    ready: bool = True
    features: OrderedDict[str, None] = field(default_factory=OrderedDict)
    encoded_units: float = 0.0
    num_hits: int = 0
    num_encodes: int = 0
    num_served: int = 0
    _queues: dict[Stage, deque[_Job]] = field(default_factory=lambda: {stage: deque() for stage in Stage})
    _busy: set[Stage] = field(default_factory=set)
    _decoding: dict[str, tuple[float, Callable[[bool], None]]] = field(default_factory=dict)
    received: dict[int, list[str]] = field(default_factory=dict)
    made: dict[int, list[str]] = field(default_factory=dict)

    def load(self) -> Load:
        waiting = {stage: sum(job.units for job in queue) for stage, queue in self._queues.items()}
        return Load(
            num_running=len(self._decoding),
            num_waiting_pixels=int(waiting[Stage.ENCODE]),
            num_waiting_tokens=int(waiting[Stage.PREFILL]),
            num_waiting_encodes=len(self._queues[Stage.ENCODE]),
            free_blocks=self.num_blocks - len(self._decoding),
            total_blocks=self.num_blocks,
            mean_output_tokens=20.0,
            rates=self.rates,
        )

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            name=self.name,
            role=self.role,
            url="",
            model="m",
            model_path="",
            max_model_len=1 << 20,
            media_fingerprint="f",
            device="cpu",
            dtype="float32",
            pid=1,
            ready=self.ready,
            load=self.load(),
            host_id="here",
            block_size=16,
            kv_token_bytes=1000,
            tokens_per_pixel=0.001,
            feature_token_bytes=1000,
        )

    def encode(self, clock: Clock, key: str, item: MediaRef, done: Callable[[bool], None]) -> None:
        """``done`` is told whether the feature was there already."""
        if item.mm_hash in self.features:
            self.features.move_to_end(item.mm_hash)
            self.num_hits += 1
            done(True)
            return
        queue = self._queues[Stage.ENCODE]
        flight = next((job for job in queue if job.mm_hash == item.mm_hash), None)
        if flight is not None:  # one encode serves both
            self.num_hits += 1
            first = flight.done
            flight.done = lambda cached: (first(cached), done(False))[0]
            return
        self.num_encodes += 1
        for made in self.made.values():
            made.append(item.mm_hash)
        self.encoded_units += item.width * item.height

        def encoded(cached: bool) -> None:
            self.features[item.mm_hash] = None
            if len(self.features) > self.num_features:
                self.features.popitem(last=False)
            done(cached)

        queue.append(_Job(key, item.width * item.height, encoded, item.mm_hash))
        self._start(clock, Stage.ENCODE)

    def prefill(self, clock: Clock, key: str, num_tokens: int, done: Callable[[bool], None]) -> None:
        self._queues[Stage.PREFILL].append(_Job(key, num_tokens, done))
        self._start(clock, Stage.PREFILL)

    def _start(self, clock: Clock, stage: Stage) -> None:
        queue = self._queues[stage]
        if stage in self._busy or not queue:
            return
        self._busy.add(stage)

        def finish() -> None:
            job = queue.popleft()
            self._busy.discard(stage)
            self.num_served += 1
            job.done(False)
            self._start(clock, stage)

        clock.after(self.rates[stage.value].seconds(queue[0].units), finish)

    def decode(self, clock: Clock, key: str, num_tokens: int, done: Callable[[bool], None]) -> None:
        self._decoding[key] = (num_tokens, done)
        if Stage.DECODE not in self._busy:
            self._busy.add(Stage.DECODE)
            self._step(clock)

    def _step(self, clock: Clock) -> None:
        if not self._decoding:
            self._busy.discard(Stage.DECODE)
            return

        def stepped() -> None:
            for key, (left, done) in list(self._decoding.items()):
                self._decoding[key] = (left - 1, done)
                if left <= 1:
                    del self._decoding[key]
                    self.num_served += 1
                    done(False)
            self._step(clock)

        clock.after(self.rates["D"].seconds(len(self._decoding)), stepped)


class Gateway:
    """One gateway: a table of its own, fed by reports, and a policy."""

    def __init__(self, number: int, instances: Iterable[SimulatedInstance], policy: Router) -> None:
        self.number = number
        self.instances = {one.name: one for one in instances}
        self.policy = policy
        self.table = InstanceTable([(name, "") for name in self.instances])
        for one in self.instances.values():
            one.received[number], one.made[number] = [], []
            self.table.update(one.name, one.info(), contains=0)
        self.num_done = 0
        self.waits_s: list[float] = []
        self._numbers = count()

    def report(self) -> None:
        for one in self.instances.values():
            received, one.received[self.number] = one.received[self.number], []
            made, one.made[self.number] = one.made[self.number], []
            report = Report(load=one.load(), ready=one.ready, received=received, encoded=made)
            self.table.report(one.name, report)

    def serve(self, clock: Clock, request: Request) -> None:
        """Encodes and prefill start at once; the prompt is computed when its features are there."""
        request_id = f"{self.number}-{next(self._numbers)}"
        demand = Demand(num_tokens=request.num_tokens, num_pixels=sum(pixels for _, pixels in request.images))
        route = self.policy.routes.choose_route(self.table, "m", demand=demand)
        refs = [MediaRef(mm_hash=name, width=pixels, height=1) for name, pixels in dict(request.images).items()]
        encoders = self.policy.encoders.choose_encoders(self.table, route.prefill, refs)
        prefill, decode = self.instances[route.prefill.name], self.instances[route.decode.name]
        stack = ExitStack()
        stack.enter_context(
            self.table.in_flight(route.prefill, Stage.PREFILL, request_id=request_id, work=route.prefill_work)
        )
        prefill.received[self.number].append("P" + request_id)
        if not route.fused:
            stack.enter_context(
                self.table.in_flight(route.decode, Stage.DECODE, request_id=request_id, work=route.decode_work)
            )
        missing = len(refs)

        def ended(_: bool) -> None:
            stack.close()
            self.num_done += 1

        def first_token(_: bool) -> None:
            self.waits_s.append(clock.now - request.at_s)
            if not route.fused:
                decode.received[self.number].append("D" + request_id)
            decode.decode(clock, request_id, request.num_output, ended)

        def feature(_: bool) -> None:
            nonlocal missing
            missing -= 1
            if missing <= 0:
                prefill.prefill(clock, request_id, request.num_tokens, first_token)

        for ref, record in zip(refs, encoders, strict=True):
            self._encode(clock, request_id, ref, record, feature)
        if not refs:
            feature(True)

    def _encode(
        self, clock: Clock, request_id: str, ref: MediaRef, record: InstanceRecord, done: Callable[[bool], None]
    ) -> None:
        call = self.table.encoding(record, ref, request_id)
        encoding = call.__enter__()
        instance = self.instances[record.name]
        instance.received[self.number].append("E" + request_id)

        def encoded(cached: bool) -> None:
            encoding.was_cached = cached
            call.__exit__(None, None, None)
            done(cached)

        instance.encode(clock, request_id, ref, encoded)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Figures of one run.

    Attributes:
        hit_rate: of items, those that were not encoded again.
        imbalance: encode seconds of the busiest encoder over those of the mean.
        mean_wait_s, p99_wait_s: until the first token.
    """

    hit_rate: float
    imbalance: float
    mean_wait_s: float
    p99_wait_s: float


def simulate(
    instances: list[SimulatedInstance],
    policies: list[Router],
    requests: Iterable[Request],
    *,
    report_s: float = 0.1,
    watch: Callable[[list[Gateway]], None] = lambda gateways: None,
) -> Outcome:
    """Requests go to the gateways, one for each policy, in turn. ``watch`` is called after each report."""
    clock = Clock()
    gateways = [Gateway(number, instances, policy) for number, policy in enumerate(policies)]
    waiting = list(requests)
    for number, request in enumerate(waiting):
        gateway = gateways[number % len(gateways)]
        clock.at(request.at_s, lambda gateway=gateway, request=request: gateway.serve(clock, request))  # type: ignore[misc]

    def report() -> None:
        for gateway in gateways:
            gateway.report()
        watch(gateways)
        clock.after(report_s, report)

    clock.at(0.0, report)
    clock.run(lambda: sum(gateway.num_done for gateway in gateways) == len(waiting))
    report()
    encoders = [one for one in instances if Role.parse(one.role).encodes]
    busy_s = [
        one.rates["E"].unit_s * one.encoded_units + one.rates["E"].base_s * one.num_encodes for one in encoders
    ]
    items = sum(one.num_hits + one.num_encodes for one in encoders)
    waits = sorted(wait for gateway in gateways for wait in gateway.waits_s)
    return Outcome(
        hit_rate=sum(one.num_hits for one in encoders) / max(items, 1),
        imbalance=max(busy_s) * len(busy_s) / sum(busy_s) if sum(busy_s) else 1.0,
        mean_wait_s=sum(waits) / len(waits),
        p99_wait_s=waits[int(0.99 * (len(waits) - 1))],
    )
