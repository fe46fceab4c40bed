"""A simulated gateway: real instance table, router and retry; requests pass E, P and D on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from epd_serve.cost.stages import Link
from epd_serve.errors import ServeError
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.retry import LOOK_AGAIN_S, Retry
from epd_serve.routing.routes import Demand, Route, Router
from epd_serve.routing.table import InstanceRecord, InstanceTable, OpenCall
from epd_serve.sched.sequence import Sequence
from epd_serve.sim.device import Clock
from epd_serve.sim.instance import Reservation, SimInstance
from epd_serve.sim.workloads import SimRequest
from epd_serve.types import MediaSpan, SamplingParams, Stage

_MODEL = "model"
_SAMPLING = SamplingParams(seed=0, temperature=0.0)
_PROMPTS: dict[int, list[int]] = {}
#: Wait for a missing stage, as at a gateway whose instances start immediately.
WAIT_S = 55.0


@dataclass(slots=True, eq=False)
class Job:
    """A request and its outcome, in virtual time; None: not yet."""

    number: int
    request: SimRequest
    num_tokens: int
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    num_output: int = 0
    failure: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    """A routed request; ``calls`` to P and D, ``blocks`` reserved at D."""

    job: Job
    route: Route
    sequence: Sequence
    calls: dict[Stage, OpenCall] = field(default_factory=dict)
    blocks: Any = None
    is_prefilled: bool = False


class SimGateway:
    """Sends each request to its instances.

    Args:
        link: returns the link between two instances.
        on_done: called with each finished job.
    """

    def __init__(
        self,
        clock: Clock,
        instances: dict[str, SimInstance],
        router: Router,
        *,
        link: Callable[[SimInstance, SimInstance], Link],
        on_done: Callable[[Job], None],
    ) -> None:
        self._clock = clock
        self._instances = instances
        self._router = router
        self._link = link
        self._on_done = on_done
        self.table = InstanceTable([(name, "") for name in instances])
        for name, instance in instances.items():
            self.table.update(name, instance.info(), contains=0)
        self._spec = next(iter(instances.values())).spec  # prompts have the same tokens and blocks everywhere
        self._running: dict[str, _Running] = {}
        self._complete_at_s: float | None = None
        self.note_stages()

    @property
    def num_open(self) -> int:
        return len(self._running)

    def has(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._running

    def note_stages(self) -> None:
        """Record when each stage last had an instance; call regularly."""
        if not self.table.missing_stages():
            self._complete_at_s = self._clock.now

    # ------------------------------------------------------------------ requests

    def serve(self, job: Job) -> None:
        request = job.request
        demand = Demand(
            num_characters=4 * request.num_text_tokens,
            num_pixels=request.num_pixels,
            max_tokens=request.max_tokens,
            prefix=self._prefix(request) if self._router.routes.uses_prefix else (),
            prefix_characters=4 * request.num_text_tokens,
        )
        retry = Retry(self.table, self._router, _MODEL, demand)
        self._clock.after(self._spec.profile.request_s, partial(self._send, job, retry))

    def _send(self, job: Job, retry: Retry) -> None:
        """Call P, D and the encoders at once; retry later if a stage lacks an instance."""
        request, now_s = job.request, self._clock.now
        try:
            route = retry.pick_route(now_s, WAIT_S, self._complete_at_s)
            if route is None:
                self._clock.after(LOOK_AGAIN_S, partial(self._send, job, retry))
                return
            self._check_fits(job, route)
        except ServeError as error:
            job.finish_s, job.failure = now_s, error.message
            self._on_done(job)
            return
        running = _Running(job, route, self._sequence(job, hand_off=not route.fused))
        self._running[f"{job.number}"] = running
        self._open(running, Stage.PREFILL, route.prefill)
        if not route.fused:
            self._open(running, Stage.DECODE, route.decode)
            self._instances[route.decode.name].num_expected += 1
        items = list({ref.mm_hash: ref for ref in request.media}.values())
        encoders = self._router.encoders.choose_encoders(self.table, route.prefill, items) if items else []
        for ref, encoder in zip(items, encoders, strict=True):
            self._encode(running, ref, encoder)
        self._prefill(running)

    def _open(self, running: _Running, stage: Stage, record: InstanceRecord) -> None:
        route, request_id = running.route, running.sequence.request_id
        work, prefix = (route.prefill_work, route.prefix) if stage is Stage.PREFILL else (route.decode_work, ())
        running.calls[stage] = self.table.open_call(record, stage, request_id=request_id, work=work, prefix=prefix)
        self._instances[record.name].receive(stage, request_id)

    def _encode(self, running: _Running, ref: MediaRef, record: InstanceRecord) -> None:
        request_id, encoder = running.sequence.request_id, self._instances[record.name]
        prefill = self._instances[running.route.prefill.name]
        call = ExitStack()
        call.enter_context(self.table.open_encode(record, ref, request_id))
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
                self._clock.after(self._link(encoder, prefill).seconds(nbytes), arrived)

        if prefill.features.acquire(ref.mm_hash, request_id) is None:
            encoder.tower.encode(ref.mm_hash, ref.num_pixels, encoded)
        else:
            encoded()

    def _prefill(self, running: _Running) -> None:
        """Submit the prompt to P, after D has reserved blocks if D is separate."""
        language, sequence = self._instances[running.route.prefill.name].language, running.sequence
        assert language is not None
        sequence.arrival_s = self._clock.now
        if running.route.fused:
            language.submit(sequence)
            return

        def granted(blocks: Any) -> None:
            running.blocks = blocks
            self._clock.after(0.0, lambda: language.submit(sequence))

        self._instances[running.route.decode.name].reserve(
            Reservation(sequence.num_prompt_tokens, sequence.block_hashes, self._clock.now, granted)
        )

    # ------------------------------------------------------------------ events at instances

    def prompt_done(self, instance: SimInstance, sequence: Sequence) -> None:
        """Emit the first token of a computed prompt and send its KV to a separate D."""
        running = self._running[sequence.request_id]
        instance.is_changed = True
        running.job.first_token_s = running.job.last_token_s = self._clock.now
        instance.features.release(sequence.request_id)
        running.is_prefilled = True
        if running.route.fused:
            return
        decode = self._instances[running.route.decode.name]
        num_tokens = sequence.num_prompt_tokens
        computing_s = instance.spec.profile.step_s(num_tokens, 1, 0, num_tokens**2)
        sent_s = instance.send_s(decode.spec.name, self._link(instance, decode), num_tokens, computing_s)
        self._clock.after(sent_s, partial(self._hand_over, running, instance, decode))

    def _hand_over(self, running: _Running, prefill: SimInstance, decode: SimInstance) -> None:
        old = running.sequence
        running.sequence = new = Sequence(
            request_id=old.request_id,
            prompt_ids=old.prompt_ids,
            sampling=old.sampling,
            max_tokens=old.max_tokens,
            positions=None,
            block_hashes=old.block_hashes,
            arrival_s=self._clock.now,
        )
        decode.num_expected -= 1
        decode.is_changed = prefill.is_changed = True
        running.calls.pop(Stage.PREFILL).close()
        assert decode.language is not None and prefill.language is not None
        decode.language.resume(new, running.blocks)
        prefill.language.transferred(old)

    def ended(self, sequence: Sequence) -> None:
        """Finish the job of a complete sequence."""
        running = self._running.pop(sequence.request_id)
        for call in running.calls.values():
            call.close()
        job = running.job
        job.finish_s = job.last_token_s = self._clock.now
        job.num_output = len(running.sequence.output_ids)
        self._on_done(job)

    # ------------------------------------------------------------------ prompts

    def _sequence(self, job: Job, *, hand_off: bool) -> Sequence:
        request, profile = job.request, self._spec.profile
        spans: list[MediaSpan] = []
        start = 0
        for item in request.media:
            length = profile.image_tokens(item.num_pixels)
            spans.append(MediaSpan(start, length, item.mm_hash))
            start += length
        job.num_tokens = num_tokens = start + request.num_text_tokens
        return Sequence(
            request_id=f"{job.number}",
            prompt_ids=_PROMPTS.setdefault(num_tokens, [0] * num_tokens),
            sampling=_SAMPLING,
            max_tokens=request.num_output_tokens,
            positions=(),
            spans=spans,
            block_hashes=self._hashes(request) if request.prefix else [],
            hand_off=hand_off,
        )

    def _check_fits(self, job: Job, route: Route) -> None:
        """Raise InvalidRequest, as instances do, for a request larger than the whole pool."""
        request, profile = job.request, self._spec.profile
        num_tokens = sum(profile.image_tokens(item.num_pixels) for item in request.media) + request.num_text_tokens
        for record, num_new in ((route.prefill, 0), (route.decode, request.num_output_tokens)):
            language = self._instances[record.name].language
            assert language is not None
            language.queues.tables.check_fits(num_tokens, num_new, 1)

    def _prefix(self, request: SimRequest) -> tuple[tuple[int, bytes], ...]:
        """Return each prefix of the prompt as (characters, hash)."""
        return tuple(
            (4 * request.prefix_tokens * (i + 1), blake2b(repr(request.prefix[: i + 1]).encode()).digest())
            for i in range(len(request.prefix))
        )

    def _hashes(self, request: SimRequest) -> list[bytes]:
        """Return a hash for each full block of the prefix."""
        size = self._spec.block_size
        return [
            blake2b(f"{request.prefix[: i + 1]!r}/{j}".encode(), digest_size=16).digest()
            for i in range(len(request.prefix))
            for j in range(request.prefix_tokens // size)
        ]
