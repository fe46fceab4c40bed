"""Metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def metric_sums(text: str, prefix: str = "", *labels: str) -> dict[str, float]:
    """The sum of each metric over its labels, apart for the values of these ``labels``; without the prefix."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            told = [sample.labels[label] for label in labels if label in sample.labels]
            name = " ".join([sample.name.removeprefix(prefix), *told])
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums
