"""The keys of the data plane's experiments reach the instances, and senseless ones are refused."""

from __future__ import annotations

import pytest

from epd_serve.config import InstanceOptions, parse_config
from epd_serve.config.sizes import parse_rate


def options(text: str) -> InstanceOptions:
    config = parse_config(f"model: demo\ninstances: {text}")
    (placed, *_) = config.placement()
    return config.options_for(placed, device="cpu", port=1, threads=1)


def test_a_link_and_the_modes_reach_an_instance() -> None:
    plain = options("{}")
    assert (plain.kv_transfer.mode, plain.feature_prefetch, plain.link.bandwidth, plain.link.latency_ms) == (
        "grouped",
        "async",
        None,
        0.0,
    )
    shaped = options(
        "{kv_transfer: {mode: pull}, feature_prefetch: sync, link: {bandwidth: 1.5GB/s, latency_ms: 0.5}}"
    )
    assert (shaped.kv_transfer.mode, shaped.feature_prefetch, shaped.link.bandwidth, shaped.link.latency_ms) == (
        "pull",
        "sync",
        1_500_000_000,
        0.5,
    )
    assert InstanceOptions.model_validate_json(shaped.to_json()) == shaped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{kv_transfer: {mode: oneshot, group_layers: 4}}", "sends no groups"),
        ("{kv_transfer: {mode: push}}", "write 'grouped'|grouped, "),
        ("{link: {bandwidth: 2 parsecs}}", "no amount of memory"),
        ("{link: {latency_ms: -1}}", "latency_ms"),
        ("{feature_prefetch: never}", "async"),
    ],
)
def test_what_is_senseless_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(text)


@pytest.mark.parametrize(("text", "rate"), [("2GB/s", 2 * 10**9), ("1MiB/s", 1 << 20), ("5MB", 5 * 10**6), (7, 7)])
def test_rates(text: object, rate: int) -> None:
    assert parse_rate(text) == rate
