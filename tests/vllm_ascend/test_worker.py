"""vllm-ascend's worker loads a tiny model and answers, as the commands of this deployment start it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat import chat
from pictures import noise
from reference import Reference
from vllm_ascend_runs import Vendor

from epd_serve.config import parse_config
from epd_serve.launch.vllm.process import vllm_processes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MAX_TOKENS = 6
LAYERS, TOWER_LAYERS = 5, 4
ATTENTION, WRITE = "npu_fused_infer_attention_score", "_npu_reshape_and_cache"
TEXT, PICTURE = "Tell me of a boat on the sea, and then of another.", noise(3, (84, 56))


def ask(vendor: Vendor, model: Path, topology: str, role: str, *more: str, feature_dir: str = "unused") -> Any:
    """The answers of the instance of a role to a text and to a picture."""
    config = parse_config(
        f"engine: vllm\nmodel: {model}\ntopology: {topology}\ndtype: float32\n"
        "devices: ['npu:0', 'npu:1', 'npu:2']\n"
        "instances: {max_model_len: 512, max_num_seqs: 4, kv_cache_bytes: 64MiB, engine_args: "
        "{enforce_eager: true, async_scheduling: false, skip_mm_profiling: true}}"
    )
    ports = range(9000, 9000 + 16 * len(config.placement()), 16)
    processes = vllm_processes(config, config.placement(), list(ports), {}, feature_dir=feature_dir)
    one = next(one for one in processes if str(one.placement.role) == role)
    command = [*one.spec.command, *more]
    # E has had another picture before: a name that is no hash of its content would be another's.
    first = chat("", noise(4, (56, 56))) if role == "E" else chat(TEXT)
    return vendor(
        "forward.py",
        {
            "arguments": command[command.index("serve") + 1 :],
            "variables": dict(one.spec.environment),
            "chats": [first["messages"], chat("What is this?", PICTURE)["messages"]],
            "max_tokens": MAX_TOKENS,
        },
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    reference = Reference(model)
    return [
        reference.generate(TEXT, max_tokens=MAX_TOKENS),
        reference.generate("What is this?", [PICTURE], max_tokens=MAX_TOKENS),
    ]


def test_the_vendors_worker_gives_the_tokens_of_transformers_and_calls_each_layers_hooks(
    vendor: Vendor, model: Path, expected: list[list[int]]
) -> None:
    watching = {"kv_connector": "WatchingConnector", "kv_connector_module_path": "watching", "kv_role": "kv_both"}
    found = ask(vendor, model, "EPD", "EPD", "--kv-transfer-config", json.dumps(watching))
    assert found["tokens"] == expected
    steps = 2 * MAX_TOKENS
    assert found["calls"][WRITE] == LAYERS * steps
    assert found["calls"][ATTENTION] == LAYERS * steps + TOWER_LAYERS
    assert len(found["kv"]["caches"]) == LAYERS
    for _, kind, parts in found["kv"]["caches"]:
        assert kind == "tuple"
        (keys, at), (values, then) = parts
        assert keys == values and keys[1] == 128, "[blocks, tokens, heads, size of a head]"
        assert not at % (2 << 20) and not then % (2 << 20)
    names = [name for name, _, _ in found["kv"]["caches"]]
    hooks = found["kv"]["hooks"]
    step: list[list[str]] = [["start_load_kv", "", ""]]
    for name in names:
        step += [
            ["wait_for_layer_load", name, ""],
            ["on_kv_cache_written", "", ""],
            ["save_kv_layer", name, "tuple"],
        ]
    step.append(["wait_for_save", "", ""])
    assert hooks == step * steps


def test_features_go_from_e_to_p_and_mooncake_gets_aligned_memory(
    vendor: Vendor, model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    first = ask(vendor, model, "E-P-D", "E", feature_dir=str(tmp_path))
    assert first["calls"][ATTENTION] == 2 * TOWER_LAYERS and WRITE not in first["calls"]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    found = ask(vendor, model, "E-P-D", "P", feature_dir=str(tmp_path))
    assert found["tokens"] == expected
    assert found["calls"][ATTENTION] == found["calls"][WRITE], "P does not run the tower"
    assert found["regions"] and not any(address % (2 << 20) for address, _ in found["regions"])
    ends = sorted((address, address + size) for address, size in found["regions"])
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
