"""Baselines of the papers in place of an instance's own parts, for the processes of a deployment.

A deployment that is made within :func:`ablated` has its processes import :mod:`benchmarks.ablations.plugin`, which
registers them (:mod:`epd_serve.factories`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from epd_serve.factories import PLUGINS, register

SETTINGS = "EPD_SERVE_ABLATION"
_ROOT = Path(__file__).parents[2]


def environment(**settings: Any) -> dict[str, str]:
    """The variables of processes that are to have the baselines of :func:`use`; ``bandwidth`` may be 2GB/s."""
    from pydantic import ByteSize, TypeAdapter

    if isinstance(bandwidth := settings.get("bandwidth"), str):
        settings["bandwidth"] = TypeAdapter(ByteSize).validate_python(bandwidth.removesuffix("/s"))
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {PLUGINS: "benchmarks.ablations.plugin", SETTINGS: json.dumps(settings), "PYTHONPATH": path}


@contextmanager
def ablated(**settings: Any) -> Iterator[None]:
    """Within, deployments are made whose processes have the baselines of :func:`use`, if there are any."""
    with patch.dict(os.environ, environment(**settings) if any(settings.values()) else {}):
        yield


def use(
    kv: str = "",
    prefetch: str = "",
    bandwidth: float | None = None,
    latency_ms: float = 0.0,
) -> None:
    """Register baselines in this process.

    Args:
        kv: ``layerwise`` sends single layers of single prompts, ``oneshot`` a whole prompt at its end.
        prefetch: with ``sync`` a feature is fetched when a step needs it.
        bandwidth, latency_ms: of the link between two instances, in bytes per second, and of each transfer; what
            goes through Mooncake Store is not slowed down.
    """
    # imported here: an instance needs the chosen ones alone
    if kv:
        from benchmarks.ablations.kv_push import LAYER_GROUPS

        register("layer groups", LAYER_GROUPS[kv])
    if prefetch == "sync":
        from benchmarks.ablations.features import FeaturesWhenDue

        register("features", FeaturesWhenDue)
    if bandwidth or latency_ms:
        from epd_serve.transfer.shaped import ShapedTransport

        latency_s = latency_ms / 1000
        register("transport", lambda transport: ShapedTransport(transport, bandwidth, latency_s))
