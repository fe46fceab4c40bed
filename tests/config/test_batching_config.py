"""The SLO and the order of batches, by role."""

from epd_serve.config import DeploymentConfig, InstanceOptions, parse_config


def options(config: DeploymentConfig) -> dict[str, InstanceOptions]:
    placed = config.placement()
    return {str(i.role): config.options_for(i, device="cpu", port=1, threads=1) for i in placed}


def test_without_an_slo_there_is_no_limit() -> None:
    for each in options(parse_config("")).values():
        assert (each.slo.ttft_ms, each.slo.tpot_ms, each.batching.order) == (None, None, "fcfs")


def test_batching_can_differ_by_role() -> None:
    text = """
    topology: EP-D
    slo: {ttft_ms: 900, tpot_ms: 40.5}
    instances: {batching: {order: slack}}
    roles: {D: {batching: {order: fcfs}}}
    """
    by_role = options(parse_config(text))
    prefill, decode = by_role["EP"], by_role["D"]
    assert (prefill.slo.ttft_ms, prefill.slo.tpot_ms) == (decode.slo.ttft_ms, decode.slo.tpot_ms) == (900, 40.5)
    assert (prefill.batching.order, decode.batching.order) == ("slack", "fcfs")
