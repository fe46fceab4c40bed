"""The decode stage: reservations, reading KV that P announces, hand-over, generation."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.engine.computing import KVCacheMemory
from epd_serve.engine.engine import Engine, Listeners
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
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.instance.text.tokenizer import Tokenizer
from epd_serve.protocol import wire
from epd_serve.rpc.server import Reply
from epd_serve.sched.sequence import Sequence
from epd_serve.telemetry.span import DECODE_QUEUE
from epd_serve.transfer.reservation import Reservation, ReservationState, ReservationTable, Tombstones
from epd_serve.transfer.transport import PeerGone, Piece, StillCopying, TransferError, Transport, paired

if TYPE_CHECKING:
    from epd_serve.instance.text.grammar_compiler import GrammarCompiler


@dataclass(eq=False, slots=True)
class _Waiting:
    """A reservation that waits for blocks."""

    reservation: Reservation
    request: wire.ReserveRequest
    arrival_s: float
    turn: asyncio.Future[None]


class Decoder:
    """Decodes requests whose prompt another instance computed.

    The gateway's "expect" and P's reservation and hand-off come in any order; a hand-off that no gateway asks for
    is dropped after ORPHAN_S.

    Attributes:
        generations: of the answers that are decoded here, by request.
        expected: requests that the gateway has announced; done when they are handed over.
        waiting: reservations that wait for room: the most urgent first, and of these the oldest.
    """

    def __init__(
        self,
        engine: Engine,
        memory: KVCacheMemory,
        tokenizer: Tokenizer,
        *,
        transport: Transport,
        listeners: Listeners,
        compiler: GrammarCompiler | None,
        telemetry: InstanceTelemetry,
        queue_timeout_s: float,
    ) -> None:
        """``compiler`` is None where no answer follows a grammar."""
        self._engine = engine
        self._memory = memory
        self._tokenizer = tokenizer
        self._transport = transport
        self._listeners = listeners
        self._compiler = compiler
        self._telemetry = telemetry
        self._queue_timeout_s = queue_timeout_s
        self._reservations = ReservationTable(free=engine.unreserve)
        self.waiting: list[_Waiting] = []
        self.expected: dict[str, asyncio.Future[Generation]] = {}
        self._unclaimed: dict[str, tuple[Generation, float]] = {}
        self.generations: dict[str, Generation] = {}
        self._ended: Tombstones[bool] = Tombstones()

    @property
    def num_reservations(self) -> int:
        return len(self._reservations)

    def has_begun(self, request_id: str) -> bool:
        """Whether a request that was announced has been handed over, or its KV may be on its way."""
        expected = self.expected.get(request_id)
        return (expected is not None and expected.done()) or self._reservations.has_blocks(request_id)

    def send_away(self) -> None:
        """End hand-offs that no gateway has asked for."""
        for request_id in list(self._unclaimed):
            self._end(request_id)

    # ------------------------------------------------------------------ from the gateway

    async def decode(self, request: wire.DecodeRequest) -> Reply:
        """Wait for the hand-off of a request, then answer from its second token on."""
        request_id = request.request_id
        if request_id in self.expected:
            raise InvalidRequest(f"request {request_id} is being served already", param="request_id")
        if request_id in self._ended:
            raise Unavailable(f"request {request_id} has ended")
        self.expected[request_id] = asyncio.get_running_loop().create_future()
        try:
            unclaimed = self._unclaimed.pop(request_id, None)
            generation = unclaimed[0] if unclaimed else await self.expected[request_id]
            return await generation.reply(stream=request.stream, on_close=lambda: self._end(request_id))
        except BaseException:
            self._end(request_id)
            raise

    def _end(self, request_id: str) -> None:
        self.expected.pop(request_id, None)
        self._unclaimed.pop(request_id, None)
        self.generations.pop(request_id, None)
        self._listeners.listen(request_id, None)
        self._engine.abort(request_id)
        self._telemetry.timeline.drop(request_id)
        self._reservations.abandon(request_id)
        self._ended.add(request_id, True)
        if self.waiting:
            self.grant()  # the first that waits for blocks may be this one

    # ------------------------------------------------------------------ from the prefill instance

    async def reserve(self, request: wire.ReserveRequest) -> wire.ReserveReply:
        """Blocks for a request, as soon as there are enough. First come, first served within a priority.

        Raises InvalidRequest for KV of another shape or a request that can never fit, Unavailable for one that was
        cancelled here or waited for ``queue_timeout_s``.
        """
        if request.layout != self._memory.layout:
            raise InvalidRequest(
                f"KV of {request.layout} cannot be read by an instance that keeps {self._memory.layout}; "
                "prefill and decode instances need the same model, dtype and block_size"
            )
        self._engine.check_fits(request.num_prompt_tokens, request.max_tokens, request.num_sequences)
        reservation = self._reservations.open(request, time.monotonic())
        if reservation is None or request.request_id in self._ended:
            self._reservations.release(request.transfer_id)
            raise _ended(request.request_id)
        if reservation.state is ReservationState.PENDING:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = _Waiting(reservation, request, time.monotonic(), turn)
            insort(self.waiting, waiting, key=lambda one: (one.request.priority, one.arrival_s))
            self.grant()
            try:
                async with asyncio.timeout(self._queue_timeout_s):
                    await turn
            except BaseException as error:
                self._reservations.release(request.transfer_id)
                if not isinstance(error, TimeoutError):
                    raise
                raise Unavailable(
                    f"no room for the request's KV within {self._queue_timeout_s:g} s; try again later",
                    code=NO_ROOM,
                ) from error
            finally:
                if waiting in self.waiting:
                    self.waiting.remove(waiting)
                    self.grant()  # it may have stood before others
        if reservation.blocks is None or reservation.state is not ReservationState.GRANTED:
            raise _ended(request.request_id)
        num_blocks = num_blocks_for(request.num_prompt_tokens, self._memory.layout.block_size)
        maps = await asyncio.to_thread(self._memory.maps, request.region) if request.region.handle else False
        return wire.ReserveReply(
            block_ids=reservation.blocks.written(num_blocks),
            num_cached_blocks=reservation.blocks.num_cached,
            name=self._memory.region.name,
            staged_cells=self._memory.staged_cells,
            maps=maps,
        )

    def grant(self) -> None:
        """Give blocks to reservations that wait, in their order, as long as there are some. On the event loop."""
        while self.waiting:
            waiting = self.waiting[0]
            request, reservation, turn = waiting.request, waiting.reservation, waiting.turn
            try:
                if reservation.state is ReservationState.PENDING:
                    blocks = self._engine.reserve(
                        request.num_prompt_tokens,
                        request.num_sequences,
                        request.block_hashes,
                        waiting.arrival_s,
                        request.priority,
                    )
                    if blocks is None:
                        return
                    self._reservations.grant(reservation, blocks, time.monotonic())
            except Exception as error:  # noqa: BLE001 - the fault of one is not to hold up the others
                if not turn.done():
                    turn.set_exception(error)
            if not turn.done():
                turn.set_result(None)
            self.waiting.remove(waiting)
        self._engine.stop_reserving()

    def renew(self, ref: wire.TransferRef) -> None:
        if not self._reservations.renew(ref.transfer_id, time.monotonic()):
            raise Unavailable(f"transfer {ref.transfer_id} has ended")

    async def complete(self, handoff: wire.Handoff) -> None:
        """Take the request over. Raises Unavailable where it was cancelled or its lease has ended. Idempotent."""
        # before the blocks are taken over: where this fails, P cancels and they go back
        answer = Answer(self._tokenizer, handoff.output, handoff.sampling, handoff.prompt_ids)
        answer.num_cached_tokens = handoff.num_cached_tokens
        if handoff.generated:  # a long answer that goes on here takes a while to be read again
            await asyncio.to_thread(answer.replay, handoff.generated)
        constraint = None
        if (grammar := handoff.sampling.grammar) is not None:
            assert self._compiler is not None, "P refuses it"
            constraint = await self._compiler.compile(grammar, is_tried=True)
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
            self._engine.unreserve(reservation.blocks)
            raise _ended(handoff.request_id)
        generation = Generation(answer, self._engine, self._telemetry.timeline, handoff.request_id)
        self._telemetry.timeline.received(handoff.request_id, DECODE_QUEUE)
        self.generations[handoff.request_id] = generation
        self._listeners.listen(handoff.request_id, generation.feed)
        self._engine.resume(
            Sequence(
                request_id=handoff.request_id,
                prompt_ids=handoff.prompt_ids,
                sampling=handoff.sampling,
                max_tokens=handoff.max_tokens,
                positions=None,  # the prompt was computed elsewhere
                position_delta=handoff.position_delta,
                block_hashes=reservation.block_hashes,
                constraint=constraint,
                output_ids=list(handoff.generated),
            ),
            reservation.blocks,
            [
                (first.token_id, answer.choices[index].finish_reason is not None)
                for index, first in enumerate(handoff.first)
            ],
        )
        expected = self.expected.get(handoff.request_id)
        if expected is None:
            self._unclaimed[handoff.request_id] = (generation, time.monotonic() + ORPHAN_S)
        elif not expected.done():
            expected.set_result(generation)

    async def read_kv(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        """Read KV that P announces into the blocks of its transfers, but for those that have ended here.

        Raises InstanceFailed where it cannot be read. Blocks are kept while they are read into, even where the
        call ends before.
        """
        wanted = [p for p in announcement.parts if self._reservations.begin_read(p.transfer_id, p.block_ids)]
        reading = asyncio.create_task(
            asyncio.to_thread(read_kv, announcement, wanted, self._memory, self._transport)
        )

        def end_read(reading: asyncio.Task[float]) -> None:
            error = None if reading.cancelled() else reading.exception()  # P hears of it, if it still listens
            given_up_at = time.monotonic() if isinstance(error, StillCopying) else None
            for part in wanted:
                self._reservations.end_read(part.transfer_id, given_up_at)

        reading.add_done_callback(end_read)
        try:
            seconds = await asyncio.shield(reading)
        except TransferError as error:
            code = PEER_UNREACHABLE if isinstance(error, PeerGone) else None
            raise InstanceFailed(f"the KV cannot be read: {error}", code=code) from error
        if num_blocks := sum(len(part.block_ids) for part in wanted):
            num_layers = announcement.end_layer - announcement.first_layer
            self._telemetry.metrics.kv_read(self._memory.nbytes(num_layers, num_blocks), seconds)
        return wire.KVTaken([part.transfer_id for part in wanted])

    def cancel(self, ref: wire.TransferRef) -> None:
        """P announces no more; with a reason, the request has failed. Idempotent."""
        self._reservations.release(ref.transfer_id)
        if ref.reason:
            self._fail(ref.request_id, InstanceFailed(ref.reason))

    # ------------------------------------------------------------------ housekeeping

    def expire(self) -> None:
        """End leases whose prefill instance is gone, and hand-offs that nobody claims."""
        now = time.monotonic()
        for reservation in self._reservations.expire(now):
            self._fail(reservation.request_id, StageTimeout("the prefill instance did not finish its KV transfer"))
        for request_id in [r for r, (_, deadline) in self._unclaimed.items() if deadline <= now]:
            self._end(request_id)

    def check_integrity(self) -> None:
        self._reservations.check_integrity()

    def _fail(self, request_id: str, error: ServeError) -> None:
        expected = self.expected.get(request_id)
        if expected is not None and not expected.done():
            expected.set_exception(error)


def read_kv(
    announcement: wire.KVAnnouncement,
    parts: AbstractSequence[wire.SentKV],
    memory: KVCacheMemory,
    transport: Transport,
) -> float:
    """Read some parts of an announcement into their blocks; return the seconds that it took.

    All at once: what is announced fits into what is landed here at a time. Raises TransferError.
    """
    layers = range(announcement.first_layer, announcement.end_layer)
    blocks = [block for part in parts for block in part.block_ids]
    if not blocks:
        start = time.monotonic()
        transport.read(announcement.region, [])  # the first contact
        return time.monotonic() - start
    if parts[0].source_ids:
        start = time.monotonic()
        memory.read_mapped(announcement.region, layers, [one for part in parts for one in part.source_ids], blocks)
        return time.monotonic() - start
    with memory.land(layers, blocks) as landing:
        pieces: list[Piece] = []
        first = 0
        for part in parts:
            pairs = paired(part.spans, landing.spans(first, len(part.block_ids)))
            pieces += [(there, memory.buffer[here : here + count]) for there, here, count in pairs]
            first += len(part.block_ids)
        start = time.monotonic()
        transport.read(announcement.region, pieces)
        return time.monotonic() - start


def _ended(request_id: str) -> Unavailable:
    return Unavailable(f"request {request_id} was cancelled", code=REQUEST_ENDED)
