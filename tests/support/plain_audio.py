"""Sounds as transformers' processors are given them: decoded by PyAV in one piece."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound's file. ``as_url``: it is sent as ``audio_url``, else as ``input_audio``."""

    data: bytes
    format: str = "wav"
    as_url: bool = False

    @property
    def part(self) -> dict[str, Any]:
        text = base64.b64encode(self.data).decode()
        if self.as_url:
            return {"type": "audio_url", "audio_url": {"url": f"data:audio/{self.format};base64,{text}"}}
        return {"type": "input_audio", "input_audio": {"data": text, "format": self.format}}

    def samples(self, rate: int = 16_000) -> NDArray[np.float32]:
        """One channel, -1 to 1."""
        with av.open(io.BytesIO(self.data)) as file:
            resampler = av.AudioResampler(format="fltp", rate=rate)
            frames = [one for frame in file.decode(audio=0) for one in resampler.resample(frame)]
            frames += resampler.resample(None)
        whole = np.concatenate([frame.to_ndarray() for frame in frames], axis=1)
        return whole.astype(np.float32).mean(axis=0)
