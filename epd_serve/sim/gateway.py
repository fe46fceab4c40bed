"""A simulated gateway: the real table and router; each request on its way through encode, prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any

from epd_serve.cost.links import Link
from epd_serve.errors import InvalidRequest, Unavailable
from epd_serve.protocol.wire import MediaRef
from epd_serve.request import Sequence, SequenceState
from epd_serve.routing.policy import Demand, Policy, Route
from epd_serve.routing.stealing import StealRule
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.sim.clock import Clock
from epd_serve.sim.instance import Reservation, SimInstance
from epd_serve.sim.jobs import Attempt
from epd_serve.sim.jobs import Job as Job
from epd_serve.sim.request import SimRequest
from epd_serve.sim.stealing import SimStealing
from epd_serve.types import MediaSpan, SamplingParams, Stage

_SAMPLING = SamplingParams(seed=0, temperature=0.0)
_PROMPTS: dict[int, list[int]] = {}
_RETRIES = 2
_MODEL = "model"


class SimGateway:
    """``link``: between two instances by name; ``on_done``: told of each job that has ended."""

    def __init__(
        self,
        clock: Clock,
        instances: dict[str, SimInstance],
        policy: Policy,
        *,
        link: Callable[[SimInstance, SimInstance], Link],
        on_done: Callable[[Job], None],
        steal: StealRule | None = None,
    ) -> None:
        self._clock = clock
        self._instances = instances
        self._policy = policy
        self._link = link
        self._on_done = on_done
        self.table = InstanceTable([(name, "") for name in instances])
        for name, instance in instances.items():
            self.table.update(name, instance.info(), contains=0)
        self._attempts: dict[str, Attempt] = {}
        self._numbers = count()
        self.stealing: SimStealing | None = None
        if steal is not None and any(one.spec.steals for one in instances.values()):
            self.stealing = SimStealing(clock, self.table, steal, _MODEL)

    @property
    def num_open(self) -> int:
        return len(self._attempts)

    def report(self) -> None:
        """Hear of each instance in which something has changed."""
        for name, instance in self._instances.items():
            if instance.is_changed:
                self.table.report(name, instance.report())

    # ------------------------------------------------------------------ a request

    def serve(self, job: Job) -> None:
        profile = next(iter(self._instances.values())).spec.profile
        self._clock.after(profile.request_s, partial(self._dispatch, job, frozenset()))

    def _dispatch(self, job: Job, exclude: frozenset[str]) -> None:
        request = job.request
        try:
            demand = Demand(
                num_characters=4 * request.num_text_tokens,
                num_pixels=request.num_pixels,
                max_tokens=request.max_tokens,
                prefix=self._prefix(request) if self._policy.uses_prefix else (),
                prefix_characters=4 * request.num_text_tokens,
            )
            route = self._policy.choose_route(self.table, _MODEL, exclude=exclude, demand=demand)
            self._check_fits(job, route)
        except (Unavailable, InvalidRequest) as error:
            job.failure, job.finish_s = error.message, self._clock.now
            self._on_done(job)
            return
        self._send(
            job, f"{job.number}" if not job.num_retries else f"{job.number}.{job.num_retries}", route, exclude
        )

    def _send(self, job: Job, request_id: str, route: Route, exclude: frozenset[str] = frozenset()) -> None:
        images = dict(job.request.images)
        refs = [MediaRef(mm_hash=name, width=pixels, height=1) for name, pixels in images.items()]
        choose = self._policy.choose_encoders
        encoders = choose(self.table, route.prefill, refs, exclude=exclude) if refs else []
        attempt = Attempt(
            job=job,
            id=request_id,
            route=route,
            sequence=self._sequence(job, hand_off=not route.fused),
            num_before=job.num_output,
        )
        attempt.sequence.request_id = attempt.id
        self._attempts[attempt.id] = attempt
        prefill = self._instances[route.prefill.name]
        self._open(attempt, route.prefill, Stage.PREFILL)
        if not route.fused:
            self._open(attempt, route.decode, Stage.DECODE)
        for ref, record in zip(refs, encoders, strict=True):
            self._encode(attempt, ref, record, prefill)
        self._prefill(attempt)
        attempt.is_sent = True
        self._queue(attempt)

    def _queue(self, attempt: Attempt) -> None:
        """For thieves to see, once its features are all there."""
        if self.stealing is None:
            return
        is_new = attempt.job.first_token_s is None and not attempt.route.prefill.steals
        if is_new and attempt.is_sent and not attempt.encodes:
            self.stealing.queued(attempt.id, partial(self._move, attempt))
        else:
            self.stealing.poll()

    def _move(self, attempt: Attempt, thief: InstanceRecord) -> None:
        """Withdraw a request that has no token yet, and have it served by a thief."""
        assert self.stealing is not None
        attempt.close()
        self._abandon(attempt, dead="")
        work, request_id = attempt.route.prefill_work + attempt.route.decode_work, f"{attempt.id}.stolen"
        self.stealing.taken(request_id, thief.name)
        self._send(attempt.job, request_id, Route(prefill=thief, decode=thief, prefill_work=work))

    def _open(self, attempt: Attempt, record: InstanceRecord, stage: Stage) -> None:
        route, instance = attempt.route, self._instances[record.name]
        work = route.prefill_work if stage is Stage.PREFILL else route.decode_work
        prefix = route.prefix if stage is Stage.PREFILL else ()
        call = self.table.in_flight(record, stage, request_id=attempt.id, work=work, prefix=prefix)
        call.__enter__()
        attempt.calls.append(call)
        attempt.instances.add(record.name)
        instance.received.append(stage.value + attempt.id)
        instance.is_changed = True
        if stage is Stage.DECODE:
            instance.num_expected += 1
            attempt.is_expected = True

    def _encode(self, attempt: Attempt, ref: MediaRef, record: InstanceRecord, prefill: SimInstance) -> None:
        call = self.table.encoding(record, ref, attempt.id)
        encoding = call.__enter__()
        attempt.encodes.append(call)
        attempt.instances.add(record.name)
        instance = self._instances[record.name]
        instance.received.append(Stage.ENCODE.value + attempt.id)
        instance.is_changed = True
        profile = instance.spec.profile
        nbytes = profile.feature_token_bytes * profile.image_tokens(ref.width)

        def arrived() -> None:
            if not attempt.is_over:
                prefill.take_feature(ref.mm_hash, attempt.id, nbytes)

        def encoded(cached: bool) -> None:
            if attempt.is_over:
                return
            encoding.was_cached = cached
            attempt.encodes.remove(call)
            call.__exit__(None, None, None)
            instance.is_changed = True
            attempt.job.encoded_s = self._clock.now
            self._queue(attempt)
            if instance is prefill:
                arrived()
            else:
                seconds = self._link(instance, prefill).seconds(nbytes) + profile.feature_s
                instance.handed.join(
                    prefill.spec.name, lambda: instance.host(seconds, profile.feature_cpu_s, arrived)
                )

        if prefill.inbox.acquire(ref.mm_hash, attempt.id) is None:
            instance.tower.encode(ref.mm_hash, ref.width, encoded)
        else:
            encoded(True)

    def _prefill(self, attempt: Attempt) -> None:
        prefill, sequence = self._instances[attempt.route.prefill.name], attempt.sequence
        assert prefill.language is not None
        sequence.arrival_s = self._clock.now
        if attempt.route.fused:
            prefill.language.submit(sequence)
            return

        profile = prefill.spec.profile

        def submit() -> None:
            assert prefill.language is not None
            if not attempt.is_over:
                prefill.language.submit(sequence)

        def granted(blocks: Any) -> None:
            attempt.blocks = blocks
            cpu_s = profile.split_cpu_s * profile.split_s / max(profile.split_s + profile.hand_over_s, 1e-9)
            prefill.host(profile.split_s, cpu_s, submit)

        attempt.reservation = Reservation(
            sequence.num_prompt_tokens, sequence.block_hashes, self._clock.now, granted
        )
        self._instances[attempt.route.decode.name].reserve(attempt.reservation)

    # ------------------------------------------------------------------ what instances tell

    def prompt_done(self, instance: SimInstance, sequence: Sequence) -> None:
        """A prompt is computed: its first token is on its way, and its KV where another instance decodes."""
        attempt = self._attempts[sequence.request_id]
        job, now = attempt.job, self._clock.now
        instance.is_changed = True
        if self.stealing is not None:
            self.stealing.left(attempt.id)
        if job.first_token_s is None:
            job.first_token_s = now
        job.last_token_s = now
        job.token_times_s.append(now)
        instance.inbox.release(attempt.id)
        if attempt.route.fused:
            return
        decode = self._instances[attempt.route.decode.name]
        profile = instance.spec.profile
        computing_s = profile.step_s(sequence.num_prompt_tokens, 1, 0, sequence.num_prompt_tokens**2)
        sent_s = instance.send_s(self._link(instance, decode), sequence.num_prompt_tokens, computing_s)
        cpu_s = profile.split_cpu_s * profile.hand_over_s / max(profile.split_s + profile.hand_over_s, 1e-9)
        cpu_s += profile.split_token_cpu_s * sequence.num_prompt_tokens
        instance.host(sent_s + profile.hand_over_s, cpu_s, partial(self._hand_over, attempt, instance, decode))

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
        attempt.calls.pop(0).__exit__(None, None, None)  # P's is over
        attempt.instances = {decode.spec.name}
        decode.is_changed = prefill.is_changed = True
        blocks, attempt.blocks = attempt.blocks, None
        assert decode.language is not None and prefill.language is not None
        decode.language.resume(new, blocks)
        prefill.language.transferred(old)

    def tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """So many tokens came since the last time, at even distances; for the gaps between them."""
        job = self._attempts[sequence.request_id].job
        last = job.token_times_s[-1] if job.token_times_s else now
        job.token_times_s += [last + (now - last) * (i + 1) / num_tokens for i in range(num_tokens)]

    def ended(self, sequence: Sequence) -> None:
        attempt = self._attempts.pop(sequence.request_id)
        attempt.close()
        job = attempt.job
        job.num_output = attempt.num_before + len(sequence.output_ids)
        job.last_token_s = job.finish_s = self._clock.now
        if self.stealing is not None:
            self.stealing.ended(attempt.id)
        self._on_done(job)

    def lost(self, name: str) -> None:
        """An instance has died: its requests go elsewhere, with the tokens that they have."""
        self.table.mark_lost(name)
        ended = [one for one in self._attempts.values() if name in one.instances]
        for attempt in ended:  # all of them first: what one gives back is for none of the others
            attempt.close()
        for attempt in ended:
            self._abandon(attempt, dead=name)
        for attempt in ended:
            job = attempt.job
            if job.num_retries == _RETRIES:
                job.failure, job.finish_s = f"{name} died", self._clock.now
                self._on_done(job)
            else:
                job.num_retries += 1
                self._dispatch(job, frozenset({name}))

    def _abandon(self, attempt: Attempt, *, dead: str) -> None:
        """Give back what it holds at instances that live."""
        del self._attempts[attempt.id]
        if self.stealing is not None:
            self.stealing.left(attempt.id)
            if dead:
                self.stealing.ended(attempt.id)
        for name in attempt.instances - {dead}:
            instance = self._instances[name]
            instance.inbox.release(attempt.id)
            instance.is_changed = True
            if name == attempt.route.decode.name and attempt.is_expected:
                instance.num_expected -= 1
            if instance.language is not None:
                instance.language.abort(attempt.id)
                if name == attempt.route.prefill.name and attempt.sequence.state is SequenceState.TRANSFERRING:
                    instance.language.transferred(attempt.sequence)
        if attempt.blocks is not None and attempt.route.decode.name != dead:
            language = self._instances[attempt.route.decode.name].language
            assert language is not None
            language.unreserve(attempt.blocks)
        attempt.job.num_output = attempt.num_before + len(attempt.sequence.output_ids)

    # ------------------------------------------------------------------ parts

    def _sequence(self, job: Job, *, hand_off: bool) -> Sequence:
        request = job.request
        profile = next(iter(self._instances.values())).spec.profile
        spans: list[MediaSpan] = []
        start = 0
        for name, pixels in request.images:
            length = profile.image_tokens(pixels)
            spans.append(MediaSpan(start, length, name))
            start += length
        num_tokens = start + request.num_text_tokens + job.num_output
        job.num_tokens = start + request.num_text_tokens
        prompt = _PROMPTS.get(num_tokens)
        if prompt is None:
            prompt = _PROMPTS[num_tokens] = [0] * num_tokens
        return Sequence(
            request_id="",
            prompt_ids=prompt,
            sampling=_SAMPLING,
            max_tokens=max(request.num_output_tokens - job.num_output, 1),
            positions=(),
            spans=spans,
            block_hashes=self._hashes(request) if request.prefix else [],
            hand_off=hand_off,
        )

    def _check_fits(self, job: Job, route: Route) -> None:
        """As instances do. Raises InvalidRequest for what could not come to its end with all of the pool."""
        request = job.request
        profile = self._instances[route.prefill.name].spec.profile
        num_tokens = sum(profile.image_tokens(pixels) for _, pixels in request.images) + request.num_text_tokens
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
        size = next(iter(self._instances.values())).spec.block_size
        hashes: list[bytes] = []
        for i in range(len(request.prefix)):
            name = repr(request.prefix[: i + 1])
            hashes += [
                blake2b(f"{name}/{j}".encode(), digest_size=16).digest()
                for j in range(request.prefix_tokens // size)
            ]
        return hashes
