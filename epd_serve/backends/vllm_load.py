"""An instance's load, read from vLLM's ``/metrics``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from epd_serve.protocol.wire import Load

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROGRESS = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"}
_SUMMED = {
    *_PROGRESS,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
}
#: No figure of an instance comes near to it; what is beyond is none.
_MOST = 1e12


@dataclass(frozen=True, kw_only=True)
class VllmFigures:
    """The figures of one instance; a figure that its page lacks is 0.

    Attributes:
        started_at: Unix time of its start, which names the process.
        progress: tokens and requests that it has finished since then: it grows with the steps that end.
    """

    started_at: float
    num_running: int
    num_waiting: int
    progress: int
    block_size: int
    num_blocks: int
    kv_usage: float

    def load(self, *, num_waiting_tokens: int, num_waiting_encodes: int, num_waiting_pixels: int) -> Load:
        """The load as the gateway's policies read it.

        The caller adds the contents of the queue, which vLLM does not report.
        """
        return Load(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_waiting_tokens=num_waiting_tokens,
            num_waiting_encodes=num_waiting_encodes,
            num_waiting_pixels=num_waiting_pixels,
            free_blocks=round(self.num_blocks * (1 - self.kv_usage)),
            total_blocks=self.num_blocks,
        )


def read_figures(text: str) -> VllmFigures:
    """Read Prometheus' text format; lines that do not parse are skipped."""
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0.0)
    info: dict[str, str] = {}
    started_at, num_engines = 0.0, 0
    for name, labels, value in _LINE.findall(text):
        if name in _SUMMED:
            sums[name] += _number(value)
            num_engines += name == "vllm:kv_cache_usage_perc"
        elif name == "vllm:cache_config_info":
            info = dict(_LABEL.findall(labels))
        elif name == "process_start_time_seconds":
            started_at = _number(value)
    return VllmFigures(
        started_at=started_at,
        num_running=int(sums["vllm:num_requests_running"]),
        num_waiting=int(sums["vllm:num_requests_waiting"]),
        progress=int(sum(sums[name] for name in _PROGRESS)),
        block_size=_count(info.get("block_size")),
        num_blocks=_count(info.get("num_gpu_blocks")),
        kv_usage=sums["vllm:kv_cache_usage_perc"] / max(1, num_engines),
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number <= _MOST else 0.0


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
