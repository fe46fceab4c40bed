"""The ways by which the KV of a prompt gets to the decode instance, behind one interface."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from epd_serve.cache.block_pool import num_blocks_for
from epd_serve.engine.engine import EngineEvent, FailureEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.http import Peers, unreachable
from epd_serve.protocol import wire
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.transport import PeerGone, TransferError

_CANCEL_TIMEOUT_S = 5.0


class Delivery(Protocol):
    """One request's KV: ``open`` before its prompt is computed, then ``hand_over`` or ``stop``, ``withdraw``."""

    transfer: OutgoingTransfer

    async def open(self, feed: Callable[[EngineEvent], None]) -> None:
        """Prepare; ``feed`` is told if the decode instance gives up meanwhile. Raises ServeError."""
        ...

    async def hand_over(self, handoff: wire.Handoff) -> None:
        """Return once the decode instance has the KV and the request. Raises ServeError."""
        ...

    def stop(self) -> None:
        """Let nothing more go out. Idempotent."""
        ...

    async def withdraw(self, reason: str) -> None:
        """After ``stop``: tell the decode instance, with a reason that the request has failed."""
        ...


#: Makes the delivery of one request's KV to the decode instance at a URL.
Deliveries = Callable[[wire.ReserveRequest, Sequence, str], Delivery]


def reserve_request(
    sequence: Sequence, num_generated: int, layout: wire.KVLayout, lease_s: float, request_id: str = ""
) -> wire.ReserveRequest:
    """Ask for blocks for a prompt and the first ``num_generated`` tokens of its answer.

    Args:
        request_id: the decode instance's, where it is not that of the sequence.
    """
    num_tokens, sampling = len(sequence.prompt_ids) + num_generated, sequence.sampling
    return wire.ReserveRequest(
        transfer_id=uuid.uuid4().hex,
        request_id=request_id or sequence.request_id,
        num_prompt_tokens=num_tokens,
        max_tokens=sequence.max_tokens - num_generated,
        num_sequences=sequence.num_sequences,
        block_hashes=sequence.block_hashes,
        layout=layout,
        lease_s=lease_s,
        priority=sampling.priority,
        key=sampling.key,
        group=sampling.group,
    )


def handoff_of(
    reserved: wire.ReserveRequest,
    sequence: Sequence,
    generated: list[int],
    first: list[wire.FirstToken],
    output: wire.OutputOptions,
    logprobs: dict[int, wire.TokenLogprob],
) -> wire.Handoff:
    """The request as the decode instance takes it over: ``first`` follow what has KV."""
    return wire.Handoff(
        transfer_id=reserved.transfer_id,
        request_id=reserved.request_id,
        prompt_ids=sequence.prompt_ids,
        position_delta=sequence.position_delta,
        sampling=sequence.sampling,
        max_tokens=sequence.max_tokens,
        output=output,
        first=first,
        generated=generated,
        logprobs=logprobs,
    )


class PushDelivery:
    """Reserve blocks there, let the sender write or offer while the prompt is computed, complete.

    Args:
        reads: the decode instance reads even where it could be written to.
        abort: ends the request in the engine.
        spawn: runs a clean-up in the background, owned by the instance.
    """

    def __init__(
        self,
        reserve: wire.ReserveRequest,
        decode_url: str,
        sender: KVSender,
        peers: Peers,
        *,
        reads: bool = False,
        abort: Callable[[str], None],
        spawn: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._reserve = reserve
        self._url = decode_url
        self._sender = sender
        self._peers = peers
        self._reads = reads
        self._abort = abort
        self._spawn = spawn
        self._ref = wire.TransferRef(transfer_id=reserve.transfer_id, request_id=reserve.request_id)
        self._renewal: asyncio.Task[None] | None = None
        self.transfer = OutgoingTransfer(reserve.transfer_id, target=None, deadline=0.0)

    async def open(self, feed: Callable[[EngineEvent], None]) -> None:
        lease_s = self._reserve.lease_s
        granted_after = time.monotonic()
        try:
            body = await _while_it_answers(
                self._peers, self._url, "/kv/reserve", self._reserve, self._ref, lease_s
            )
            if time.monotonic() - granted_after > lease_s / 6:
                # it waited for blocks, or we did not look; when the lease began only a renewal tells
                granted_after = time.monotonic()
                await self._peers.call(self._url, "/kv/renew", self._ref, lease_s / 6)
        except BaseException:
            self._spawn(asyncio.create_task(self._cancel("")))  # D may have granted what we never heard of
            raise
        target, transfer = wire.decode(body, wire.ReserveReply), self.transfer
        transfer.deadline, transfer.next_block = granted_after + lease_s / 2, target.num_cached_blocks
        if self._reads or target.staged_cells is not None:
            transfer.offer = partial(self._offer, asyncio.get_running_loop())
        if transfer.offer is None or target.region.handles:
            self._sender.connect(target.region)
        transfer.target = target
        self._renewal = asyncio.create_task(self._renew(transfer, feed))

    async def hand_over(self, handoff: wire.Handoff) -> None:
        await self._fenced()
        if self.transfer.error is not None:
            code = PEER_UNREACHABLE if isinstance(self.transfer.error, PeerGone) else None
            raise InstanceFailed(f"the KV transfer to {self._url} failed: {self.transfer.error}", code=code)
        if self.transfer.cancelled:  # by the renewal; some of the KV was not written
            raise InstanceFailed(f"{self._url} gave up the KV transfer")
        try:
            await self._peers.call(self._url, "/kv/complete", handoff, self._reserve.lease_s)
        except Unavailable as error:
            raise _blamed(self._url, error) from error
        self._end_renewal()

    def stop(self) -> None:
        self._end_renewal()
        self.transfer.cancelled = True

    async def withdraw(self, reason: str) -> None:
        await self._fenced()
        await self._cancel(reason, may_arrive=self.transfer.error is not None)

    def _offer(self, loop: asyncio.AbstractEventLoop, offer: wire.KVOffer) -> wire.KVTaken:
        """Return when D has read it, on a thread of the sender. Raises TransferError."""
        call = _while_it_answers(self._peers, self._url, "/kv/offer", offer, self._ref, self._reserve.lease_s)
        try:
            return wire.decode(asyncio.run_coroutine_threadsafe(call, loop).result(), wire.KVTaken)
        except ServeError as error:
            raise (PeerGone if error.code == PEER_UNREACHABLE else TransferError)(error.message) from error

    def _end_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()

    async def _renew(self, transfer: OutgoingTransfer, feed: Callable[[EngineEvent], None]) -> None:
        """Keep the lease alive; where D has given up, stop writing and fail the request."""
        lease_s = self._reserve.lease_s
        while True:
            await asyncio.sleep(lease_s / 6)
            sent_at = time.monotonic()
            try:
                await self._peers.call(self._url, "/kv/renew", self._ref, lease_s / 6)
            except InstanceFailed:
                continue  # the deadline stops the writer if D stays away
            except ServeError as error:
                transfer.cancelled = True
                self._abort(self._ref.request_id)
                feed(FailureEvent(self._ref.request_id, InstanceFailed(f"{self._url} gave up: {error.message}")))
                return
            transfer.deadline = sent_at + lease_s / 2

    async def _fenced(self) -> None:
        """Wait until nothing of the transfer is under way."""
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()

        def on_passed(_: OutgoingTransfer) -> None:
            loop.call_soon_threadsafe(passed.set)

        self._sender.fence(self.transfer, on_passed)
        await passed.wait()

    async def _cancel(self, reason: str, *, may_arrive: bool = False) -> None:
        ref = wire.TransferRef(
            transfer_id=self._ref.transfer_id,
            request_id=self._ref.request_id,
            reason=reason,
            may_arrive=may_arrive,
        )
        await tell_cancelled(self._peers, self._url, ref)


class PullDelivery(PushDelivery):
    """Compute first; then the decode instance takes blocks as it has them and reads (TriInfer section 4.3)."""

    def __init__(self, sequence: Sequence, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, reads=True, **keywords)
        self._sequence = sequence

    async def open(self, feed: Callable[[EngineEvent], None]) -> None:
        self._feed = feed

    async def hand_over(self, handoff: wire.Handoff) -> None:
        await super().open(self._feed)
        send_all(self._sender, self.transfer, self._sequence, handoff, self._reserve.layout)
        await super().hand_over(handoff)


def send_all(
    sender: KVSender,
    transfer: OutgoingTransfer,
    sequence: Sequence,
    handoff: wire.Handoff,
    layout: wire.KVLayout,
) -> None:
    """Queue all KV of a sequence that is computed, but for what the decode instance has."""
    assert transfer.target is not None, "no blocks there yet"
    first, num_blocks = transfer.next_block, num_blocks_for(handoff.num_tokens, layout.block_size)
    local = sequence.blocks[first:num_blocks] + sequence.state_blocks
    part = Part(transfer, local, transfer.target.block_ids[first:])
    if part.local:
        sender.push(range(layout.num_layers), [part])


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


async def tell_cancelled(peers: Peers, url: str, ref: wire.TransferRef) -> None:
    try:
        await peers.call(url, "/kv/cancel", ref, _CANCEL_TIMEOUT_S)
    except ServeError:
        return  # D is gone and its reservation with it, or its lease will end
