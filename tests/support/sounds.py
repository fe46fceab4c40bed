"""Short sounds for tests, made by PyAV."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from epd_serve.media.audio import AudioLimits

LIMITS = AudioLimits(max_bytes=16 << 20, max_seconds=120.0)
#: By the word for a format: FFmpeg's codec and container.
KINDS = {
    "wav": ("pcm_s16le", "wav"),
    "mp3": ("libmp3lame", "mp3"),
    "flac": ("flac", "flac"),
    "ogg": ("libopus", "ogg"),
    "m4a": ("aac", "mp4"),
    "webm": ("libopus", "webm"),
}


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


def tune(seed: int, seconds: float, rate: int = 16_000, channels: int = 1) -> NDArray[np.int16]:
    """Tones that rise and fall, under noise: [channels, samples], each channel of its own."""
    time = np.arange(round(seconds * rate)) / rate
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(channels):
        low, high, beat = rng.uniform(80, 400), rng.uniform(600, 2500), rng.uniform(0.5, 3)
        wave = np.sin(2 * np.pi * (low * time + high / beat * np.sin(beat * time)))
        made.append(7000 * wave * (1 + np.sin(beat * time)) + rng.normal(0, 700, len(time)))
    return np.stack(made).clip(-32768, 32767).astype(np.int16)


def sound(seed: int = 0, seconds: float = 1.5, rate: int = 16_000, channels: int = 1, kind: str = "wav") -> bytes:
    return encoded(tune(seed, seconds, rate, channels), rate, kind)


def encoded(samples: NDArray[np.int16], rate: int, kind: str) -> bytes:
    """Samples [channels, n] as a file."""
    codec, container = KINDS[kind]
    layout = "mono" if len(samples) == 1 else "stereo"
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=layout)
        for start in range(0, samples.shape[1], rate):
            piece = np.ascontiguousarray(samples[:, start : start + rate].T.reshape(1, -1))
            frame = av.AudioFrame.from_ndarray(piece, format="s16", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()
