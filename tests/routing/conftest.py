"""Instance tables as a gateway would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from instance_info import instance_info

from epd_serve.protocol.instance_state import InstanceInfo, Load
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.table import InstanceTable
from epd_serve.types import StageRate

#: A pixel takes a microsecond, a token a millisecond, a step 10 ms and one more for each sequence.
RATES = {"E": StageRate(0.0, 1e-6), "P": StageRate(0.0, 1e-3), "D": StageRate(0.01, 1e-3)}


def info(name: str, role: str, load: Load | None = None, **more: Any) -> InstanceInfo:
    values: dict[str, Any] = {
        "max_model_len": 100_000,
        "load": load or Load(rates=RATES),
        "host_id": "here",
        "block_size": 16,
        "kv_token_bytes": 1000,
        "tokens_per_pixel": 0.001,
        "feature_token_bytes": 1000,
    }
    return instance_info(name, role, **values | more)


class Build:
    """Tables and items for tests: ``build("p0:P:tokens=3", "e0:E:pixels=1000", "d0:D:sequences=2")``."""

    def __call__(self, *instances: str, **more: Any) -> InstanceTable:
        table = InstanceTable([(one.split(":")[0], f"http://{one}") for one in instances])
        for one in instances:
            self.update(table, one, **more)
        return table

    def update(self, table: InstanceTable, one: str, **more: Any) -> None:
        name, role, *loads = one.split(":")
        load = more.pop("load", None) or self.load(*loads)
        table.update(name, info(name, role, load, **more), contains=table.num_calls)

    def load(self, *loads: str, **more: Any) -> Load:
        names = {"tokens": "num_waiting_tokens", "pixels": "num_waiting_pixels", "sequences": "num_running"}
        values = {names[key]: int(value) for key, _, value in (one.partition("=") for one in loads)}
        return Load(**({"rates": RATES, "mean_output_tokens": 10.0} | values | more))

    def item(self, name: str, num_pixels: int = 1000) -> MediaRef:
        return MediaRef(mm_hash=name, width=num_pixels, height=1)


@pytest.fixture(scope="session")
def build() -> Callable[..., InstanceTable]:
    return Build()
