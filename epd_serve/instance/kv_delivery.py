"""The ways by which the KV of a prompt gets to the decode instance, behind one interface."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from epd_serve.engine.computing import KVCacheMemory
from epd_serve.engine.hooks import EngineEvent, FailureEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.http import Peers, unreachable
from epd_serve.protocol import wire
from epd_serve.sequence import Sequence
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer
from epd_serve.transfer.transport import PeerGone

_CANCEL_TIMEOUT_S = 5.0


class Delivery(Protocol):
    """One request's KV: ``open`` before its prompt is computed, then ``hand_over`` or ``stop``, ``withdraw``."""

    @property
    def transfer(self) -> OutgoingTransfer: ...

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
    """Reserve blocks there, let the sender write while the prompt is computed, complete.

    Args:
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
        abort: Callable[[str], None],
        spawn: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._reserve = reserve
        self._url = decode_url
        self._sender = sender
        self._peers = peers
        self._abort = abort
        self._spawn = spawn
        self._ref = wire.TransferRef(transfer_id=reserve.transfer_id, request_id=reserve.request_id)
        self._renewal: asyncio.Task[None] | None = None
        self._transfer: OutgoingTransfer | None = None

    @property
    def transfer(self) -> OutgoingTransfer:
        assert self._transfer is not None, "used before it was opened"
        return self._transfer

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
        target = wire.decode(body, wire.ReserveReply)
        self._transfer = OutgoingTransfer(
            transfer_id=self._reserve.transfer_id,
            target=target,
            deadline=granted_after + lease_s / 2,
            next_block=target.num_cached_blocks,
        )
        self._sender.connect(target.region)
        self._renewal = asyncio.create_task(self._renew(self._transfer, feed))

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


class PullDelivery:
    """Compute first; then the decode instance takes blocks as it has them and reads (TriInfer section 4.3).

    The source blocks are kept until D confirms. Where they had to go before that, D is told so when it confirms,
    and throws away what it read: there is no lease, and a reader that comes late can do no harm.

    Args:
        pulls: has the ids of transfers that decode instances may be reading now.
    """

    def __init__(
        self,
        reserve: wire.ReserveRequest,
        decode_url: str,
        sequence: Sequence,
        memory: KVCacheMemory,
        peers: Peers,
        pulls: set[str],
        *,
        source_url: str,
    ) -> None:
        self._reserve = reserve
        self._url = decode_url
        self._sequence = sequence
        self._memory = memory
        self._peers = peers
        self._pulls = pulls
        self._source_url = source_url
        self.transfer = OutgoingTransfer(reserve.transfer_id, target=None, deadline=float("inf"))

    async def open(self, feed: Callable[[EngineEvent], None]) -> None:
        return

    async def hand_over(self, handoff: wire.Handoff) -> None:
        count = -(-handoff.num_tokens // self._reserve.layout.block_size)
        blocks = self._sequence.blocks[:count] + self._sequence.state_blocks
        self._pulls.add(self.transfer.transfer_id)
        try:
            await self._stage(blocks)
            if self.transfer.cancelled:
                raise InstanceFailed("the request was given up before its KV was read")
            await self._pulled(
                wire.PullRequest(
                    handoff=handoff,
                    source_url=self._source_url,
                    region=self._memory.region,
                    num_blocks=self._memory.num_blocks,
                    block_ids=blocks,
                    block_hashes=self._reserve.block_hashes,
                    num_sequences=self._reserve.num_sequences,
                    layout=self._reserve.layout,
                    lease_s=self._reserve.lease_s,
                )
            )
        finally:
            self._pulls.discard(self.transfer.transfer_id)

    async def _stage(self, blocks: list[int]) -> None:
        """Not left before it is over: afterwards the blocks may be another's, whose bytes it would overwrite."""
        layers = range(self._reserve.layout.num_layers)
        staging = asyncio.create_task(asyncio.to_thread(self._memory.stage, layers, blocks))
        try:
            await asyncio.shield(staging)
        finally:
            await asyncio.wait({staging})

    async def _pulled(self, request: wire.PullRequest) -> None:
        ref = wire.TransferRef(self.transfer.transfer_id, self._reserve.request_id)
        await _while_it_answers(self._peers, self._url, "/kv/pull", request, ref, self._reserve.lease_s)

    def stop(self) -> None:
        self.transfer.cancelled = True
        self._pulls.discard(self.transfer.transfer_id)

    async def withdraw(self, reason: str) -> None:
        ref = wire.TransferRef(self.transfer.transfer_id, self._reserve.request_id, reason=reason)
        await tell_cancelled(self._peers, self._url, ref)


def confirm_pulled(pulls: set[str], ref: wire.TransferRef) -> None:
    """D has read all. Raises Unavailable where the blocks were free by then: it may have read anything."""
    if ref.transfer_id not in pulls:
        raise Unavailable(f"transfer {ref.transfer_id} has ended")
    pulls.discard(ref.transfer_id)


def _blamed(url: str, error: Unavailable) -> ServeError:
    """Return the error with who is to blame: that D leaves its role is no matter of this instance."""
    if error.code != DRAINING:
        return error
    return InstanceFailed(f"{url}: {error.message}", code=DECODE_DRAINING)


async def _while_it_answers(
    peers: Peers, url: str, path: str, message: wire.Message, ref: wire.TransferRef, lease_s: float
) -> bytes:
    """A call in which D may wait for blocks for as long as it likes, so long as it answers others.

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
