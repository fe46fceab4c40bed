"""Encode stage: encode media, store the feature, send the hash event to the instance that needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from device.base import BareDevice
from epd_serve.engine.dual_stream import TowerStream
from epd_serve.engine.pace import IMAGE_SIDE, StepLimits, StepWatch, end_if_lost
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import NOT_MAPPED, PREPARATION_FULL, InstanceFailed, InvalidRequest, ServeError
from epd_serve.instance.calls import Peers
from epd_serve.instance.feature_receiver import FeatureReceiver
from epd_serve.instance.text.request_processor import S_PER_PIXEL, RequestProcessor
from epd_serve.protocol.wire import EncodeReply, EncodeRequest, MediaRef
from epd_serve.sched.schedule import schedule_encodes
from epd_serve.transfer.feature_store import FeatureStore, StoredFeature
from epd_serve.types import PLURALS

if TYPE_CHECKING:
    from epd_serve.instance.loading.model import InstanceModel

logger = logging.getLogger(__name__)

_RETRY_ROOM_S = 0.02
_ANNOUNCE_TIMEOUT_S = 60.0


#: A feature, and the start and end of the batch that computed it.
_Encoded = tuple[Any, tuple[float, float]]


@dataclass(eq=False, slots=True)
class _Encode:
    """The encode of a distinct media item, shared by the requests that wait for ``task``.

    Attributes:
        num_pixels: number of pixels after resizing for the tower.
        feature: the tower's result.
        inputs: inputs of the tower, once they are prepared.
        begun_s: when the preparation began.
    """

    ref: MediaRef
    num_pixels: int
    feature: asyncio.Future[_Encoded]
    task: asyncio.Task[_Encoded] | None = None
    inputs: Any = None
    begun_s: float = 0.0
    is_in_tower: bool = False
    num_waiters: int = 0


@dataclass(eq=False)
class Encoder:
    """Encodes media in batches on its own thread, concurrently with the instance's other stages.

    Call :meth:`serve` before the first request. :meth:`load_tower` loads the tower; without it, the first item
    does, on an instance whose role does not encode (recompute when no encoder is left).

    Attributes:
        url: this instance's URL, as in ``announce_to``.
        consumer: receives features for this instance's own requests; None if its role does not prefill.
        tower: None before it is loaded; the next item loads it again after it was set to None.
        watch: detects batches that hang.
    """

    model: InstanceModel
    peers: Peers
    processor: RequestProcessor
    stream: TowerStream
    device: BareDevice
    telemetry: InstanceTelemetry
    url: str

    def __post_init__(self) -> None:
        self._family = self.model.family
        self.consumer: FeatureReceiver | None = None
        self._loop = asyncio.get_running_loop()
        self.tower: Any = None
        self._tower_thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._encodes: dict[str, _Encode] = {}
        self._waiting: list[_Encode] = []
        self._free_since_s = 0.0
        self.watch = StepWatch()
        self._loop_task = asyncio.create_task(self._run())

    @property
    def num_waiting(self) -> int:
        return len(self._encodes)

    @property
    def num_waiting_pixels(self) -> int:
        """Pixels of distinct items not encoded yet."""
        return sum(one.ref.num_pixels for one in self._encodes.values() if not one.feature.done())

    def has_begun(self, mm_hash: str) -> bool:
        """Return whether a requested item is in the tower or already encoded."""
        return mm_hash not in self._encodes or self._encodes[mm_hash].is_in_tower

    def serve(self, store: FeatureStore, image_budget_pixels: int) -> None:
        """Use this store from now on. Call it only while no encode is running."""
        assert not self._encodes, "an encode is running"
        self._off_device: set[str] = set()  # consumers that cannot read this device's memory
        self._store, self._budget = store, image_budget_pixels

    async def load_tower(self, limits: StepLimits | None = None) -> None:
        """Load the tower; with ``limits``, also measure the pixel budget of a batch."""
        if self.model.decoders is not None:
            self.model.decoders.start()
        tower = await self._loop.run_in_executor(self._tower_thread, self._loaded_tower)
        if limits is not None:
            area = self._family.num_pixels((IMAGE_SIDE, IMAGE_SIDE))
            find = partial(limits.find_image_budget, area, partial(self.model.encode_seconds, tower))
            self._budget = await self._loop.run_in_executor(self._tower_thread, find)

    def batch_bytes(self) -> int:
        """Encode the largest batch of images and return its peak memory in bytes. Nothing else may run. Blocks."""
        if self.tower is None or "image" not in self._family.token_ids:
            return 0
        area = self._family.num_pixels((IMAGE_SIDE, IMAGE_SIDE))
        count = max(1, self._budget // area)
        with self.stream.encoding(count * area):
            self.tower.encode([self._family.blank_inputs((IMAGE_SIDE, IMAGE_SIDE))] * count, on_device=True)
        return self.stream.batch_bytes(count * area)

    async def close(self) -> None:
        self.stream.held_on = None
        self.stream.hurries = True
        self._loop_task.cancel()
        with suppress(asyncio.CancelledError):
            await self._loop_task
        self._tower_thread.shutdown(cancel_futures=True)
        if self.model.decoders is not None:
            self.model.decoders.close()

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Encode, store and announce one item; return once the consumer has the feature.

        If this instance is the consumer and delivery through the store fails, encode the item again and hand the
        feature over directly, so that the last resort depends only on this process.

        Raises InvalidRequest for media that cannot be decoded; ServeError if encoding or delivery failed.
        """
        received = time.monotonic()
        if request.ref.modality not in self._family.token_ids:
            raise InvalidRequest(
                f"the model does not support {PLURALS[request.ref.modality]}", code="unsupported_media"
            )
        if request.ref.segment is not None and not self._family.num_tokens(request.ref):
            return EncodeReply(cached=True)  # the video has fewer groups of frames than segments
        try:
            return await self._store_and_announce(request, received)
        except InvalidRequest:
            raise
        except ServeError as error:
            if self.consumer is None or request.announce_to != self.url or error.code == PREPARATION_FULL:
                raise
            logger.warning("feature %s bypasses the store: %s", request.ref.mm_hash[:12], error.message)
            feature, batch_s = await self._encode_item(request)
            owner, mm_hash, timeline = request.request_id, request.ref.mm_hash, self.telemetry.timeline
            timeline.record_encode(owner, mm_hash, received, batch_s)
            await self.consumer.take(owner, request.ref, feature)
            timeline.record_fetch(owner, mm_hash, max(received, batch_s[1]))
            return EncodeReply(cached=False)

    async def _store_and_announce(self, request: EncodeRequest, received: float) -> EncodeReply:
        """Encode an item unless it is stored, store its feature, and announce it to the consumer."""
        mm_hash, owner, timeline = request.ref.mm_hash, request.request_id, self.telemetry.timeline
        try:
            feature = await self._store.acquire(mm_hash, owner)
            cached, hit = feature is not None, time.monotonic()
            batch = hit, hit
            if feature is None:
                made, batch = await self._encode_item(request)
                data, dtype = self.model.data_of(made), str(made.dtype).removeprefix("torch.")
                put = partial(self._store.put, mm_hash, data, list(made.shape), dtype, owner)
                feature = await _with_room(put)
            timeline.record_encode(owner, mm_hash, received, batch)  # before the request can end
            await self._announce(request, feature)
            timeline.record_fetch(owner, mm_hash, max(received, batch[1]))
        finally:
            self._store.release(owner, mm_hash)
        return EncodeReply(cached=cached)

    async def _announce(self, request: EncodeRequest, feature: StoredFeature) -> None:
        """Announce a feature to the consumer, or a copy on the host if the consumer cannot read this device."""
        consumer, mm_hash, owner = request.announce_to, request.ref.mm_hash, request.request_id
        while True:
            here, is_on_host = feature, consumer in self._off_device
            if is_on_host:
                here = await _with_room(partial(self._store.on_host, mm_hash, feature, owner))
            event = msgspec.structs.replace(
                self._store.event(mm_hash, here, owner),
                item=request.ref,
                producer=here.producer or self.model.producer,
            )
            try:
                await self.peers.call(consumer, "/feature/event", event, _ANNOUNCE_TIMEOUT_S)
                return
            except ServeError as error:
                if error.code != NOT_MAPPED or is_on_host:
                    raise
                self._off_device.add(consumer)

    async def _encode_item(self, request: EncodeRequest) -> _Encoded:
        """Encode an item. Requests for the same item share one encode, cancelled when the last one leaves."""
        mm_hash = request.ref.mm_hash
        if (encode := self._encodes.get(mm_hash)) is None:
            encode = _Encode(request.ref, self._family.pixels_of(request.ref), self._loop.create_future())
            encode.task = self._loop.create_task(self._prepare_and_encode(request, encode))
            self._encodes[mm_hash] = encode
            self.stream.is_wanted = True
        assert encode.task is not None
        encode.num_waiters += 1
        try:
            return await asyncio.shield(encode.task)
        finally:
            encode.num_waiters -= 1
            if not encode.num_waiters:
                del self._encodes[mm_hash]
                self.stream.is_wanted = bool(self._encodes)
                encode.task.cancel()

    async def _prepare_and_encode(self, request: EncodeRequest, encode: _Encode) -> _Encoded:
        ref = encode.ref
        async with self.processor.place("media", ref.num_pixels * S_PER_PIXEL) as place:
            encode.begun_s = time.monotonic()
            encode.inputs = await self.model.prepare(request.media, ref, place)
        self._waiting.append(encode)
        self.stream.changed.set()
        try:
            return await encode.feature
        finally:
            if encode in self._waiting:
                self._waiting.remove(encode)

    async def _run(self) -> None:
        stream = self.stream
        while True:
            await stream.changed.wait()
            stream.changed.clear()
            while self._waiting:
                # set before the check: the thread that changes the result later sees it in reconsider()
                was_held, stream.held_on = stream.held_on is not None, self._loop
                budget = self._budget
                try:
                    if not stream.may_start(self._waiting[0].num_pixels):
                        break
                    budget = min(budget, stream.max_pixels())
                except Exception:  # a device that does not answer must not end the encoder
                    logger.exception("checking whether an encode may start failed; starting it")
                stream.held_on = None
                first = self._waiting[0]
                # P computes a segment while the next one is encoded
                batch = [first] if first.ref.segment is not None else schedule_encodes(self._waiting, budget)
                del self._waiting[: len(batch)]
                for item in batch:
                    item.is_in_tower = True
                await self._encode_batch(batch, was_held)

    async def _encode_batch(self, batch: list[_Encode], was_held: bool) -> None:
        try:
            features, batch_s = await self._loop.run_in_executor(self._tower_thread, self._encode, batch, was_held)
            assert len(features) == len(batch), f"{len(features)} features for {len(batch)} items"
        except Exception as error:  # a failed batch must fail its items, not the encoder
            logger.exception("a batch of %d items failed", len(batch))
            end_if_lost(self.device)
            for item in batch:
                if not item.feature.done():
                    item.feature.set_exception(InstanceFailed(f"the encoder failed: {error}"))
            return
        for item, feature in zip(batch, features, strict=True):
            if not item.feature.done():
                item.feature.set_result((feature, batch_s))

    def _encode(self, batch: list[_Encode], was_held: bool) -> tuple[list[Any], tuple[float, float]]:
        start = time.monotonic()
        tower = self._loaded_tower()
        loaded = time.monotonic()
        pixels = [item.ref.num_pixels for item in batch]
        with (
            self.watch.step(sum(pixels).bit_length()),
            self.stream.encoding(sum(item.num_pixels for item in batch)),
        ):
            inputs = [item.inputs for item in batch]
            features = tower.encode(inputs, on_device=True) if self._store.on_device else tower.encode(inputs)
        end = time.monotonic()
        busy_s = end - loaded
        if not was_held:  # else the tower yielded the device before
            busy_s += start - max(self._free_since_s, min(item.begun_s for item in batch))
        self._free_since_s = end
        self.telemetry.add_batch(len(batch), sum(pixels), loaded, end, busy_s)
        return features, (start, end)

    def _loaded_tower(self) -> Any:
        if self.tower is None:
            with self.stream.loading():
                self.tower = self.model.tower(self.stream.between_layers)
        return self.tower


async def _with_room(put: Callable[[], Awaitable[StoredFeature | None]]) -> StoredFeature:
    while True:
        try:
            stored = await put()
        except ValueError as error:
            raise ServeError(str(error)) from error
        if stored is not None:
            return stored
        await asyncio.sleep(_RETRY_ROOM_S)  # held features are being fetched, so room will come
