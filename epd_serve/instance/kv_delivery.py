"""Hand prompts over to decode instances: reserve blocks, announce groups of layers, complete."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from epd_serve.engine.engine import EngineEvent, FailureEvent, PromptEvent
from epd_serve.errors import DECODE_DRAINING, DRAINING, PEER_UNREACHABLE, InstanceFailed, ServeError, Unavailable
from epd_serve.instance.http import unreachable
from epd_serve.protocol import wire
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.transfer.transport import PeerGone, TransferError

if TYPE_CHECKING:
    from epd_serve.instance.language_engine import LanguageEngine

_CANCEL_TIMEOUT_S = 5.0


class KVDelivery(OutgoingTransfer):
    """Hand-over of one prompt: call :meth:`open` before the prompt is computed, then :meth:`hand_over` or
    :meth:`give_up`.

    The decode instance (D) reserves blocks, which it keeps for ``lease_s`` without a renewal, and reads groups of
    layers while the prompt is computed.

    Attributes:
        first: end of the prompt with its first tokens; fails if the prompt fails or D gives up.
    """

    def __init__(self, language: LanguageEngine, sequence: Sequence, decode_url: str) -> None:
        super().__init__(uuid.uuid4().hex)
        self._language, self._instance = language, language.instance
        self._lease_s = language.instance.options.lease_s
        self._sequence = sequence
        self._url = decode_url
        self._loop = asyncio.get_running_loop()
        self._is_confirmed = self._is_given_up = False
        self.first: asyncio.Future[PromptEvent] = self._loop.create_future()
        self._heard_at = time.monotonic()
        self._renewal = self._loop.create_task(self._renew())

    def feed(self, event: EngineEvent) -> None:
        """Handle the engine's event for the end of the prompt."""
        if self.first.done():
            return
        if isinstance(event, FailureEvent):
            self.first.set_exception(event.error)
        elif isinstance(event, PromptEvent):
            self.first.set_result(event)

    async def open(self) -> None:
        """Reserve blocks, waiting until D has enough. Raises ServeError."""
        sequence, memory = self._sequence, self._language.memory
        reserve = wire.ReserveRequest(
            transfer_id=self.transfer_id,
            request_id=sequence.request_id,
            num_prompt_tokens=sequence.num_tokens,
            max_tokens=sequence.max_tokens - len(sequence.output_ids),
            num_sequences=sequence.num_sequences,
            block_hashes=sequence.block_hashes,
            layout=memory.layout,
            lease_s=self._lease_s,
            region=memory.region,
            priority=sequence.sampling.priority,
        )
        target = wire.decode(await self._call("/kv/reserve", reserve), wire.ReserveReply)
        self.next_block, self.target = target.num_cached_blocks, target
        self._language.sender.connect(self)

    def announce(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        call = self._call("/kv/announce", announcement)
        try:
            return wire.decode(asyncio.run_coroutine_threadsafe(call, self._loop).result(), wire.KVTaken)
        except ServeError as error:
            raise (PeerGone if error.code == PEER_UNREACHABLE else TransferError)(error.message) from error

    async def hand_over(self, handoff: wire.Handoff) -> None:
        """Complete the hand-over; return once D has the KV and the request.

        Raises ServeError, with code ``draining`` if this instance drains before that.
        """
        instance = self._instance
        async with instance.refusals.call(kind=InstanceFailed):
            await self._sent()
            if self.error is not None:
                code = PEER_UNREACHABLE if isinstance(self.error, PeerGone) else None
                raise InstanceFailed(f"the KV transfer to {self._url} failed: {self.error}", code=code)
            if self.cancelled:  # some of the KV remains unread
                raise InstanceFailed(f"{self._url} gave up the KV transfer")
            try:
                await instance.peers.call(self._url, "/kv/complete", handoff, self._lease_s)
            except Unavailable as error:
                raise self._blame(error) from error
        self._renewal.cancel()
        self._is_confirmed = True
        instance.telemetry.timeline.record_hand_over(handoff.request_id)
        instance.telemetry.metrics.kv_delivered(self)

    def close(self) -> None:
        """Free the prompt's blocks here, and also at D unless it took the request over."""
        if self._is_confirmed:
            self._language.engine.transferred(self._sequence)
        else:
            self.give_up("")

    def give_up(self, reason: str) -> None:
        """Cancel the request here and at D; with a reason, as failed. Idempotent."""
        if not self._is_given_up:
            self._is_given_up = True
            self._renewal.cancel()
            self._stop()
            self._instance.clean_ups.start(self._cancel(reason))

    def _stop(self) -> None:
        self.cancelled = True
        self._language.engine.abort(self._sequence.request_id)

    async def _cancel(self, reason: str) -> None:
        await self._sent()
        ref = wire.TransferRef(self.transfer_id, self._sequence.request_id, reason=reason)
        with suppress(ServeError):  # D is lost with its reservation, or its lease will expire
            await self._instance.peers.call(self._url, "/kv/cancel", ref, _CANCEL_TIMEOUT_S)

    async def _sent(self) -> None:
        """Wait until no announcement of this transfer is in progress."""
        sent = asyncio.Event()
        self._language.sender.fence(self, partial(self._loop.call_soon_threadsafe, sent.set))
        await sent.wait()

    async def _renew(self) -> None:
        """Renew the lease; if D has given up, stop announcing and fail the request."""
        tick_s = self._lease_s / 6
        ref = wire.TransferRef(self.transfer_id, self._sequence.request_id)
        while True:
            await asyncio.sleep(tick_s)
            was_granted = self.target is not None
            try:
                await self._instance.peers.call(self._url, "/kv/renew", ref, tick_s)
            except InstanceFailed:
                continue  # if D stays away, its next call fails
            except ServeError as error:
                if was_granted:
                    self._stop()
                    if not self.first.done():
                        self.first.set_exception(InstanceFailed(f"{self._url} gave up: {error.message}"))
                    return
            self._heard_at = time.monotonic()

    async def _call(self, path: str, message: wire.Message) -> bytes:
        """Call D and return its answer, waiting as long as D answers renewals.

        Raises InstanceFailed if D has answered nothing for half a lease.
        """
        began = time.monotonic()
        call = asyncio.create_task(self._instance.peers.call(self._url, path, message))
        try:
            while not (await asyncio.wait({call}, timeout=self._lease_s / 6))[0]:
                if time.monotonic() - max(self._heard_at, began) > self._lease_s / 2:
                    raise unreachable(f"{self._url} has answered nothing for half a lease")
            return call.result()
        except Unavailable as error:
            raise self._blame(error) from error
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _blame(self, error: Unavailable) -> ServeError:
        """Attribute an error to D if D is draining, so that this instance is not blamed."""
        if error.code != DRAINING:
            return error
        return InstanceFailed(f"{self._url}: {error.message}", code=DECODE_DRAINING)
