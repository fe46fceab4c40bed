"""Instances on NPUs: ports of their own, room for all their graphs, pages of the size that the operators take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_serve.config import DeploymentConfig
from epd_serve.launch.commands import instance_specs
from epd_serve.launch.processes.ports import choose_ports
from epd_serve.launch.processes.process import ProcessSpec


def specs(model: Path, topology: str, devices: list[str], **instances: object) -> tuple[ProcessSpec, ...]:
    config = DeploymentConfig(
        topology=topology,
        model=str(model),
        devices=devices,
        gateway={"port": 0},
        instances={"base_port": 0, **instances},
    )
    return instance_specs(config, choose_ports(config), {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 36}}))
    return tmp_path


def test_processes_have_hccl_ports_of_their_own(model: Path) -> None:
    e, p, d = specs(model, "(E-P)-D", ["npu:0", "npu:1"])
    ranges = [spec.environment["HCCL_NPU_SOCKET_PORT_RANGE"] for spec in (e, p, d)]
    assert len(set(ranges)) == 3
    assert len({spec.environment["HCCL_IF_BASE_PORT"] for spec in (e, p, d)}) == 3
    assert [spec.environment["ASCEND_RT_VISIBLE_DEVICES"] for spec in (e, p, d)] == ["0", "0", "1"]
    mixed = specs(model, "E-PD", ["cuda:0", "npu:0"])
    assert ["HCCL_IF_BASE_PORT" in spec.environment for spec in mixed] == [False, True]


def test_what_an_npu_has_no_streams_for_is_refused(model: Path) -> None:
    sizes = {"max_num_seqs": 1 << 20}  # 21 graphs of 36 layers each
    specs(model, "(P-D)", ["npu:0"], **sizes)
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 4000}))
    with pytest.raises(
        ValueError,
        match=r"one NPU has 65536 events, but its instances need 84000 \(p0 0, d0 84000\): let d0 capture 16",
    ):
        specs(model, "(P-D)", ["npu:0"], **sizes)


@pytest.mark.parametrize(("device", "size"), [("npu:0", 128), ("cpu", 16)])
def test_a_block_has_the_size_that_suits_the_device(model: Path, device: str, size: int) -> None:
    config = DeploymentConfig(topology="EPD", model=str(model), devices=[device])
    (instance,) = config.placement()
    options = config.options_for(instance, device=device, port=1, threads=1)
    assert options.tokens_per_block == size
