"""Who may steal, and what an instance and a gateway are told of it."""

from __future__ import annotations

import pytest

from epd_serve.config import ConfigError, parse_config
from epd_serve.flow.stealing import StealRule, steal_rule

TIERS = """
topology: 2EPD-2PD
roles: {EPD: {steals: true, max_num_seqs: 16}, PD: {feature_batch_ms: 200}}
instances: {feature_batch: 32}
gateway: {stealing: {threshold: 4, batch: 8, collect_ms: 50}, parallel_encode: false}
"""


def test_thieves_and_their_rule_are_told() -> None:
    config = parse_config(TIERS)
    options = {one.name: config.options_for(one, device="cpu", port=1, threads=1) for one in config.placement()}
    assert [name for name, one in options.items() if one.steals] == ["epd0", "epd1"]
    assert options["epd0"].steals and not options["pd0"].steals
    assert options["epd0"].feature_batch == 32 and options["epd0"].feature_batch_ms == 500
    assert options["pd0"].feature_batch_ms == 200
    assert steal_rule(config.gateway.stealing) == StealRule(threshold=4, batch=8, collect_s=0.05)
    assert not config.gateway.parallel_encode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{topology: E-PD, roles: {E: {steals: true}}}", "lacks a stage"),
        ("{topology: EPD, instances: {steals: true}}", "nobody to steal from"),
        ("{topology: EPD-P, roles: {EPD: {steals: true}}}", "nobody to steal from"),
        ("{gateway: {stealing: {batch: 1}}}", "write 2 or more"),
        ("{instances: {feature_batch: 0}}", "write 1 or more"),
    ],
)
def test_what_cannot_steal_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(text)
