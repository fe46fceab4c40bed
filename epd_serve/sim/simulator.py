"""Run requests through a simulated deployment: real instance table, routing and retry on a virtual clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from epd_serve.bench.summary import wilson
from epd_serve.bench.types import Share
from epd_serve.cost.stages import NETWORK, SAME_DEVICE, Link
from epd_serve.errors import ServeError
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.encoders import choose_encoders
from epd_serve.routing.retry import LOOK_AGAIN_S, Retry
from epd_serve.routing.routes import Demand, Route, RoutePolicy
from epd_serve.routing.table import InstanceTable, OpenCall
from epd_serve.sched.sequence import Sequence as TokenSequence
from epd_serve.sim.device import Clock, SimDevice
from epd_serve.sim.instance import Reservation, SimInstance
from epd_serve.sim.spec import SimDeployment, SimInstanceSpec
from epd_serve.sim.workloads import SimRequest
from epd_serve.types import MediaSpan, SamplingParams, Stage

#: Report interval of instances (instance/reports.py).
REPORT_S = 0.18
#: Wait for a missing stage, as at a gateway whose instances start immediately.
WAIT_S = 55.0
#: Collect garbage rarely: a run makes many objects but few cycles, and collection took 1/8 of its time.
_COLLECT = 200_000, 20, 20
_SAMPLING = SamplingParams(seed=0, temperature=0.0)
_PROMPTS: dict[int, list[int]] = {}


@dataclass(slots=True, eq=False)
class Job:
    """A request and its outcome, in virtual time; None: not yet."""

    number: int
    request: SimRequest
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    num_output: int = 0
    failure: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens; None for answers of one token."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    def attains(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Return whether the request succeeded within both limits."""
        if self.failure or self.ttft_s is None or self.finish_s is None:
            return False
        if ttft_s is not None and self.ttft_s > ttft_s:
            return False
        return tpot_s is None or self.tpot_s is None or self.tpot_s <= tpot_s


@dataclass(slots=True, eq=False)
class _Running:
    """A routed request; ``calls`` to P and D, ``blocks`` reserved at D."""

    job: Job
    route: Route
    sequence: TokenSequence
    calls: dict[Stage, OpenCall] = field(default_factory=dict)
    blocks: Any = None
    is_prefilled: bool = False


class Simulation:
    """A deployment behind a gateway, on virtual time.

    Attributes:
        jobs: in the order of the requests.
        table: the gateway's view of the instances.
        num_open: requests that have a route and are not complete.
        num_encoded: items that were encoded, not found in a store.
    """

    def __init__(self, deployment: SimDeployment, requests: Sequence[SimRequest]) -> None:
        self.clock = Clock()
        self.instances: dict[str, SimInstance] = {}
        self.jobs = [Job(number, request, request.at_s) for number, request in enumerate(requests)]
        self.seconds = 0.0
        self._done: list[Job] = []
        self._devices: dict[str, SimDevice] = {}
        self._replaced: list[SimInstance] = []
        for spec in deployment.instances:
            self.start_instance(spec)
        self.table = InstanceTable([(name, "") for name in self.instances])
        for name, instance in self.instances.items():
            self.table.update(name, instance.info(), contains=0)
        self._policy = RoutePolicy()
        self._spec = deployment.instances[0]  # prompts have the same tokens and blocks everywhere
        self._running: dict[str, _Running] = {}
        self._complete_at_s: float | None = None  # when each stage last had an instance

    @property
    def num_open(self) -> int:
        return len(self._running)

    @property
    def num_encoded(self) -> int:
        return sum(one.num_encoded for one in [*self.instances.values(), *self._replaced])

    @property
    def num_steps(self) -> int:
        return sum(one.num_steps for one in [*self.instances.values(), *self._replaced])

    def start_instance(self, spec: SimInstanceSpec, pid: int = 1) -> None:
        """Start an instance, in place of the one of its name."""
        device = self._devices.setdefault(f"{spec.host}/{spec.device}", SimDevice(self.clock))
        if spec.name in self.instances:
            self._replaced.append(self.instances[spec.name])
        self.instances[spec.name] = one = SimInstance(
            self.clock, device, spec, on_prompt=self._end_prompt, on_end=self._end_answer
        )
        one.pid = pid

    def run(
        self,
        *,
        give_up: Callable[[list[Job]], bool] | None = None,
        on_report: Callable[[Simulation], None] | None = None,
    ) -> None:
        """Run all requests to their ends.

        Args:
            give_up: called with the finished jobs after each round of reports; True stops the run.
            on_report: called after each round of reports, the first at time 0; it may change instances.
        """
        given_up = False

        def report_all() -> None:
            nonlocal given_up
            for name, instance in self.instances.items():
                if instance.is_changed:
                    self.table.report(name, instance.report())
            if not self.table.missing_stages():
                self._complete_at_s = self.clock.now
            if on_report is not None:
                on_report(self)
            if not self.clock.has_events and len(self._done) < len(self.jobs):
                raise RuntimeError(
                    f"at {self.clock.now:.3f} s {len(self.jobs) - len(self._done)} requests are stuck"
                )
            given_up = given_up or (give_up is not None and give_up(self._done))
            self.clock.after(REPORT_S, report_all)

        if not self.table.missing_stages():
            self._complete_at_s = self.clock.now
        if self.jobs:
            self.clock.at(self.jobs[0].sent_s, partial(self._arrive, 0))
        self.clock.at(0.0, report_all)
        before = gc.get_threshold()
        gc.set_threshold(*_COLLECT)
        try:
            self.clock.run(lambda: len(self._done) == len(self.jobs) or given_up)
            self.seconds = self.clock.now
            self.clock.run(lambda: given_up or not any(one.is_stepping for one in self.instances.values()))
        finally:
            gc.set_threshold(*before)

    def attainment(self, ttft_s: float | None, tpot_s: float | None) -> Share:
        """Return the SLO attainment; requests unfinished in a stopped run count as missed."""
        return wilson(sum(job.attains(ttft_s, tpot_s) for job in self.jobs), len(self.jobs))

    # ------------------------------------------------------------------ requests

    def _arrive(self, index: int) -> None:
        job = self.jobs[index]
        request = job.request
        demand = Demand(num_characters=4 * request.num_text_tokens, num_pixels=request.num_pixels)
        retry = Retry(self.table, self._policy, "model", demand)
        self.clock.after(self._spec.profile.request_s, partial(self._send, job, retry))
        if index + 1 < len(self.jobs):
            self.clock.at(self.jobs[index + 1].sent_s, partial(self._arrive, index + 1))

    def _send(self, job: Job, retry: Retry) -> None:
        """Call P, D and the encoders at once; retry later if a stage lacks an instance."""
        try:
            route = retry.pick_route(self.clock.now, WAIT_S, self._complete_at_s)
            if route is None:
                self.clock.after(LOOK_AGAIN_S, partial(self._send, job, retry))
                return
            sequence = self._sequence(job, hand_off=not route.fused)
            for record, num_new in ((route.prefill, 0), (route.decode, job.request.num_output_tokens)):
                tables = self.instances[record.name].queues.tables
                tables.check_fits(sequence.num_prompt_tokens, num_new, 1)
        except ServeError as error:
            job.finish_s, job.failure = self.clock.now, error.message
            self._done.append(job)
            return
        running = self._running[sequence.request_id] = _Running(job, route, sequence)
        stages = (Stage.PREFILL,) if route.fused else (Stage.PREFILL, Stage.DECODE)
        for stage in stages:
            record = route.at(stage)
            running.calls[stage] = self.table.open_call(
                record,
                stage,
                request_id=sequence.request_id,
                work=route.prefill_work if stage is Stage.PREFILL else route.decode_work,
            )
            self.instances[record.name].receive(stage, sequence.request_id)
        items = list({ref.mm_hash: ref for ref in job.request.media}.values())
        encoders = choose_encoders(self.table, route.prefill, items) if items else []
        if not route.fused:
            self.instances[route.decode.name].num_expected += 1
        for ref, encoder in zip(items, encoders, strict=True):
            self._encode(running, ref, encoder.name)
        prefill = self.instances[route.prefill.name]
        sequence.arrival_s = self.clock.now
        if route.fused:
            prefill.submit(sequence)
            return

        decode = self.instances[route.decode.name]
        prefill.num_unsubmitted_tokens += sequence.num_tokens

        def granted(blocks: Any) -> None:
            running.blocks = blocks
            prefill.num_unsubmitted_tokens -= sequence.num_tokens
            self.clock.after(0.0, partial(prefill.submit, sequence))

        def reserve() -> None:  # not before, as an encode may take long
            num_tokens, hashes = sequence.num_prompt_tokens, sequence.block_hashes
            decode.reserve(Reservation(num_tokens, hashes, self.clock.now, granted))

        prefill.await_item(sequence, reserve)

    def _encode(self, running: _Running, ref: MediaRef, encoder_name: str) -> None:
        request_id, encoder = running.sequence.request_id, self.instances[encoder_name]
        prefill = self.instances[running.route.prefill.name]
        call = ExitStack()
        call.enter_context(self.table.open_encode(self.table[encoder_name], ref, request_id))
        encoder.receive(Stage.ENCODE, request_id)
        profile = encoder.spec.profile
        nbytes = profile.feature_token_bytes * profile.image_tokens(ref.num_pixels)

        def arrived() -> None:
            if not running.is_prefilled:  # else it has used another request's feature
                prefill.take_feature(ref.mm_hash, request_id, nbytes)

        def encoded() -> None:
            call.close()
            encoder.is_changed = True
            if encoder is prefill:
                arrived()
            else:
                self.clock.after(_link(encoder.spec, prefill.spec).seconds(nbytes), arrived)

        if prefill.features.acquire(ref.mm_hash, request_id) is None:
            encoder.encode(ref.mm_hash, ref.num_pixels, encoded)
        else:
            encoded()

    def _end_prompt(self, instance: SimInstance, sequence: TokenSequence) -> None:
        """Emit the first token of a computed prompt and send its KV to a separate D."""
        running = self._running[sequence.request_id]
        instance.is_changed = True
        running.job.first_token_s = running.job.last_token_s = self.clock.now
        instance.features.release(sequence.request_id)
        running.is_prefilled = True
        if running.route.fused:
            return
        decode = self.instances[running.route.decode.name]
        num_tokens = sequence.num_prompt_tokens
        computing_s = instance.spec.profile.step_s(num_tokens, 1, 0, num_tokens**2)
        link = _link(instance.spec, decode.spec)
        sent_s = instance.send_s(decode.spec.name, link, num_tokens, computing_s)
        self.clock.after(sent_s, partial(self._hand_over, running, instance, decode))

    def _hand_over(self, running: _Running, prefill: SimInstance, decode: SimInstance) -> None:
        old = running.sequence
        running.sequence = new = TokenSequence(
            request_id=old.request_id,
            prompt_ids=old.prompt_ids,
            sampling=old.sampling,
            max_tokens=old.max_tokens,
            positions=None,
            block_hashes=old.block_hashes,
            arrival_s=self.clock.now,
        )
        running.calls.pop(Stage.PREFILL).close()
        decode.resume(new, running.blocks)
        prefill.release_sent(old)

    def _end_answer(self, sequence: TokenSequence) -> None:
        running = self._running.pop(sequence.request_id)
        for call in running.calls.values():
            call.close()
        job = running.job
        job.finish_s = job.last_token_s = self.clock.now
        job.num_output = len(running.sequence.output_ids)
        self._done.append(job)

    def _sequence(self, job: Job, *, hand_off: bool) -> TokenSequence:
        request, profile, block_size = job.request, self._spec.profile, self._spec.block_size
        spans: list[MediaSpan] = []
        start = 0
        for item in request.media:
            length = profile.image_tokens(item.num_pixels)
            spans.append(MediaSpan(start, length, item.mm_hash))
            start += length
        num_tokens = start + request.num_text_tokens
        return TokenSequence(
            request_id=f"{job.number}",
            prompt_ids=_PROMPTS.setdefault(num_tokens, [0] * num_tokens),
            sampling=_SAMPLING,
            max_tokens=request.num_output_tokens,
            positions=(),
            spans=spans,
            block_hashes=[
                blake2b(f"{request.prefix[: i + 1]!r}/{j}".encode(), digest_size=16).digest()
                for i in range(len(request.prefix))
                for j in range(request.prefix_tokens // block_size)
            ],
            hand_off=hand_off,
        )


def simulate(
    deployment: SimDeployment,
    requests: Sequence[SimRequest],
    *,
    give_up: Callable[[list[Job]], bool] | None = None,
    on_report: Callable[[Simulation], None] | None = None,
) -> Simulation:
    """Return a finished simulation of all requests (:meth:`Simulation.run`); deterministic."""
    simulation = Simulation(deployment, requests)
    simulation.run(give_up=give_up, on_report=on_report)
    return simulation


def _link(one: SimInstanceSpec, other: SimInstanceSpec) -> Link:
    if one.host != other.host:
        return NETWORK
    if one.device == other.device:
        return SAME_DEVICE
    return Link(handshake_s=one.profile.handshake_s, bytes_per_s=one.profile.link_bytes_per_s)
