"""Counts of what becomes of features, in an instance's ``/metrics``."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

#: ``encoded`` by this instance's tower; ``reused`` by E, which had it; ``fetched`` by P from an E, now or before;
#: ``rewritten`` at D, which was given no pixels; ``missing`` for requests that D would have had to encode for.
EVENTS = ("encoded", "reused", "fetched", "rewritten", "missing")


class FeatureStats(ECConnectorStats):
    """Counts of :data:`EVENTS` since the last report."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> FeatureStats:
        return FeatureStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class FeatureMetrics(ECConnectorPromMetrics):
    """``vllm:epd_serve_features_total`` by event."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counter = metric_types[prometheus_client.Counter](
            name="vllm:epd_serve_features",
            documentation="Encoder outputs by what became of them.",
            labelnames=[*labelnames, "event"],
        )
        self._counters = {
            (engine, event): counter.labels(*values, event)
            for engine, values in labelvalues.items()
            for event in EVENTS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for event, count in transfer_stats_data.items():
            self._counters[engine_idx, event].inc(count)


class CountingConnector(ECConnectorBase):
    """Tells vLLM what its side of a connector has counted."""

    @abstractmethod
    def take_counts(self) -> Counter[str]:
        """Return the counts of :data:`EVENTS` since the last call."""

    def get_ec_connector_stats(self) -> FeatureStats | None:
        counts = self.take_counts()
        return FeatureStats(data=dict(counts)) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> FeatureStats:
        return FeatureStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FeatureMetrics:
        return FeatureMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
