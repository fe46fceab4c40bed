"""The operators and the Python API that the backend calls, as the real torch_npu wheel has them."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ascend_ladder import COMMAND, require_torch_npu

require_torch_npu()

import torch  # noqa: E402
import torch_npu  # noqa: E402

LOCK = Path(__file__).parent / "schema_lock.json"
CALLED = (
    "npu_add_rms_norm",
    "npu_fused_infer_attention_score_v2",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_pa_kv_cache",
    "npu_swiglu",
)


def schema_of(name: str) -> str:
    return str(getattr(torch.ops.npu, name).default._schema)


def differences(locked: str, present: str) -> list[str]:
    """Arguments and results, one a line, that only one of two schemas has."""
    lines = [schema.replace("(", "(, ", 1).split(", ") for schema in (locked, present)]
    return [f"- {line}" for line in lines[0] if line not in lines[1]] + [
        f"+ {line}" for line in lines[1] if line not in lines[0]
    ]


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    if os.environ.get("EPD_UPDATE_SCHEMA_LOCK"):
        content = {"torch_npu": torch_npu.__version__, "operators": {name: schema_of(name) for name in CALLED}}
        LOCK.write_text(json.dumps(content, indent=2) + "\n")
    loaded: dict[str, Any] = json.loads(LOCK.read_text())
    return loaded


@pytest.mark.parametrize("name", CALLED)
def test_the_schema_is_the_locked_one(name: str, lock: dict[str, Any]) -> None:
    changed = differences(lock["operators"][name], schema_of(name))
    what = f"npu::{name} of torch_npu {torch_npu.__version__} is not that of {lock['torch_npu']}:"
    remedy = f"adapt device/ops/ascend.py, then run: {COMMAND} --update-lock"
    assert not changed, "\n".join([what, *changed, remedy])


@pytest.mark.parametrize("name", CALLED)
def test_an_older_wheel_has_the_same_schema(name: str, lock: dict[str, Any]) -> None:
    """As its library spells it; that torch_npu is for an older torch and cannot be loaded here."""
    if (library := os.environ.get("EPD_OLDER_TORCH_NPU")) is None:
        pytest.skip(f"the older wheel is brought by: {COMMAND}")
    texts = re.findall(rf"{name}\(Tensor[^\0]* -> [^\0]*".encode(), Path(library).read_bytes())
    assert {str(torch._C.parse_schema(f"npu::{text.decode()}")) for text in texts} == {lock["operators"][name]}


@pytest.mark.parametrize("name", CALLED)
def test_the_wheel_has_shapes_for_it(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "Meta")


def test_graph_capture_knows_the_attention() -> None:
    """torch_npu updates only the operators that it has a handler for, by their dispatched name."""
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    assert "npu_fused_infer_attention_score_v2.default" in _NPU_GRAPH_OP_HANDLERS


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "NPUGraph()": (torch_npu.npu.NPUGraph.__init__, (None,), {}),
    "graph": (torch_npu.npu.graph.__init__, (None, None), {"pool": None, "auto_dispatch_capture": True}),
    "NPUGraph.update": (torch_npu.npu.NPUGraph.update, (None,), {"cpu_update_input": [{}]}),
    "NPUGraph.replay": (torch_npu.npu.NPUGraph.replay, (None,), {}),
    "NPUGraph.pool": (torch_npu.npu.NPUGraph.pool, (None,), {}),
    "Stream()": (torch_npu.npu.Stream.__new__, (None,), {}),
    "Stream.wait_stream": (torch_npu.npu.Stream.wait_stream, (None, None), {}),
    "Stream.record_event": (torch_npu.npu.Stream.record_event, (None,), {}),
    "Event.synchronize": (torch_npu.npu.Event.synchronize, (None,), {}),
    "current_stream": (torch_npu.npu.current_stream, (), {}),
    "stream": (torch_npu.npu.stream, (None,), {}),
    "device": (torch_npu.npu.device, (None,), {}),
    "set_device_limit": (torch_npu.npu.set_device_limit.func, (0, 1, 1), {}),
    "get_device_limit": (torch_npu.npu.get_device_limit, (0,), {}),
    "set_per_process_memory_fraction": (torch_npu.npu.set_per_process_memory_fraction, (0.5, 0), {}),
    "memory_allocated": (torch_npu.npu.memory_allocated, (0,), {}),
    "memory_reserved": (torch_npu.npu.memory_reserved, (0,), {}),
    "max_memory_allocated": (torch_npu.npu.max_memory_allocated, (0,), {}),
    "reset_peak_memory_stats": (torch_npu.npu.reset_peak_memory_stats, (0,), {}),
    "mem_get_info": (torch_npu.npu.mem_get_info, (0,), {}),
    "get_device_properties": (torch_npu.npu.get_device_properties, (0,), {}),
    "get_device_name": (torch_npu.npu.get_device_name, (0,), {}),
    "device_count": (torch_npu.npu.device_count, (), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_python_api_takes_what_we_pass(name: str) -> None:
    function, args, kwargs = CALLS[name]
    inspect.signature(function).bind(*args, **kwargs)


def test_the_device_limit_is_set_once_in_a_process() -> None:
    """Why AscendDevice.apply_share refuses a second share."""
    limit = torch_npu.npu.set_device_limit
    with pytest.raises(AssertionError, match="device id"):
        limit(10_000, 1, 1)  # there is no such device, and the call counts all the same
    with pytest.raises(RuntimeError, match="only set this interface once"):
        limit(0, 1, 1)
