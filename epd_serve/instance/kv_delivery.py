"""Delivery of the KV of a prompt to the decode instance: reserve, announce groups of layers, hand over."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.engine.computing import KVCacheMemory
from epd_serve.engine.engine import Engine, FailureEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.answer import Answer
from epd_serve.instance.calls import CleanUps, Refusals, moved
from epd_serve.instance.http import Peers, unreachable
from epd_serve.instance.telemetry import InstanceTelemetry
from epd_serve.protocol import wire
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.transport import PeerGone, TransferError

_CANCEL_TIMEOUT_S = 5.0


class _Announcer:
    """The decode instance of one transfer: see :class:`~epd_serve.transfer.kv_sender.DecodePeer`."""

    def __init__(self, peers: Peers, url: str, ref: wire.TransferRef, lease_s: float) -> None:
        self._peers, self._url, self._ref, self._lease_s = peers, url, ref, lease_s
        self._loop = asyncio.get_running_loop()

    def announce(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        call = _while_it_answers(self._peers, self._url, "/kv/announce", announcement, self._ref, self._lease_s)
        try:
            return wire.decode(asyncio.run_coroutine_threadsafe(call, self._loop).result(), wire.KVTaken)
        except ServeError as error:
            raise (PeerGone if error.code == PEER_UNREACHABLE else TransferError)(error.message) from error


class Deliveries:
    """Delivers KV of this instance to decode instances, for as long as it has one role.

    Args:
        memory: where the KV is read from.
        refusals: of calls that an instance which leaves its role refuses; hand-overs are among them.
    """

    def __init__(
        self,
        engine: Engine,
        sender: KVSender,
        memory: KVCacheMemory,
        *,
        peers: Peers,
        telemetry: InstanceTelemetry,
        refusals: Refusals,
        clean_ups: CleanUps,
        lease_s: float,
    ) -> None:
        self.engine = engine
        self.sender = sender
        self.memory = memory
        self.peers = peers
        self.telemetry = telemetry
        self.refusals = refusals
        self.clean_ups = clean_ups
        self.lease_s = lease_s

    def new(self, sequence: Sequence, num_generated: int, decode_url: str) -> KVDelivery:
        """Prepare the delivery of a prompt's KV, and of that of generated tokens."""
        return KVDelivery(self, sequence, num_generated, decode_url)


class KVDelivery:
    """One request's KV: :meth:`open` before its prompt is computed, then :meth:`hand_over`, or :meth:`give_up`.
    The decode instance reserves blocks, and reads groups of layers while the prompt is computed.

    Attributes:
        is_confirmed: whether the decode instance has taken the request over.
    """

    def __init__(self, own: Deliveries, sequence: Sequence, num_generated: int, decode_url: str) -> None:
        self._own = own
        self._sequence = sequence
        self._url = decode_url
        self._peers = own.peers
        self.is_confirmed = self._is_given_up = False
        sampling, lease_s = sequence.sampling, own.lease_s
        self._reserve = wire.ReserveRequest(
            transfer_id=uuid.uuid4().hex,
            request_id=sequence.request_id,
            num_prompt_tokens=len(sequence.prompt_ids) + num_generated,
            max_tokens=sequence.max_tokens - num_generated,
            num_sequences=sequence.num_sequences,
            block_hashes=sequence.block_hashes,
            layout=own.memory.layout,
            lease_s=lease_s,
            region=own.memory.region,
            priority=sampling.priority,
        )
        self._ref = wire.TransferRef(self._reserve.transfer_id, self._reserve.request_id)
        self._renewal: asyncio.Task[None] | None = None
        announcer = _Announcer(own.peers, decode_url, self._ref, lease_s)
        self.transfer = OutgoingTransfer(self._ref.transfer_id, announcer)

    def handoff(self, generated: list[int], first: list[wire.FirstToken], answer: Answer) -> wire.Handoff:
        """The request as the decode instance takes it over: ``first`` follow what has KV."""
        sequence = self._sequence
        return wire.Handoff(
            transfer_id=self._ref.transfer_id,
            request_id=self._ref.request_id,
            prompt_ids=sequence.prompt_ids,
            position_delta=sequence.position_delta,
            sampling=sequence.sampling,
            max_tokens=sequence.max_tokens,
            output=answer.options,
            first=first,
            generated=generated,
            logprobs={} if sequence.sampling.logprobs is None else answer.unsent_logprobs,
            num_cached_tokens=answer.num_cached_tokens,
        )

    async def open(self, feed: Callable[[FailureEvent], None]) -> None:
        """Reserve blocks; ``feed`` is told if the decode instance gives up meanwhile. Raises ServeError."""
        try:
            body = await _while_it_answers(
                self._peers, self._url, "/kv/reserve", self._reserve, self._ref, self._reserve.lease_s
            )
        except BaseException:
            self._own.clean_ups.start(self._cancel(""))  # D may have granted what we never heard of
            raise
        target, transfer = wire.decode(body, wire.ReserveReply), self.transfer
        transfer.next_block = target.num_cached_blocks
        self._own.sender.connect(target.name, transfer.peer)
        transfer.target = target
        self._renewal = asyncio.create_task(self._renew(transfer, feed))

    def send_all(self, handoff: wire.Handoff) -> None:
        """Queue all KV of a sequence that is computed, but for what the decode instance has; it is open."""
        layout, target, first = self._reserve.layout, self.transfer.target, self.transfer.next_block
        assert target is not None, "no blocks there yet"
        num_blocks = num_blocks_for(handoff.num_tokens, layout.block_size)
        local = self._sequence.blocks[first:num_blocks] + self._sequence.state_blocks
        if local:
            self._own.sender.push(range(layout.num_layers), [Part(self.transfer, local, target.block_ids[first:])])

    async def hand_over(self, handoff: wire.Handoff) -> None:
        """Return once the decode instance has the KV and the request.

        Raises ServeError; it is of code ``draining`` where this instance leaves its role meanwhile.
        """
        async with self._own.refusals.call(lambda: True, refusal=moved):
            await self._hand_over(handoff)
        self.is_confirmed = True
        self._own.telemetry.timeline.handed_over(handoff.request_id)
        self._own.telemetry.metrics.kv_delivered(self.transfer)

    async def _hand_over(self, handoff: wire.Handoff) -> None:
        await self._fenced()
        if self.transfer.error is not None:
            code = PEER_UNREACHABLE if isinstance(self.transfer.error, PeerGone) else None
            raise InstanceFailed(f"the KV transfer to {self._url} failed: {self.transfer.error}", code=code)
        if self.transfer.cancelled:  # some of the KV was not read
            raise InstanceFailed(f"{self._url} gave up the KV transfer")
        try:
            await self._peers.call(self._url, "/kv/complete", handoff, self._reserve.lease_s)
        except Unavailable as error:
            raise _blamed(self._url, error) from error
        if self._renewal is not None:
            self._renewal.cancel()

    def give_up(self, reason: str) -> None:
        """End the request here, then at the decode instance; with a reason, it has failed. Idempotent."""
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._renewal is not None:
            self._renewal.cancel()
        self.transfer.cancelled = True
        self._own.engine.abort(self._ref.request_id)
        self._own.clean_ups.start(self._withdraw(reason))

    async def _withdraw(self, reason: str) -> None:
        await self._fenced()
        await self._cancel(reason)

    async def _renew(self, transfer: OutgoingTransfer, feed: Callable[[FailureEvent], None]) -> None:
        """Keep the lease alive; where D has given up, announce no more and fail the request."""
        lease_s = self._reserve.lease_s
        while True:
            await asyncio.sleep(lease_s / 6)
            try:
                await self._peers.call(self._url, "/kv/renew", self._ref, lease_s / 6)
            except InstanceFailed:
                continue  # the next announcement, or the hand-over, fails if D stays away
            except ServeError as error:
                transfer.cancelled = True
                self._own.engine.abort(self._ref.request_id)
                feed(FailureEvent(self._ref.request_id, InstanceFailed(f"{self._url} gave up: {error.message}")))
                return

    async def _fenced(self) -> None:
        """Wait until nothing of the transfer is under way."""
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()
        self._own.sender.fence(self.transfer, partial(loop.call_soon_threadsafe, passed.set))
        await passed.wait()

    async def _cancel(self, reason: str) -> None:
        ref = wire.TransferRef(self._ref.transfer_id, self._ref.request_id, reason=reason)
        with suppress(ServeError):  # D is gone and its reservation with it, or its lease will end
            await self._peers.call(self._url, "/kv/cancel", ref, _CANCEL_TIMEOUT_S)


def _blamed(url: str, error: Unavailable) -> ServeError:
    """Return the error with who is to blame: that D leaves its role is no matter of this instance."""
    if error.code != DRAINING:
        return error
    return InstanceFailed(f"{url}: {error.message}", code=DECODE_DRAINING)


async def _while_it_answers(
    peers: Peers, url: str, path: str, message: wire.Message, ref: wire.TransferRef, lease_s: float
) -> bytes:
    """A call in which D may wait for blocks, or read, for as long as it likes, so long as it answers others.

    Raises InstanceFailed where it has not for half a lease.
    """
    tick_s = lease_s / 6
    heard_at = time.monotonic()
    call = asyncio.create_task(peers.call(url, path, message))
    try:
        while not (await asyncio.wait({call}, timeout=tick_s))[0]:
            try:
                await peers.call(url, "/kv/renew", ref, tick_s)
            except InstanceFailed as error:
                if time.monotonic() - heard_at > lease_s / 2:
                    raise unreachable(f"{url} answers no more: {error.message}") from error
                continue
            except ServeError:
                pass  # nothing to renew, but it answers
            heard_at = time.monotonic()
        return call.result()
    except Unavailable as error:
        raise _blamed(url, error) from error
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
