import pytest

from epd_serve.backends.vllm_command import Connectors
from epd_serve.config import parse_config
from proxy.settings import GatewaySettings


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", ("store", "mooncake")),
        ("devices: ['cuda:0', 'cuda:1', 'cuda:2']", ("store", "nixl")),
        ("devices: ['npu:0', 'npu:1', 'npu:2']", ("file", "mooncake")),
        ("devices: ['npu:0', 'cuda:0', 'cuda:1']", ("file", "nixl")),
        ("topology: E-PD", ("store", None)),
        ("topology: EP-D\nvllm: {kv: nixl}", (None, "nixl")),
    ],
)
def test_connectors_suit_the_devices_and_the_topology(text: str, chosen: tuple[str | None, str | None]) -> None:
    config = parse_config(f"engine: vllm\n{text}")
    used = Connectors.between(config.placement(), config.vllm.kv)
    assert (used.features, used.kv) == chosen


@pytest.mark.parametrize(
    ("text", "start_s", "waits_s"),
    [
        ("", 4.0, 61.0),
        ("engine: vllm", 60.0, 145.0),
        ("gateway: {request_timeout_s: 20}", 4.0, 20.0),
        ("restart: never", 4.0, 6.0),
    ],
)
def test_a_request_waits_as_long_as_the_replacement_takes(text: str, start_s: float, waits_s: float) -> None:
    assert GatewaySettings.of(parse_config(text), "127.0.0.1").replacement_wait_s(start_s) == waits_s
