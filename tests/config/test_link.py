"""The way of the KV reaches the instances, and senseless ones are refused."""

from __future__ import annotations

import pytest

from epd_serve.config import InstanceOptions, parse_config
from epd_serve.config.sizes import parse_rate


def options(text: str) -> InstanceOptions:
    config = parse_config(f"model: demo\ninstances: {text}")
    (placed, *_) = config.placement()
    return config.options_for(placed, device="cpu", port=1, threads=1)


def test_the_mode_reaches_an_instance() -> None:
    assert options("{}").kv_transfer.mode == "grouped"
    pulled = options("{kv_transfer: {mode: pull}}")
    assert pulled.kv_transfer.mode == "pull"
    assert InstanceOptions.model_validate_json(pulled.to_json()) == pulled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{kv_transfer: {mode: pull, group_layers: 4}}", "sends no groups"),
        ("{kv_transfer: {mode: push}}", "write grouped or pull"),
    ],
)
def test_what_is_senseless_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(text)


@pytest.mark.parametrize(("text", "rate"), [("2GB/s", 2 * 10**9), ("1MiB/s", 1 << 20), ("5MB", 5 * 10**6), (7, 7)])
def test_rates(text: object, rate: int) -> None:
    assert parse_rate(text) == rate
