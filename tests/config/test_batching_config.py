"""The SLO and how batches follow from it."""

import pytest

from epd_serve.config import ConfigError, DeploymentConfig, InstanceOptions, parse_config


def options(config: DeploymentConfig) -> dict[str, InstanceOptions]:
    placed = config.placement()
    return {str(i.role): config.options_for(i, device="cpu", port=1, threads=1) for i in placed}


def test_without_an_slo_there_is_no_limit() -> None:
    for each in options(parse_config("")).values():
        assert (each.slo.ttft_ms, each.slo.tpot_ms, each.batching.order) == (None, None, "fcfs")
        assert (each.batching.policy, each.batching.alpha) == ("stage-level", 0.5)


def test_batching_can_differ_by_role() -> None:
    text = """
    topology: EP-D
    slo: {ttft_ms: 900, tpot_ms: 40.5}
    instances: {batching: {alpha: 0.4, order: slack}}
    roles: {D: {batching: {policy: unlimited, order: fcfs}}}
    """
    by_role = options(parse_config(text))
    prefill, decode = by_role["EP"], by_role["D"]
    assert (prefill.slo.ttft_ms, prefill.slo.tpot_ms) == (decode.slo.ttft_ms, decode.slo.tpot_ms) == (900, 40.5)
    assert (prefill.batching.order, prefill.batching.alpha) == ("slack", 0.4)
    assert prefill.batching.policy == "stage-level"
    assert (decode.batching.order, decode.batching.policy, decode.batching.alpha) == ("fcfs", "unlimited", 0.4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slo: {ttft_ms: 0}", "write a number above 0"),
        ("slo: {tpot_ms: .inf}", "finite"),
        ("slo: {tpot: 5}", "did you mean 'tpot_ms'"),
        ("instances: {batching: {alpha: 1.5}}", "write 1 or less"),
        ("instances: {batching: {order: lifo}}", "fcfs, sjf or slack"),
        ("instances: {batching: {order: slack}}", "set slo.ttft_ms"),
        ("roles: {P: {batching: {order: slack}}}", "set slo.ttft_ms"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(text)
