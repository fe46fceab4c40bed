"""A simulated gateway: real table, router and flows of requests, whose actions it carries out on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from epd_serve.cost.stages import Link
from epd_serve.errors import InvalidRequest
from epd_serve.flow import actions as do
from epd_serve.flow import events as on
from epd_serve.flow.events import Event
from epd_serve.flow.request import Asked, Fleet, RequestFlow
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.routes import Demand, Route, Router
from epd_serve.routing.table import InstanceTable, OpenCall
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.sim.device import Clock
from epd_serve.sim.instance import Reservation, SimInstance
from epd_serve.sim.workloads import SimRequest
from epd_serve.types import MediaSpan, SamplingParams, Stage


@dataclass(slots=True, eq=False)
class Job:
    """A request under way. Times are the clock's; None: not yet."""

    number: int
    request: SimRequest
    num_tokens: int
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_s: float | None = None
    num_output: int = 0
    token_times_s: list[float] = field(default_factory=list)
    failure: str = ""
    num_retries: int = 0


@dataclass(slots=True, eq=False)
class Attempt:
    """A request on one route. ``calls`` are those to P and D, ``encodes`` go by the items; ``instances`` have
    something of it."""

    run: SimRun
    id: str
    route: Route
    sequence: Sequence
    calls: dict[Stage, OpenCall] = field(default_factory=dict)
    encodes: dict[int, ExitStack] = field(default_factory=dict)
    instances: dict[str, None] = field(default_factory=dict)
    blocks: Any = None
    reservation: Reservation | None = None
    is_expected: bool = False
    is_over: bool = False
    is_prefilled: bool = False
    num_before: int = 0


class SimRun:
    """A job on its way, over all attempts; also how far its answer has come, for its flow."""

    def __init__(self, fleet: Fleet, job: Job, asked: Asked) -> None:
        self.job = job
        self.flow = RequestFlow(fleet, asked, self)
        self.attempt: Attempt | None = None
        self.complete = False
        self.events: list[Event] = []
        self.is_feeding = False

    @property
    def begun(self) -> bool:
        return self.job.first_token_s is not None

    def tokens_of_each(self) -> list[list[int]]:
        """As many as there are."""
        return [[0] * self.num_output()]

    def num_output(self) -> int:
        return 0 if self.attempt is None else self.attempt.num_before + len(self.attempt.sequence.output_ids)


_SAMPLING = SamplingParams(seed=0, temperature=0.0)
_PROMPTS: dict[int, list[int]] = {}
_MODEL = "model"
_MAX_ATTEMPTS = 3


class SimGateway:
    """``link``: between two instances by name; ``on_done``: told of each job that has ended."""

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
        self._link = link
        self._on_done = on_done
        self.table = InstanceTable([(name, "") for name in instances])
        for name, instance in instances.items():
            self.table.update(name, instance.info(), contains=0)
        self._fleet = Fleet(
            table=self.table,
            router=router,
            max_attempts=_MAX_ATTEMPTS,
            encode_timeout_s=float("inf"),
        )
        self._spec = next(iter(instances.values())).spec  # of profile and blocks: prompts are the same everywhere
        self._attempts: dict[str, Attempt] = {}
        self._looking: list[SimRun] | None = None  # while an instance dies

    @property
    def num_open(self) -> int:
        return len(self._attempts)

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence is of one of its requests."""
        return sequence.request_id in self._attempts

    # ------------------------------------------------------------------ a request

    def serve(self, job: Job) -> None:
        self._clock.after(self._spec.profile.request_s, partial(self._begin, job))

    def _begin(self, job: Job) -> None:
        request = job.request
        demand = Demand(
            num_characters=4 * request.num_text_tokens,
            num_pixels=request.num_pixels,
            max_tokens=request.max_tokens,
            prefix=self._prefix(request) if self._fleet.router.routes.uses_prefix else (),
            prefix_characters=4 * request.num_text_tokens,
        )
        asked = Asked(id=f"{job.number}", model=_MODEL, demand=demand, has_media=bool(request.media))
        self._feed(SimRun(self._fleet, job, asked), on.Look(self._clock.now))

    def _feed(self, run: SimRun, event: on.Event) -> None:
        """Do what follows from an event."""
        run.events.append(event)
        if run.is_feeding:
            return
        run.is_feeding = True
        while run.events:
            sent: Attempt | None = None
            for action in run.flow.tell(run.events.pop(0)):
                if isinstance(action, do.CallPrefill):
                    try:
                        sent = self._send(run, action)
                    except InvalidRequest as refusal:
                        run.events.append(on.Refused(Stage.PREFILL, refusal))
                        break
                else:
                    self._do(run, action)
            if sent is not None:
                self._prefill(sent)
        run.is_feeding = False

    def _send(self, run: SimRun, action: do.CallPrefill) -> Attempt:
        """Raises InvalidRequest as instances do, for what could not come to its end with all of the pool."""
        run.attempt, route = None, action.route
        self._check_fits(run.job, action.route)
        sequence = self._sequence(run.job, action.refs, len(action.generated), hand_off=not route.fused)
        sequence.request_id = action.request_id
        run.attempt = Attempt(
            run=run, id=action.request_id, route=route, sequence=sequence, num_before=len(action.generated)
        )
        self._attempts[action.request_id] = run.attempt
        self._open(run.attempt, Stage.PREFILL)
        if not route.fused:
            self._open(run.attempt, Stage.DECODE)
        return run.attempt

    def _do(self, run: SimRun, action: do.Action) -> None:
        attempt, job = run.attempt, run.job
        match action:
            case do.Name():
                refs = job.request.media
                run.events.append(on.Named(refs, [None] * len(refs)))
            case do.Try():
                job.num_retries += 1
            case do.Wait():
                if self._looking is None:
                    run.events.append(on.Look(self._clock.now))
                else:
                    self._looking.append(run)
        if attempt is not None:  # else it was not sent: there is nothing to be undone
            self._do_at_instances(attempt, action)
        if isinstance(action, do.Done | do.Fail):
            self._end(run, action)

    def _do_at_instances(self, attempt: Attempt, action: do.Action) -> None:
        match action:
            case do.Encode():
                self._encode(attempt, action)
            case do.HandOver(route):
                attempt.calls.pop(Stage.PREFILL).close()
                attempt.instances = {route.decode.name: None}
            case do.CancelEncode(item):
                attempt.encodes.pop(item).close()
            case do.EndTry():
                self._over(attempt)
                self._give_back(attempt)
            case do.Done():
                self._over(attempt)

    def _open(self, attempt: Attempt, stage: Stage) -> None:
        route = attempt.route
        if stage is Stage.PREFILL:
            record, work, prefix = route.prefill, route.prefill_work, route.prefix
        else:
            record, work, prefix = route.decode, route.decode_work, ()
        instance = self._instances[record.name]
        attempt.calls[stage] = self.table.in_flight(record, stage, request_id=attempt.id, work=work, prefix=prefix)
        attempt.instances[record.name] = None
        instance.received.append(stage.value + attempt.id)
        instance.is_changed = True
        if stage is Stage.DECODE:
            instance.num_expected += 1
            attempt.is_expected = True

    def _encode(self, attempt: Attempt, action: do.Encode) -> None:
        ref, record, prefill = action.ref, action.encoder, self._instances[action.prefill.name]
        attempt.encodes[action.item] = stack = ExitStack()
        stack.enter_context(self.table.encoding(record, ref, attempt.id))
        attempt.instances[record.name] = None
        instance = self._instances[record.name]
        instance.received.append(Stage.ENCODE.value + attempt.id)
        instance.is_changed = True
        profile = instance.spec.profile
        pixels = _pixels(ref)
        nbytes = profile.feature_token_bytes * sum(map(profile.image_tokens, pixels))

        def arrived() -> None:
            if not attempt.is_over and not attempt.is_prefilled:  # it may have used another request's feature
                prefill.take_feature(ref.mm_hash, attempt.id, nbytes)

        def encoded(cached: bool) -> None:
            if attempt.is_over:
                return
            attempt.encodes.pop(action.item).close()
            instance.is_changed = True
            self._feed(attempt.run, on.Encoded(action.item))
            if instance is prefill:
                arrived()
            else:
                self._clock.after(self._link(instance, prefill).seconds(nbytes), arrived)

        if prefill.features.acquire(ref.mm_hash, attempt.id) is None:
            instance.tower.encode(ref.mm_hash, pixels, encoded)
        else:
            encoded(True)

    def _prefill(self, attempt: Attempt) -> None:
        prefill, sequence = self._instances[attempt.route.prefill.name], attempt.sequence
        assert prefill.language is not None
        sequence.arrival_s = self._clock.now
        if attempt.route.fused:
            prefill.language.submit(sequence)
            return

        def submit() -> None:
            assert prefill.language is not None
            if not attempt.is_over:
                prefill.language.submit(sequence)

        def granted(blocks: Any) -> None:
            attempt.blocks = blocks
            self._clock.after(0.0, submit)

        attempt.reservation = Reservation(
            sequence.num_prompt_tokens, sequence.block_hashes, self._clock.now, granted
        )
        self._instances[attempt.route.decode.name].reserve(attempt.reservation)

    def _over(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return  # an instance failed behind the end
        for call in attempt.calls.values():
            call.close()
        for encode in attempt.encodes.values():
            encode.close()
        attempt.calls.clear()
        attempt.encodes.clear()
        del self._attempts[attempt.id]
        attempt.is_over = True
        if attempt.reservation is not None:
            attempt.reservation.is_over = True

    def _give_back(self, attempt: Attempt) -> None:
        """Give back what a try that has failed holds at instances that live."""
        for name in attempt.instances:
            instance = self._instances[name]
            if not instance.ready:
                continue
            instance.features.release(attempt.id)
            instance.is_changed = True
            if name == attempt.route.decode.name and attempt.is_expected:
                instance.num_expected -= 1
            if instance.language is not None:
                instance.language.abort(attempt.id)
                if name == attempt.route.prefill.name and attempt.sequence.state is SequenceState.TRANSFERRING:
                    instance.language.transferred(attempt.sequence)
        decode = self._instances[attempt.route.decode.name]
        if attempt.blocks is not None and decode.ready:
            assert decode.language is not None
            decode.language.unreserve(attempt.blocks)
        attempt.instances = {}
        attempt.blocks = None

    def _end(self, run: SimRun, last: do.Done | do.Fail) -> None:
        job, now = run.job, self._clock.now
        job.finish_s, job.num_output = now, run.num_output()
        if isinstance(last, do.Done):
            job.last_token_s = now
        else:
            job.failure = last.failure.message
        self._on_done(job)

    # ------------------------------------------------------------------ what instances tell

    def prompt_done(self, instance: SimInstance, sequence: Sequence) -> None:
        """A prompt is computed: its first token is on its way, and its KV where another instance decodes."""
        attempt = self._attempts[sequence.request_id]
        job, now = attempt.run.job, self._clock.now
        instance.is_changed = True
        self._feed(attempt.run, on.Opened(Stage.PREFILL, follows=not attempt.route.fused))
        if job.first_token_s is None:
            job.first_token_s = now
        job.last_token_s = now
        job.token_times_s.append(now)
        instance.features.release(attempt.id)
        attempt.is_prefilled = True
        if attempt.route.fused:
            return
        decode = self._instances[attempt.route.decode.name]
        profile = instance.spec.profile
        computing_s = profile.step_s(sequence.num_prompt_tokens, 1, 0, sequence.num_prompt_tokens**2)
        link = self._link(instance, decode)
        sent_s = instance.send_s(decode.spec.name, link, sequence.num_prompt_tokens, computing_s)
        self._clock.after(sent_s, partial(self._hand_over, attempt, instance, decode))

    def _hand_over(self, attempt: Attempt, prefill: SimInstance, decode: SimInstance) -> None:
        if attempt.is_over:
            return
        old = attempt.sequence
        attempt.sequence = new = Sequence(
            request_id=old.request_id,
            prompt_ids=old.prompt_ids,
            sampling=old.sampling,
            max_tokens=old.max_tokens,
            positions=None,
            block_hashes=old.block_hashes,
            arrival_s=self._clock.now,
        )
        decode.num_expected -= 1
        attempt.is_expected = False
        decode.is_changed = prefill.is_changed = True
        blocks, attempt.blocks = attempt.blocks, None
        self._feed(attempt.run, on.Ended(Stage.PREFILL))
        self._feed(attempt.run, on.Opened(Stage.DECODE))
        assert decode.language is not None and prefill.language is not None
        decode.language.resume(new, blocks)
        prefill.language.transferred(old)

    def tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """So many tokens came since the last time, at even distances; for the gaps between them."""
        job = self._attempts[sequence.request_id].run.job
        last = job.token_times_s[-1] if job.token_times_s else now
        job.token_times_s += [last + (now - last) * (i + 1) / num_tokens for i in range(num_tokens)]

    def ended(self, sequence: Sequence) -> None:
        attempt = self._attempts[sequence.request_id]
        attempt.run.complete = True
        self._feed(attempt.run, on.Ended(Stage.PREFILL if attempt.route.fused else Stage.DECODE))

    def lost(self, name: str) -> None:
        """An instance has died. What its requests give back is for none of the others that it had."""
        self.table.mark_lost(name)
        looking: list[SimRun] = []
        self._looking = looking
        for attempt in list(self._attempts.values()):
            self._feed(attempt.run, on.Lost(name))
        self._looking = None
        for run in looking:
            self._feed(run, on.Look(self._clock.now))

    # ------------------------------------------------------------------ parts

    def _sequence(self, job: Job, media: list[MediaRef], num_before: int, *, hand_off: bool) -> Sequence:
        request = job.request
        profile = self._spec.profile
        spans: list[MediaSpan] = []
        start = 0
        for part in (part for item in media for part in item.segments):
            length = sum(map(profile.image_tokens, _pixels(part)))
            spans.append(MediaSpan(start, length, part.mm_hash))
            start += length
        num_tokens = start + request.num_text_tokens + num_before
        job.num_tokens = start + request.num_text_tokens
        prompt = _PROMPTS.get(num_tokens)
        if prompt is None:
            prompt = _PROMPTS[num_tokens] = [0] * num_tokens
        return Sequence(
            request_id="",
            prompt_ids=prompt,
            sampling=_SAMPLING,
            max_tokens=max(request.num_output_tokens - num_before, 1),
            positions=(),
            spans=spans,
            block_hashes=self._hashes(request) if request.prefix else [],
            hand_off=hand_off,
        )

    def _check_fits(self, job: Job, route: Route) -> None:
        """Raises InvalidRequest."""
        request = job.request
        profile = self._instances[route.prefill.name].spec.profile
        pixels = (count for item in request.media for count in _pixels(item))
        num_tokens = sum(map(profile.image_tokens, pixels)) + request.num_text_tokens
        for record, num_new in ((route.prefill, 0), (route.decode, request.num_output_tokens)):
            language = self._instances[record.name].language
            assert language is not None
            language.queues.tables.check_fits(num_tokens, num_new, 1)

    def _prefix(self, request: SimRequest) -> tuple[tuple[int, bytes], ...]:
        """Each beginning of the prompt in characters, and its name."""
        return tuple(
            (4 * request.prefix_tokens * (i + 1), blake2b(repr(request.prefix[: i + 1]).encode()).digest())
            for i in range(len(request.prefix))
        )

    def _hashes(self, request: SimRequest) -> list[bytes]:
        """One for each full block of the named parts."""
        size = self._spec.block_size
        hashes: list[bytes] = []
        for i in range(len(request.prefix)):
            name = repr(request.prefix[: i + 1])
            hashes += [
                blake2b(f"{name}/{j}".encode(), digest_size=16).digest()
                for j in range(request.prefix_tokens // size)
            ]
        return hashes


def _pixels(ref: MediaRef) -> list[int]:
    """Pixels of the pictures that an item is to the tower."""
    return [ref.num_pixels // ref.num_pictures] * ref.num_pictures
