"""One deployment file for many hosts: who runs where, and where the gateway finds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.config import parse_config
from epd_serve.config.load import ConfigError
from epd_serve.launch.ports import instance_urls
from epd_serve.launch.remote.part import host_part, part_specs

FILE = """
topology: 2E-P-2D
model: {shape_of: qwen2.5-vl-7b}
engine: native
hosts: {n1: {address: 10.0.0.1}, n2: {address: fd00::2}}
devices:
  ["n1/emulated:h200:6", "n2/emulated:h200:0", "n1/emulated:h200:7", "n2/emulated:h200:1", "n2/emulated:h200:2"]
instances: {base_port: 8100}
"""


def test_gateway_and_agents_have_the_same_addresses(tmp_path: Path) -> None:
    config = parse_config(FILE)
    assert {one.name: (one.host, *one.devices) for one in config.placement()} == {
        "e0": ("n1", "emulated:h200:6"),
        "e1": ("n2", "emulated:h200:0"),
        "p0": ("n1", "emulated:h200:7"),
        "d0": ("n2", "emulated:h200:1"),
        "d1": ("n2", "emulated:h200:2"),
    }
    found: dict[str, str] = {}
    for host, settings in config.hosts.items():
        for spec in part_specs(host_part(config, host), settings.address, {}, tmp_path):
            found[spec.name] = spec.url
            options = json.loads(spec.command[spec.command.index("--options") + 1])
            (placed,) = [one for one in config.placement() if one.name == spec.name]
            assert (options["name"], options["device"]) == (placed.name, placed.devices[0])
    assert found == dict(instance_urls(config))
    assert found["d1"] == "http://[fd00::2]:8102"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("2E-P-2D", "E-P@tp2-2D", "P@tp2 would lie on 'n2' and 'n1'"),
        ("2E-P-2D", "(E-P@tp2)-2D", "what is in parentheses"),
        ("n2: {address", "n3: {address", "devices: n2 is not among hosts; there are: n1, n3"),
        ('"n1/emulated:h200:6"', '"emulated:h200:6"', "a device without a host"),
        ("{base_port: 8100}", "{}", "set instances.base_port"),
    ],
)
def test_what_hosts_cannot_do(old: str, new: str, sentence: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigError, match=sentence):
        parse_config(FILE.replace(old, new))


def test_cpus_of_hosts(tmp_path: Path) -> None:
    hosts = "hosts: {n1: {address: 10.0.0.1}, n2: {address: 10.0.0.2}}, instances: {base_port: 9000}"
    config = parse_config(f"{{topology: (E-P)-2D, devices: [n1/cpu, n2/cpu, n2/cpu], {hosts}}}")
    specs = part_specs(host_part(config, "n2"), "10.0.0.2", {"OMP_NUM_THREADS": "1"}, tmp_path)
    assert [(spec.name, spec.url) for spec in specs] == [
        ("d0", "http://10.0.0.2:9000"),
        ("d1", "http://10.0.0.2:9001"),
    ]
    with pytest.raises(ValueError, match="no instance is on a host 'n7'; the file has: n1, n2"):
        host_part(config, "n7")
