"""The hooks that epd-serve's connectors need, against the sources of the vLLM that pip brings: 0.33.

``vllm-0.33.json`` is what those sources say. With EPD_SERVE_VLLM_SOURCES set to the directory of an unpacked wheel
the tests read that one, and ``python tests/launch/test_vllm_contract.py DIRECTORY`` writes the file anew.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_serve.launch.vllm.probe import CONNECTORS, Module, lacking, needed_modules
from epd_serve.launch.vllm.sources import read_module

RECORD = Path(__file__).with_name("vllm-0.33.json")
ROOTS = {"store": "ECConnectorBase", "grouped": "KVConnectorBase_V1"}
#: Who has to call which hooks: the scheduler, and both model runners.
CALLERS = {
    "vllm.v1.core.sched.scheduler": {
        "store": {
            "has_cache_item",
            "ensure_cache_available",
            "update_state_after_alloc",
            "build_connector_meta",
            "take_unavailable_requests",
            "get_ec_connector_stats",
            "request_finished",
        },
        "grouped": {
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished",
        },
    },
    "vllm.v1.worker.ec_connector_model_runner_mixin": {
        "store": {"start_save_caches", "start_load_caches", "save_caches", "get_finished"}
    },
    "vllm.v1.worker.gpu.ec_connector": {
        "store": {"start_save_caches", "start_load_caches", "save_caches", "get_finished"}
    },
    "vllm.v1.worker.kv_connector_model_runner_mixin": {
        "grouped": {"bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results"}
    },
    "vllm.v1.worker.gpu.kv_connector": {
        "grouped": {
            "register_kv_caches",
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
        }
    },
}


def described(home: Path) -> dict[str, Any]:
    """A description of the hooks in a vLLM's sources, with the methods that :data:`CALLERS` call."""

    def source(module: str) -> Path:
        return home / (module.replace(".", "/") + ".py")

    modules: dict[str, Any] = {}
    for name, words in needed_modules().items():
        modules[name] = read_module(source(name), words) if source(name).is_file() else None
        if modules[name] is not None:
            roots = {one: told for one, told in modules[name]["classes"].items() if one in ROOTS.values()}
            modules[name] |= {"classes": roots, "bases": {}}
    calls = {
        name: sorted(set(re.findall(r"connector\.(\w+)\(", source(name).read_text(encoding="utf-8"))))
        for name in CALLERS
    }
    return {"modules": modules, "calls": calls}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """A vLLM's sources as :func:`described` describes them."""
    home = os.environ.get("EPD_SERVE_VLLM_SOURCES")
    found: dict[str, Any] = described(Path(home)) if home else json.loads(RECORD.read_text())
    return found


def modules_of(told: dict[str, Any]) -> dict[str, Module | None]:
    return {name: one and msgspec.convert(one, Module) for name, one in told["modules"].items()}


@pytest.mark.parametrize("connector", CONNECTORS)
def test_it_has_all_that_the_connectors_need(connector: str, told: dict[str, Any]) -> None:
    assert lacking(connector, modules_of(told)) == ""


@pytest.mark.parametrize("caller", CALLERS)
def test_both_model_runners_call_the_hooks(caller: str, told: dict[str, Any]) -> None:
    for connector, hooks in CALLERS[caller].items():
        assert hooks <= set(told["calls"][caller]), connector
        root = next(one.classes for one in modules_of(told).values() if one and ROOTS[connector] in one.classes)
        assert hooks <= root[ROOTS[connector]].keys(), connector


@pytest.mark.parametrize(
    ("connector", "hook"),
    [(name, hook) for caller in CALLERS.values() for name, hooks in caller.items() for hook in sorted(hooks)],
)
def test_a_hook_that_has_another_name_is_named(connector: str, hook: str, told: dict[str, Any]) -> None:
    modules = modules_of(told)
    for one in modules.values():
        if one is not None and hook in (methods := one.classes.get(ROOTS[connector], {})):
            methods[f"{hook}_anew"] = methods.pop(hook)
    lack = lacking(connector, modules)
    assert lack == f"{ROOTS[connector]} has no {hook}" or lack == f"{ROOTS[connector]} asks for {hook}_anew"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(described(Path(sys.argv[1])), indent=1) + "\n")
