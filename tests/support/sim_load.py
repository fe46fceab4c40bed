"""Requests to simulate, as ``epd-serve bench`` draws them."""

from __future__ import annotations

from epd_serve.sim.workloads import SimRequest, read_load

SHAREGPT_4O = "sharegpt4o-like"
VISUAL_WEB_INSTRUCT = "visualwebinstruct-like"
TEXT = "synthetic,image_share=0,text_tokens=normal:512:256,output_tokens=normal:128:64"


def load(workload: str, count: int, rate: float, seed: int = 0) -> list[SimRequest]:
    """Return ``count`` requests at random times, ``rate`` a second on average."""
    return list(read_load(workload, rate=rate, count=count, seed=seed).requests)
