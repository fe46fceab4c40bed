"""Metrics of a vLLM server."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PROGRESS = {"vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"}
#: Larger numbers are invalid.
_MOST = 1e12


@dataclass(frozen=True, kw_only=True)
class VllmFigures:
    """The metrics of one instance; missing ones are 0.

    Attributes:
        started_at: Unix time of its start, which identifies the process.
        progress: finished tokens and requests, which grow with each step.
    """

    started_at: float
    num_running: int
    num_waiting: int
    progress: int
    block_size: int
    num_blocks: int
    kv_usage: float


def read_figures(text: str) -> VllmFigures:
    """Parse Prometheus' text format, skipping invalid lines."""
    values: dict[str, list[float]] = {}
    cache: dict[str, str] = {}
    for name, labels, value in _LINE.findall(text):
        if name == "vllm:cache_config_info":
            cache = dict(_LABEL.findall(labels))
        else:
            values.setdefault(name, []).append(_number(value))

    def total(name: str) -> float:
        return sum(values.get(name, ()))

    usage = values.get("vllm:kv_cache_usage_perc", [0.0])  # one for each engine
    return VllmFigures(
        started_at=values.get("process_start_time_seconds", [0.0])[0],
        num_running=int(total("vllm:num_requests_running")),
        num_waiting=int(total("vllm:num_requests_waiting")),
        progress=int(sum(map(total, _PROGRESS))),
        block_size=int(_number(cache.get("block_size", ""))),
        num_blocks=int(_number(cache.get("num_gpu_blocks", ""))),
        kv_usage=sum(usage) / len(usage),
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number <= _MOST else 0.0
