"""The time that an emulated device takes for a model's stages, without the host's part."""

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
    """Seconds of a model's steps and encodes on an otherwise idle device, from an analytic or measured profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    @classmethod
    def of(cls, model: str, kind: str) -> DeviceTime:
        """Return the times of a model on a kind of device.

        Args:
            model: a name for :func:`~epd_serve.cost.shape.shape_of`; "" for the model of the profile.
            kind: name of a data sheet, or file written by ``epd-serve profile``.

        Raises ValueError for an unknown model or kind, and for the profile of another model.
        """
        if not is_measured(kind):
            # the real host takes its own time to launch a step
            return cls(analytic_profile(shape_of(model), replace(spec_of(kind), launch_s=0.0)))
        profile = Profile.read(Path(kind))
        if model and (num_layers := shape_of(model).language.num_kv_layers) != profile.num_layers:
            raise ValueError(
                f"{kind} is the profile of {profile.model} with {profile.num_layers} layers, but {model} has "
                f"{num_layers}; make a profile of it with 'epd-serve profile'"
            )
        return cls(profile)

    def step(self, num_tokens: int, num_sequences: int, context: int, pairs: int) -> tuple[float, Demand]:
        """Return the time and demand of a language model step (:class:`~epd_serve.sched.step_cost.StepWork`)."""
        profile = self.profile
        lines = profile.step if pairs else profile.decode_lines(num_sequences)
        seconds = [line.seconds(num_tokens, num_sequences, context, pairs) for line in lines]
        return max(seconds), self._demand(seconds)

    def encode(self, pixels: Sequence[int]) -> tuple[float, Demand]:
        """Return the time and demand of a batch of images. Raises ValueError for a model without a tower."""
        seconds = self.profile.encode_s(pixels)
        resized = self.profile.resized(pixels)
        return seconds, self._demand([line.seconds(resized) for line in self.profile.encode])

    def _demand(self, seconds: Sequence[float]) -> Demand:
        """Return the demand by the (compute, memory) lines; measured profiles demand the whole device."""
        if self.profile.kind != "analytic" or len(seconds) != 2:
            return Demand()
        compute, memory = (one / max(seconds) for one in seconds)
        return Demand(
            compute=self.profile.compute_share * compute,
            bandwidth=self.profile.bandwidth_share * memory,
        )
