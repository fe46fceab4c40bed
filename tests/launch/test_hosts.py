"""One deployment file for many hosts: who runs where, and where the gateway finds them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from epd_serve.config import parse_config
from epd_serve.config.load import ConfigError, placed_keys, with_placed_keys
from epd_serve.launch.config_diff import difference
from epd_serve.launch.processes.ports import instance_urls
from epd_serve.launch.remote.part import PartRecord, Place, at_address, host_placement

FILE = """
topology: 2E-P-2D
model: {shape_of: qwen2.5-vl-7b}
engine: native
hosts: {n1: {address: 10.0.0.1}, n2: {address: fd00::2}}
devices:
  ["n1/emulated:h200:6", "n2/emulated:h200:0", "n1/emulated:h200:7", "n2/emulated:h200:1", "n2/emulated:h200:2"]
instances: {base_port: 8100}
"""


def on(host: str) -> Place:
    return partial(host_placement, host=host)


def test_each_host_starts_its_own(tmp_path: Path) -> None:
    config = parse_config(FILE)
    assert {one.name: (one.host, *one.devices) for one in config.placement()} == {
        "e0": ("n1", "emulated:h200:6"),
        "e1": ("n2", "emulated:h200:0"),
        "p0": ("n1", "emulated:h200:7"),
        "d0": ("n2", "emulated:h200:1"),
        "d1": ("n2", "emulated:h200:2"),
    }
    found = {}
    for host, settings in config.hosts.items():
        for spec in PartRecord.of(config, on(host), settings.address, {}, tmp_path).begin():
            options = json.loads(spec.command[spec.command.index("--options") + 1])
            assert options["name"] == spec.name
            found[spec.name] = options["device"], spec.url
    assert found == {
        "n1-e0": ("emulated:h200:6", "http://10.0.0.1:8100"),
        "n1-p0": ("emulated:h200:7", "http://10.0.0.1:8101"),
        "n2-e0": ("emulated:h200:0", "http://[fd00::2]:8100"),
        "n2-d0": ("emulated:h200:1", "http://[fd00::2]:8101"),
        "n2-d1": ("emulated:h200:2", "http://[fd00::2]:8102"),
    }
    assert instance_urls(config) == [], "they join"


def test_a_host_changes_what_is_its_own(tmp_path: Path) -> None:
    """The only P goes from n1 to n2: each agent takes its own steps, the gateway says when."""
    config = parse_config(FILE)
    record = PartRecord.of(config, on("n1"), "127.0.0.1", {}, tmp_path)
    taken = [spec.url for spec in record.begin()]
    other = {"topology": "E-2P-2D", "roles": {"P": {"max_num_seqs": 3}}}
    steps = difference(
        record, at_address(with_placed_keys(config, placed_keys(config) | other), "127.0.0.1")
    ).steps
    assert [str(one) for one in steps] == ["switch n1-p0 from P to EPD", "switch n1-p0 from EPD to P"], (
        "new settings"
    )
    other = {"topology": "2E-D-P-D"}  # in the order of the devices: n1 has E and D, n2 E, P and D
    steps = difference(
        record, at_address(with_placed_keys(config, placed_keys(config) | other), "127.0.0.1")
    ).steps
    assert [str(one) for one in steps] == ["switch n1-p0 from P to D"]
    without = placed_keys(config) | {"topology": "P-D", "devices": ["n2/emulated:h200:0", "n2/emulated:h200:1"]}
    steps = difference(record, at_address(with_placed_keys(config, without), "127.0.0.1")).steps
    assert [str(one) for one in steps] == ["stop n1-e0 (E)", "stop n1-p0 (P)"]
    more = placed_keys(config) | {"topology": "2E-P-3D", "devices": [*config.devices, "n1/emulated:h200:5"]}
    found = difference(record, at_address(with_placed_keys(config, more), "127.0.0.1"))
    assert [str(one) for one in found.steps] == ["start n1-d0 (D)"]
    assert record.spec_of(found.to_start["n1-d0"]).url not in taken


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
    specs = PartRecord.of(config, on("n2"), "10.0.0.2", {"OMP_NUM_THREADS": "1"}, tmp_path).begin()
    assert [(spec.name, spec.url) for spec in specs] == [
        ("n2-d0", "http://10.0.0.2:9000"),
        ("n2-d1", "http://10.0.0.2:9001"),
    ]
    with pytest.raises(ValueError, match="the file names no host 'n7'; it has: n1, n2"):
        host_placement(config, "n7")
