"""Decode stage: reserve blocks, read the KV that P announces, take requests over, generate."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.engine.engine import Engine
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import (
    NO_ROOM,
    PEER_UNREACHABLE,
    REQUEST_ENDED,
    InstanceFailed,
    InvalidRequest,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.instance.answer import Answer, Generation
from epd_serve.instance.feature_receiver import ORPHAN_S
from epd_serve.instance.text.tokenizer import Tokenizer
from epd_serve.protocol import wire
from epd_serve.recent import Recent
from epd_serve.rpc.server import Reply
from epd_serve.sched.sequence import Sequence
from epd_serve.telemetry.span import DECODE_QUEUE
from epd_serve.transfer.kv_receiver import KVReceiver
from epd_serve.transfer.transport import PeerGone, TransferError, Transport

if TYPE_CHECKING:
    from epd_serve.instance.loading.model import KVCacheMemory
    from epd_serve.instance.text.grammar_compiler import GrammarCompiler


@dataclass(eq=False, slots=True)
class _Request:
    """A request that the gateway expects here, or that a prefill instance has handed over.

    Attributes:
        generation: its answer, set at the hand-off.
        orphan_at: when to drop it; None once the gateway has called for it.
    """

    generation: asyncio.Future[Generation]
    orphan_at: float | None


@dataclass(kw_only=True, eq=False)
class Decoder:
    """Decodes requests whose prompt another instance computed.

    The gateway's call and P's reservation and hand-off come in any order. A hand-off without a gateway's call is
    dropped after ORPHAN_S.

    Attributes:
        compiler: compiles grammars; None if the model supports none.
        requests: expected and running requests, by id.
    """

    engine: Engine
    memory: KVCacheMemory
    tokenizer: Tokenizer
    transport: Transport
    compiler: GrammarCompiler | None
    telemetry: InstanceTelemetry
    queue_timeout_s: float

    def __post_init__(self) -> None:
        self._reservations = KVReceiver(self.memory, self.transport, self.engine.unreserve)
        self._asking: set[str] = set()  # transfers that wait for blocks
        self.requests: dict[str, _Request] = {}
        self._ended: Recent[str] = Recent()

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def has_begun(self, request_id: str) -> bool:
        """Return whether a request has been handed over or has reserved blocks."""
        request = self.requests.get(request_id)
        return (request is not None and request.generation.done()) or self._reservations.has_blocks(request_id)

    def drop_orphans(self, now: float = math.inf) -> None:
        """Drop hand-offs that no gateway has called for by ``now``."""
        for request_id, request in list(self.requests.items()):
            if request.orphan_at is not None and request.orphan_at <= now:
                self._end(request_id)

    # ------------------------------------------------------------------ from the gateway

    async def decode(self, request: wire.DecodeRequest) -> Reply:
        """Wait for a request's hand-off, then answer from the second token on."""
        request_id = request.request_id
        if request_id in self._ended:
            raise Unavailable(f"request {request_id} has ended")
        one = self.requests.setdefault(request_id, _Request(asyncio.Future(), math.inf))
        if one.orphan_at is None:
            raise InvalidRequest(f"request {request_id} is being served already", param="request_id")
        one.orphan_at = None
        try:
            generation = await one.generation
            return await generation.reply(stream=request.stream, on_close=lambda: self._end(request_id))
        except BaseException:
            self._end(request_id)
            raise

    def _end(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.engine.outbox.receivers.pop(request_id, None)
        self.engine.abort(request_id)
        self.telemetry.timeline.drop(request_id)
        self._reservations.abandon(request_id)
        self._ended.add(request_id)

    # ------------------------------------------------------------------ from the prefill instance

    async def reserve(self, request: wire.ReserveRequest) -> wire.ReserveReply:
        """Reserve blocks for a request, waiting for free ones in order of priority, then arrival.

        Raises InvalidRequest for KV of another layout or a request that can never fit; Unavailable if the request
        was cancelled here or waited for ``queue_timeout_s``.
        """
        if request.layout != self.memory.layout:
            raise InvalidRequest(
                f"KV layout {request.layout} differs from this instance's {self.memory.layout}; "
                "prefill and decode instances need the same model, dtype and block_size"
            )
        self.engine.check_fits(request.num_prompt_tokens, request.max_tokens, request.num_sequences)
        reservation = self._reservations.open(request, time.monotonic())
        if reservation is None or request.request_id in self._ended:
            self._reservations.release(request.transfer_id)
            raise _ended(request.request_id)
        if request.transfer_id in self._asking:
            raise InvalidRequest(f"transfer {request.transfer_id} is waiting for blocks already")
        if reservation.blocks is None:
            asked = self.engine.reserve(
                request.request_id,
                request.num_prompt_tokens,
                request.num_sequences,
                request.block_hashes,
                request.priority,
            )
            self._asking.add(request.transfer_id)
            try:
                async with asyncio.timeout(self.queue_timeout_s):
                    blocks = await asyncio.wrap_future(asked.granted)
            except BaseException as error:
                self.engine.withdraw(asked)
                self._reservations.release(request.transfer_id)
                if not isinstance(error, TimeoutError):
                    raise
                raise Unavailable(
                    f"no free KV blocks for the request within {self.queue_timeout_s:g} s; try again later",
                    code=NO_ROOM,
                ) from error
            finally:
                self._asking.discard(request.transfer_id)
            if blocks is not None and reservation.has_ended:
                self.engine.unreserve(blocks)  # the request has ended since
            elif blocks is not None:
                self._reservations.grant(reservation, blocks, time.monotonic())
        if reservation.blocks is None or reservation.has_ended:
            raise _ended(request.request_id)
        num_blocks = num_blocks_for(request.num_prompt_tokens, self.memory.layout.block_size)
        maps = await asyncio.to_thread(self.memory.maps, request.region) if request.region.handle else False
        return wire.ReserveReply(
            block_ids=reservation.blocks.written(num_blocks),
            num_cached_blocks=reservation.blocks.num_cached,
            name=self.memory.region.name,
            staged_cells=self.memory.staged_cells,
            maps=maps,
        )

    def renew(self, ref: wire.TransferRef) -> None:
        if not self._reservations.renew(ref.transfer_id, time.monotonic()):
            raise Unavailable(f"transfer {ref.transfer_id} has ended")

    async def complete(self, handoff: wire.Handoff) -> None:
        """Take a request over. Raises Unavailable if it was cancelled or its lease expired. Idempotent."""
        # build the answer first: if this fails, P cancels and the reservation frees the blocks
        answer = Answer(self.tokenizer, handoff.output, handoff.sampling, handoff.prompt_ids)
        if handoff.generated:  # replaying a long answer takes time
            await asyncio.to_thread(answer.replay, handoff.generated)
        constraint = None
        if self.compiler is not None:
            _, constraint = await self.compiler.constrain(handoff.sampling, is_tried=True)
        if self._reservations.is_completed(handoff.transfer_id):
            return
        if handoff.logprobs:
            answer.learn(handoff.logprobs)
        for index, first in enumerate(handoff.first):
            answer.push(index, first.token_id, first.logprob, first.finish_reason)  # P has sent these already
        reservation = self._reservations.complete(handoff.transfer_id)
        if reservation is None or reservation.blocks is None:
            raise Unavailable(f"transfer {handoff.transfer_id} has ended")
        if handoff.request_id in self._ended:
            self.engine.unreserve(reservation.blocks)
            raise _ended(handoff.request_id)
        generation = Generation(answer, self.engine, self.telemetry.timeline, handoff.request_id)
        self.engine.outbox.receivers[handoff.request_id] = generation
        self.telemetry.timeline.record_arrival(handoff.request_id, DECODE_QUEUE)
        self.engine.resume(
            Sequence(
                request_id=handoff.request_id,
                prompt_ids=handoff.prompt_ids,
                sampling=handoff.sampling,
                max_tokens=handoff.max_tokens,
                positions=None,  # the prompt has been computed already
                position_delta=handoff.position_delta,
                block_hashes=reservation.request.block_hashes,
                constraint=constraint,
                output_ids=list(handoff.generated),
                num_cached=handoff.num_cached_tokens,
            ),
            reservation.blocks,
            [
                (first.token_id, answer.choices[index].finish_reason is not None)
                for index, first in enumerate(handoff.first)
            ],
        )
        orphan_at = time.monotonic() + ORPHAN_S
        request = self.requests.setdefault(handoff.request_id, _Request(asyncio.Future(), orphan_at))
        if not request.generation.done():
            request.generation.set_result(generation)

    async def read_kv(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        """Read announced KV into the blocks of its transfers, skipping transfers that have ended here.

        Raises InstanceFailed if reading fails.
        """
        try:
            parts, seconds = await self._reservations.read(announcement)
        except TransferError as error:
            code = PEER_UNREACHABLE if isinstance(error, PeerGone) else None
            raise InstanceFailed(f"the KV cannot be read: {error}", code=code) from error
        if num_blocks := sum(len(part.block_ids) for part in parts):
            num_layers = announcement.end_layer - announcement.first_layer
            self.telemetry.metrics.kv_read(self.memory.nbytes(num_layers, num_blocks), seconds)
        return wire.KVTaken([part.transfer_id for part in parts])

    def cancel(self, ref: wire.TransferRef) -> None:
        """End a transfer that P gave up; with a reason, fail its request. Idempotent."""
        self._reservations.release(ref.transfer_id)
        if ref.reason:
            self._fail(ref.request_id, InstanceFailed(ref.reason))

    # ------------------------------------------------------------------ housekeeping

    def expire(self) -> None:
        """Expire leases of lost prefill instances, and drop unclaimed hand-offs."""
        now = time.monotonic()
        for reservation in self._reservations.expire(now):
            error = StageTimeout("the prefill instance did not finish its KV transfer")
            self._fail(reservation.request.request_id, error)
        self.drop_orphans(now)

    def check_integrity(self) -> None:
        self._reservations.check_integrity()

    def _fail(self, request_id: str, error: ServeError) -> None:
        request = self.requests.get(request_id)
        if request is not None and not request.generation.done():
            request.generation.set_exception(error)


def _ended(request_id: str) -> Unavailable:
    return Unavailable(f"request {request_id} was cancelled", code=REQUEST_ENDED)
