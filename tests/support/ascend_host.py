"""NPU graphs on the host: torch_npu's own capture bookkeeping over a stand-in.

What is torch_npu's stays: ``npu.graph``, the dispatch mode that makes a task group and an event of each attention
call, the handlers of both attention versions, ``NPUGraph.update``. Emulated is what lies in CANN: streams, events,
task groups, and a graph as the list of the operators that ran, which a replay runs again into the same tensors.
A replay that would wait for an event that nobody recorded raises instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch_npu
from ascend_kernels import KERNELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_npu.npu import graphs as vendor
from torch_npu.npu._npugraph_handlers import npugraph_handler

_LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen")


class HostStream:
    """Work given to it is done."""

    def wait_stream(self, stream: HostStream) -> None: ...

    def record_event(self) -> HostEvent:
        return HostEvent()


@dataclass(slots=True)
class HostEvent:
    """An event that a graph waits for; set by ``record``, cleared as the graph passes it."""

    is_set: bool = False

    def wait(self, stream: HostStream) -> None:
        _device.events.append(self)

    def reset(self, stream: HostStream) -> None: ...

    def record(self, stream: HostStream) -> None:
        self.is_set = True

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class TaskGroup:
    """A captured attention call; ``lengths`` replaces the keywords of its capture."""

    event: HostEvent
    lengths: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Device:
    events: list[HostEvent] = field(default_factory=list)
    captured: TaskGroup | None = None
    updated: TaskGroup | None = None


_device = _Device()


def _group_end(stream: HostStream) -> TaskGroup:
    _device.captured = TaskGroup(_device.events[-1])
    return _device.captured


def _update_begin(stream: HostStream, group: TaskGroup) -> None:
    _device.updated = group


def _update_end(stream: HostStream) -> None:
    _device.updated = None


@dataclass(slots=True)
class _Operation:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    group: TaskGroup | None

    def run(self) -> None:
        kwargs = self.kwargs
        if self.group is not None:
            assert self.group.event.is_set, "the replay would wait forever: no update since the last one"
            self.group.event.is_set = False
            kwargs = kwargs | self.group.lengths
        for output, result in zip(self.outputs, _tensors(self.func(*self.args, **kwargs)), strict=True):
            output.copy_(result)


class _Tape(TorchDispatchMode):
    """Runs operators and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _device.captured = None
        result = func(*args, **kwargs)  # torch_npu's mode is next
        self.operations.append(_Operation(func, args, kwargs, _tensors(result), _device.captured))
        return result


def _tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (list, tuple)) else [result]
    return [item for item in results if isinstance(item, Tensor)]


class HostGraph:
    """torch_npu's NPUGraph with a tape in place of its C++ part."""

    def __init__(self) -> None:
        self.graph_dispatch_mode = vendor._GraphDispatchMode()
        self.auto_dispatch_capture = False
        self.tape = _Tape()

    update = vendor.NPUGraph.update

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.tape.__enter__()

    def capture_end(self) -> None:
        self.tape.__exit__(None, None, None)

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self.tape.operations:
                operation.run()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


def _out_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The overload that writes into given tensors; inside an update it only takes the lengths over."""

    def run(*args: Any, out: list[Tensor], workspace: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if _device.updated is not None:
            _device.updated.lengths = {name: list(kwargs[name]) for name in _LENGTHS if kwargs.get(name)}
        else:
            out[0].copy_(kernel(*args, **kwargs)[0])
        return out[0], out[1]

    return run


def _workspace(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return query.new_empty(1)


def _outputs(query: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(1)


_library: torch.library.Library | None = None


def _register() -> None:
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("npu", "IMPL")
    name = "npu_fused_infer_attention_score_v2"
    _library.impl(f"{name}.out", _out_kernel(KERNELS[name]), "CPU")
    _library.impl(f"_{name}_get_max_workspace", _workspace, "CPU")
    _library.impl(f"_{name}_infer_output", _outputs, "CPU")


def _copied(value: Any) -> Any:
    """Tensors by reference, as torch_npu keeps those of a device; anything else copied, as there."""
    return value if isinstance(value, Tensor) else deepcopy(value)


def emulate_graphs(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in under torch_npu until the patch is undone."""
    _register()

    def context(*args: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def nothing(*args: Any) -> None: ...

    npu = torch_npu.npu
    for name, stand_in in {
        "NPUGraph": HostGraph,
        "Stream": HostStream,
        "ExternalEvent": HostEvent,
        "current_stream": HostStream,
        "stream": context,
        "device": context,
        "synchronize": nothing,
        "empty_cache": nothing,
        "host_empty_cache": nothing,
        "current_device": lambda: 0,
    }.items():
        patch.setattr(npu, name, stand_in)
    patch.setattr(vendor, "graph_task_group_begin", nothing)
    patch.setattr(vendor, "graph_task_group_end", _group_end)
    patch.setattr(vendor, "graph_task_update_begin", _update_begin)
    patch.setattr(vendor, "graph_task_update_end", _update_end)
    for module in (vendor, npugraph_handler):
        patch.setattr(module, "deepcopy", _copied)
    patch.setattr(vendor.graph, "default_capture_stream", None)
    patch.setattr(vendor._GraphDispatchMode, "update_stream", HostStream())
