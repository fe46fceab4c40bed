"""The time that an emulated device takes for a model's stages: the device's own, without its host's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from device.datasheets import is_measured, spec_of
from device.emulated.timeline import Demand
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of


class DeviceTime:
    """Seconds of a model's steps and encodes on a device that does nothing else.

    Args:
        profile: from a data sheet or measured.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    @classmethod
    def of(cls, model: str, kind: str) -> DeviceTime:
        """The times of a model on a kind of device.

        Args:
            model: a name of :data:`~epd_serve.cost.shape.KNOWN_SHAPES`, a directory or config.json of a model; ""
                for that of the profile.
            kind: of a data sheet, or a file that ``epd-serve profile`` wrote, whose times are taken as measured.

        Raises ValueError for a model or a kind that is none of these, and for the profile of another model.
        """
        if not is_measured(kind):
            # the host's part of a step is taken by the host, which is not emulated
            return cls(analytic_profile(shape_of(model), replace(spec_of(kind), launch_s=0.0)))
        profile = Profile.read(Path(kind))
        if model and (num_layers := shape_of(model).language.num_kv_layers) != profile.num_layers:
            raise ValueError(
                f"{kind} is the profile of {profile.model}, with {profile.num_layers} layers, and {model} has "
                f"{num_layers}; take a profile of it, made by 'epd-serve profile'"
            )
        return cls(profile)

    def step(self, num_tokens: int, num_sequences: int, context: int, pairs: int) -> tuple[float, Demand]:
        """A step of the language model; units as in :class:`~epd_serve.sched.step_cost.StepWork`."""
        profile = self.profile
        lines = profile.step if pairs else profile.decode_lines(num_sequences)
        seconds = [line.seconds(num_tokens, num_sequences, context, pairs) for line in lines]
        return max(seconds), self._demand(seconds)

    def encode(self, pixels: Sequence[int]) -> tuple[float, Demand]:
        """A batch of images, by the pixels that they have. Raises ValueError for a model without a tower."""
        seconds = self.profile.encode_s(pixels)
        seen = self.profile.seen(pixels)
        return seconds, self._demand([line.seconds(seen) for line in self.profile.encode])

    def _demand(self, seconds: Sequence[float]) -> Demand:
        """By the lines (compute, memory) of a data sheet; what was measured is taken to want the whole device."""
        if self.profile.kind != "analytic" or len(seconds) != 2:
            return Demand()
        compute, memory = (one / max(seconds) for one in seconds)
        return Demand(
            compute=self.profile.compute_share * compute,
            bandwidth=self.profile.bandwidth_share * memory,
        )
