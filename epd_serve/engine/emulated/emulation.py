"""The time that an instance's steps, encodes and transfers take on an emulated device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import Tensor

from device.base import Device
from device.datasheets import emulated_kind, is_measured
from device.emulated.accelerator import EmulatedDevice
from device.emulated.chip import COPYING, never_waiting
from epd_serve.config import InstanceOptions
from epd_serve.cost.device_time import DeviceTime
from epd_serve.cost.shape import shape_of
from epd_serve.engine.step_inputs import StepInputs
from epd_serve.sched.step_cost import StepWork
from epd_serve.transfer.shaped import over_emulated_links
from epd_serve.transfer.transport import Transport


class Emulation:
    """An emulated device that is as fast as the real one with some model, where the CPU is not slower.

    Attributes:
        num_tower_layers: layers over which the time of encodes is spread, so that they can pause in between.
    """

    def __init__(self, device: EmulatedDevice, time: DeviceTime) -> None:
        self._device = device
        self._time = time
        self.num_tower_layers = self._num_left = 0
        device.timeline.interference = time.interference

    @classmethod
    def of(cls, options: InstanceOptions, device: Device) -> Emulation:
        """Raises ValueError for a model whose sizes cannot be read."""
        assert isinstance(device, EmulatedDevice), f"{device.name} is no emulated device"
        kind = emulated_kind(options.device)
        return cls(device, DeviceTime.of("" if is_measured(kind) else str(options.model), kind))

    def linked(self, inner: Transport, model: Path, value_bytes: int) -> Transport:
        """The transport over the device's link to its neighbours, for the bytes of the model whose times it takes.

        Args:
            model: that is computed. value_bytes: of one number of its KV and features.
        """
        profile, served = self._time.profile, shape_of(str(model)).language
        scales = {
            "kv": profile.kv_token_bytes / (served.kv_values * value_bytes),
            "features": self._feature_scale(model, value_bytes),
        }
        return over_emulated_links(inner, profile, scales)

    def _feature_scale(self, model: Path, value_bytes: int) -> float:
        return self._time.profile.feature_token_bytes / (shape_of(str(model)).language.hidden * value_bytes)

    @contextmanager
    def step(self, inputs: StepInputs, kv: Tensor, places: Tensor, num_parts: int) -> Iterator[Callable[[], None]]:
        """A context in which a step is launched, and this thread does not wait for the device.

        Otherwise as :meth:`~device.emulated.accelerator.EmulatedDevice.timed`.

        Args:
            kv: [layers, 2, num_blocks, block_size, kv_heads, head_dim], of which what the step writes is unknown
                until it has.
            places: the slots [tokens] that it writes.
        """
        slots = kv.flatten(2, 3)
        slots.index_fill_(2, places, math.nan)
        chunks = zip(inputs.prefill_query_lens, inputs.prefill_context_lens, strict=True)
        work = StepWork.of(inputs.decode_context_lens, [(end - count, count) for count, end in chunks])
        cost_s, demand = self._time.step(
            work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs
        )
        try:
            with never_waiting(), self._device.timed(cost_s, demand, num_parts) as next_part:
                yield next_part
        except BaseException:
            slots.index_fill_(2, places, 0.0)  # nothing has written them: who has them next needs numbers
            raise

    def copy(self, num_tokens: float) -> AbstractContextManager[object]:
        """A context in which the KV of so many tokens is copied to another device, over their link."""
        profile = self._time.profile
        return self._device.timed(num_tokens * profile.kv_token_bytes / profile.link_bytes_per_s, COPYING)

    def copying_features(self, model: Path, value_bytes: int) -> Callable[[int], AbstractContextManager[object]]:
        """As :meth:`copy`, for so many bytes of features; ``model``, ``value_bytes``: see :meth:`linked`."""
        byte_s = self._feature_scale(model, value_bytes) / self._time.profile.link_bytes_per_s
        return lambda nbytes: self._device.timed(nbytes * byte_s, COPYING)

    @contextmanager
    def encode(self, pixels: Sequence[int]) -> Iterator[None]:
        """A context in which images of so many pixels are encoded; at its end the device has done so."""
        if not self._time.profile.encode:  # what has a tower of another kind than for pictures
            yield
            return
        cost_s, demand = self._time.encode(pixels)
        with self._device.timed(cost_s, demand, self.num_tower_layers + 1) as self._next_part:
            self._num_left = self.num_tower_layers
            try:
                yield
            finally:
                self._num_left = 0
        self._device.current_stream().synchronize()

    def between_layers(self, before_layer: Callable[[], None]) -> Callable[[], None]:
        """The function for a tower to call before each layer: it ends a part of the batch's time."""

        def next_layer() -> None:
            if self._num_left:  # a tower that takes one image after the other has its layers several times
                self._num_left -= 1
                self._next_part()
            before_layer()

        return next_layer
