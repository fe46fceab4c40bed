"""Load a transformers checkpoint onto a device with torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from device.base import Device
from device.registry import get_device
from epd_serve.config import InstanceOptions
from epd_serve.config.model_files import check_model_files
from epd_serve.engine.device_features import DeviceFeatureStore
from epd_serve.engine.device_memory import are_reached
from epd_serve.engine.kv_memory import naming_memory, resolve_dtype
from epd_serve.engine.pace import encode_seconds
from epd_serve.instance.loading.language_weights import LanguageWeights
from epd_serve.instance.text.request_processor import Place, num_media_threads
from epd_serve.media.decoder_pool import DecoderPool
from epd_serve.media.picture import MediaLimits
from epd_serve.models.family import Family
from epd_serve.models.loader import load_family, media_fingerprint
from epd_serve.models.tower import Tower
from epd_serve.protocol.wire import MediaRef
from epd_serve.transfer.feature_store import FeatureStore, StoreObserver
from epd_serve.transfer.transport import Transport

if TYPE_CHECKING:
    from epd_serve.instance.instance import Instance

#: Guards the instance; the gateway applies the operator's limits.
_MEDIA_LIMITS = MediaLimits(max_pixels=1 << 28, max_bytes=1 << 30)
#: Limits on CPU seconds for decoding one image, and one video or audio file: many times what a valid file needs.
_PICTURE_CPU_S, _LONG_CPU_S = 2.0, 10.0


class CheckpointModel:
    """A transformers checkpoint, opened for a device.

    Attributes:
        torch_dtype, dtype: dtype of weights and features.
        location: path shown in ``/info``.
        fingerprint: digest of everything except the media that determines a feature.
        producer: kind of device and operators that compute features.
        feature_token_bytes: feature bytes per media token.
        max_positions: maximum context length of the model.
        measured: seconds of steps and encodes measured so far, for the budgets of each role.
    """

    def __init__(self, options: InstanceOptions, device: Device) -> None:
        assert isinstance(options.model, Path)
        check_model_files(options.model)
        self._options, self.device = options, device
        self.path: Path = options.model
        self.family: Family = load_family(self.path)
        self.torch_dtype = resolve_dtype(options.dtype, self.family.config, device)
        self.location, self.dtype = str(self.path), str(self.torch_dtype).removeprefix("torch.")
        self.fingerprint = media_fingerprint(self.path, self.dtype)
        self.producer = f"{device.type}: {device.ops.name}"
        text = self.family.config.get_text_config()
        self.max_positions: int = text.max_position_embeddings
        self.feature_token_bytes = self.torch_dtype.itemsize * text.hidden_size
        self.measured: dict[str, float] = {}
        self._are_reached: bool | None = None
        self.decoders = DecoderPool(
            cpu_s=_PICTURE_CPU_S, limits=_MEDIA_LIMITS, num_kept=num_media_threads(options.threads)
        )

    async def prepare(self, media: bytes, ref: MediaRef, place: Place) -> Any:
        """Decode and preprocess a media file to tower inputs. Raises InvalidRequest for an unusable file."""
        decoders, family = self.decoders, self.family
        if ref.modality == "video":
            assert family.video is not None, "the family supports videos"
            inputs = family.video.inputs(ref)
            frames = decoders.frames(media, ref.video, family.video.indices(ref), place, cpu_s=_LONG_CPU_S)
            async with aclosing(frames):
                async for some in frames:
                    await place.run(inputs.add, some)
            return await place.run(inputs.finish)
        if ref.modality == "audio":
            assert family.audio is not None, "the family supports audio"
            family.audio.check_length(ref)
            samples = await decoders.samples(media, ref.audio, family.audio.rate, place, cpu_s=_LONG_CPU_S)
            return await place.run(family.audio.inputs, samples)
        size = ref.width, ref.height
        async with decoders.decoded(media, size, place, low_detail=ref.low_detail) as pixels:
            return await place.run(self._tower_inputs, ref, pixels)

    def _tower_inputs(self, ref: MediaRef, pixels: Any) -> dict[str, torch.Tensor]:
        """Return tower inputs of an image, cast to the tower's dtype here to save memory and tower time."""
        inputs = self.family.of(ref).preprocess(pixels)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.torch_dtype)
        return inputs

    def data_of(self, feature: Any) -> Any:
        """Return a feature's bytes as a memoryview on the host, or as [nbytes] uint8 on its device."""
        data = feature.view(torch.uint8).reshape(-1)
        return data.numpy().data if data.device.type == "cpu" else data

    def tower(self, before_layer: Callable[[], None]) -> Tower:
        """Load the tower, which calls ``before_layer`` before each layer. Blocks."""
        with naming_memory(self.device, "the tower"):
            return Tower(self.path, self.torch_dtype, self.device, before_layer, self.family)

    def linked(self, transport: Transport) -> Transport:
        """Wrap the transport with the links of the model's device; a no-op for real devices."""
        return transport

    def feature_store(
        self, options: InstanceOptions, host: FeatureStore, transport: Transport, observe: StoreObserver
    ) -> FeatureStore:
        """Return a store on the device that falls back to ``host``, or ``host`` itself on a CPU. Blocks."""
        if self.device.type == "cpu":
            return host
        shares = options.feature_store == "embedded" and options.kv_transfer.transport == "auto"
        capacity_bytes = options.sizes.feature_cache_bytes if shares and options.role.encodes else 0
        if options.feature_cache_bytes is None:  # default size; others may use most of the device's memory
            capacity_bytes = min(capacity_bytes, self.device.headroom() // 4)
        return DeviceFeatureStore(self.device, transport, host, capacity_bytes, observe)

    def are_regions_reached(self, transport: Transport) -> bool:
        """Return whether the transport can move device memory; false on a CPU. Blocks."""
        if self._are_reached is None:
            self._are_reached = self.device.type != "cpu" and are_reached(self.device, transport)
        return self._are_reached

    def encode_seconds(self, tower: Any, num_images: int) -> float:
        """Measure the seconds to encode ``num_images`` images of 448x448 pixels."""
        return encode_seconds(tower, self.family, num_images)

    def language(self, instance: Instance) -> LanguageWeights:
        """Load the language model. Blocks. Raises ValueError for an unsupported model."""
        with instance.streams.language.loading(), naming_memory(self.device, "the language model"):
            return LanguageWeights(self, instance)


def set_up(threads: int | None) -> None:
    """Silence transformers, and limit torch to ``threads`` threads."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        get_device("cpu").set_threads(threads)
        torch.set_num_interop_threads(1)
