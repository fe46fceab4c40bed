"""A load that turns into another, and the deployment that it is sent to."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from epd_serve.config import DeploymentConfig

TTFT_SLO_S = 2.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """``num_tokens``: of an answer; ``side``: of the request's square picture, in pixels; 0: it has none."""

    num_tokens: int
    side: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """The first tenth of the requests is ``before``, the others are ``after``.

    Attributes:
        start: the layout, made for ``before``; it has ``num_decodes`` decode instances.
    """

    start: str
    num_decodes: int
    before: Phase
    after: Phase

    def phases(self, count: int) -> list[Phase]:
        return [self.before if number < count // 10 else self.after for number in range(count)]


SHIFT = Shift(
    start="5E-P-2D",
    num_decodes=2,
    before=Phase(num_tokens=25, side=336),
    after=Phase(num_tokens=250, side=336),
)


def config(path: Path, topology: str, admin_port: int, tpot_slo_s: float, *, controlled: bool) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "topology": topology,
            "model": str(path),
            "served_model_name": "benchmark",
            "dtype": "float32",
            "gateway": {"port": 0, "admin": {"port": admin_port}, "health": {"probe_timeout_s": 60}},
            "slo": {"ttft_ms": 1e3 * TTFT_SLO_S, "tpot_ms": 1e3 * tpot_slo_s},
            "instances": {
                "base_port": 0,
                "threads": 1,
                "queue_timeout_s": 600,
                "num_blocks": 8192,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 512,
                "batching": {"policy": "unlimited"},
            },
            "elastic": {"enabled": controlled, "interval_s": 0.5, "hold_s": 1.5, "cooldown_s": 3},
        }
    )


def body(number: int, phase: Phase) -> dict[str, Any]:
    """A request for a picture that no other number has."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"Where is the blue square, {number}?"}]
    if phase.side:
        blocks = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(blocks).resize((phase.side, phase.side), Image.Resampling.NEAREST).save(buffer, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    sampling = {"temperature": 0, "max_tokens": phase.num_tokens, "ignore_eos": True}
    return {**sampling, "messages": [{"role": "user", "content": content}]}
