"""Requests to simulate, as ``epd-serve bench`` draws them, and what must be back after a run."""

from __future__ import annotations

from epd_serve.sim.simulator import Simulation
from epd_serve.sim.workloads import SimRequest, read_load

SHAREGPT_4O = "sharegpt4o-like"
VISUAL_WEB_INSTRUCT = "visualwebinstruct-like"
TEXT = "synthetic,image_share=0,text_tokens=normal:512:256,output_tokens=normal:128:64"


def load(workload: str, count: int, rate: float, seed: int = 0) -> list[SimRequest]:
    """Return ``count`` requests at random times, ``rate`` a second on average."""
    return list(read_load(workload, rate=rate, count=count, seed=seed).requests)


def check_books(simulation: Simulation) -> None:
    """Raise AssertionError unless all blocks and features are back once all requests have ended."""
    assert not simulation.num_open, "requests are open"
    for instance in simulation.instances.values():
        instance.store.check_integrity()
        instance.features.check_integrity()
        assert not instance.features.num_owners, f"{instance.spec.name}: features are held"
        instance.pool.check_integrity()
        assert instance.pool.num_free == instance.pool.capacity, f"{instance.spec.name}: blocks are held"
