"""Every command for an NPU is one from which the vendor's vLLM builds its configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_ascend_runs import Vendor

from epd_serve.config import DeploymentConfig, change_config, load_config, parse_config
from epd_serve.launch.vllm.installed import VllmFound, check_found, find_vllm
from epd_serve.launch.vllm.process import vllm_processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
_DEPLOY = Path(__file__).parents[2] / "deploy"
_FILES = sorted(_DEPLOY.glob("vllm-ascend-*.yaml"))
_TOPOLOGIES = ("EPD", "EP-D", "E-PD", "E-P-D", "(E-P@tp2)-D", "2(E-P)-D")
_MOONCAKE = "vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_connector"


@pytest.fixture(scope="module")
def found(vendor_python: str) -> VllmFound:
    return find_vllm(vendor_python)


def _deployments(model: Path) -> dict[str, DeploymentConfig]:
    changes = {"model": str(model), "instances": {"max_model_len": 512}}
    files = {file.stem: change_config(load_config(file), changes) for file in _FILES}
    return files | {
        topology: parse_config(
            f"engine: vllm\nmodel: {model}\ntopology: {topology}\ndevices: ['npu:0', 'npu:1', 'npu:2', 'npu:3']\n"
            "dtype: bfloat16\n"
            "instances: {max_model_len: 512, max_num_seqs: 4, kv_cache_bytes: 64MiB}"
        )
        for topology in _TOPOLOGIES
    }


def test_the_vendors_vllm_takes_every_command(vendor: Vendor, found: VllmFound, model: Path) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []
    names: list[tuple[str, str]] = []
    for name, config in _deployments(model).items():
        ports = range(9000, 9000 + 16 * len(config.placement()), 16)
        for one in vllm_processes(
            config, config.placement(), list(ports), {}, feature_dir="/features", found={sys.executable: found}
        ):
            command = list(one.spec.command)
            asked.append((command[command.index("serve") + 1 :], dict(one.spec.environment)))
            names.append((name, str(one.placement.role)))
    built: list[dict[str, Any]] = vendor("build_configs.py", asked)
    for (name, role), (_, variables), one in zip(names, asked, built, strict=True):
        assert (one["device"], one["worker"]) == ("npu", "vllm_ascend.worker.worker.NPUWorker")
        assert (one["dtype"], one["block_size"]) == ("torch.bfloat16", 128)
        assert one["ranks"] == len(variables["ASCEND_RT_VISIBLE_DEVICES"].split(","))
        assert one["ec"] == {
            "E": ["ECExampleConnector", "ec_producer"],
            "P": ["ECExampleConnector", "ec_consumer"],
            "PD": ["ECExampleConnector", "ec_consumer"],
        }.get(role), (name, role)
        if role in ("P", "EP", "D"):
            module, kv_role, _ = one["kv"]
            assert (module, kv_role) == (_MOONCAKE, "kv_consumer" if role == "D" else "kv_producer"), name
            assert one["kv_extra"]["prefill"]["tp_size"] == (2 if "tp2" in name else 1)
        else:
            assert one["kv"] is None, (name, role)
        if role == "E":
            assert not one["prefix_caching"]
            assert name not in {file.stem for file in _FILES} or (one["eager"] and one["memory"] == 0.01)
    assert len({(name, one["kv"][2]) for (name, _), one in zip(names, built, strict=True) if one["kv"]}) == sum(
        one["kv"] is not None for one in built
    ), "no two instances of a deployment have one port for their KV"


def test_the_pair_fits_and_another_does_not(vendor_python: str, found: VllmFound) -> None:
    assert found.vllm.startswith("0.23.0") and found.vllm_ascend == "0.23.0"
    check_found(found, python=vendor_python, needs=["vllm_ascend"])
    for change in ({"vllm_ascend": "0.22.1"}, {"vllm": "0.24.0"}):
        with pytest.raises(ValueError, match="install a matching pair"):
            check_found(msgspec.structs.replace(found, **change), python=vendor_python, needs=["vllm_ascend"])


def test_the_connector_that_does_not_load_there_is_refused(
    vendor: Vendor, vendor_python: str, found: VllmFound
) -> None:
    (fault,) = vendor("load_connectors.py", {"store": "features"}).values()
    assert fault
    with pytest.raises(ValueError, match=r"vLLM 0\.23\.0.* cannot send encoder output from E to P"):
        check_found(found, python=vendor_python, needs=["store"])
