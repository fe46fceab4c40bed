"""An accelerator for tests: everything asynchronous as on one, computed on this machine's cores.

Its memory ends, its streams and copies are asynchronous, and a graph replays what was captured and nothing else.
Numbers are NaN until they are computed: code that is right here waits where it must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from chip.chip import CAPABILITY, TYPE, Chip, Stream, record_apart, recorded
from chip.tensors import ChipTensor, add_chip, mapped_memory, pin, share_memory
from torch import Tensor

from device import base, host
from device.base import (
    AttentionPlan,
    AttnMeta,
    Partition,
    PartitionStrength,
    check_share,
    check_update,
)
from device.ops.plain import PlainOps

#: Of each chip.
MEMORY_BYTES = 24_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipPlan(AttentionPlan):
    """Filled when the device comes to it: in a graph the lengths of decodes are those of the replay."""

    computed: list[AttentionPlan] = field(default_factory=list)


class ChipOps(PlainOps):
    """torch's own operators; attention is one launch, which reads the lengths of decodes on the device."""

    name = "plain torch, on a chip of tests"

    def __init__(self, chip: Chip) -> None:
        self.chip = chip

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> ChipPlan:  # type: ignore[override]
        self.chip.check_active()
        plan = ChipPlan(meta=meta)
        tensors = [meta.slot_mapping, meta.decode_block_table, meta.decode_context_lens, meta.prefill_block_table]
        slots, decode_table, decode_lens, prefill_table = (_raw(one) for one in tensors)

        def compute() -> None:
            now = replace(
                meta,
                slot_mapping=slots,
                decode_block_table=decode_table,
                decode_context_lens=decode_lens,
                decode_context_lens_host=decode_lens.tolist(),
                prefill_block_table=prefill_table,
            )
            plan.computed[:] = [super(ChipOps, self).prepare(now, dtype)]

        self.chip.launch(compute, (meta,))
        return plan

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        encode = super().encode
        return self._launch(query, key, value, lambda q, k, v: encode(q, k, v, cu_seqlens_host, scale))

    def _launch(
        self, query: Tensor, key: Tensor, value: Tensor, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """One launch, whose result has the query's shape."""
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        target, *inputs = (_raw(one) for one in (output, query, key, value))
        self.chip.launch(lambda: target.copy_(compute(*inputs)), (output, query, key, value))
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        assert isinstance(plan, ChipPlan), "a plan serves the operators that prepared it"
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        states = [_raw(one) for one in (output, query, key, value, kv_layer)]

        def compute() -> None:
            target, *inputs = states
            target.copy_(super(ChipOps, self).attend(*inputs, plan.computed[0], scale))  # type: ignore[call-arg,arg-type]

        self.chip.launch(compute, (output, query, key, value, kv_layer, plan))
        return output


@dataclass(slots=True)
class _Piece:
    """Launches that are one at each replay, and the call that follows it."""

    work: list[Callable[[], object]]
    then: Callable[[], None] | None = None

    def run(self) -> None:
        for one in self.work:
            one()


class ChipGraphRunner:
    """Fills the GraphRunner protocol: keeps what a step launches and launches it again."""

    name = "chip graph"
    captures = cuts = True

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self._graphs: dict[int, tuple[list[_Piece], Tensor]] = {}
        self._open: list[_Piece] | None = None  # of the size that is captured

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        if not self._graphs:  # what is set up at first use must be there before
            step()
        self.chip.synchronize()
        with recorded() as work:
            self._open = pieces = [_Piece(work)]
            try:
                output = step()
            finally:
                self._open = None
        self._graphs[size] = pieces, output

    def cut(self, between: Callable[[], None]) -> None:
        if self._open is None:
            between()
            return
        self._open[-1].then = between
        self._open.append(_Piece(record_apart()))

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        check_update(size, decode_context_lens, self._graphs)

    def replay(self, size: int) -> Tensor:
        pieces, output = self._graphs[size]
        self.chip.num_replays[size] += 1
        for piece in pieces:
            self.chip.num_launches += 1
            self.chip.current().launch(piece.run)
            if piece.then is not None:
                piece.then()
        return output


class ChipDevice:
    """Fills the Device protocol.

    Attributes:
        chip: the device in this process, which all that open it share.
    """

    type = TYPE
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    cores: int | None = None
    transport = CAPABILITY
    has_streams = True
    partition = Partition(strength=PartitionStrength.COOPERATIVE, mechanisms=("memory fraction",))
    description = "a chip of tests"

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"{TYPE}:{index}"
        self.chip = add_chip(index, MEMORY_BYTES)
        self.torch_device = torch.device(TYPE, index)  # a type of torch's since the first chip
        self.ops: base.AttentionOps = ChipOps(self.chip)

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        check_share(share, start)
        self.set_memory_fraction(share)
        return Partition(strength=self.partition.strength, mechanisms=(f"memory fraction {share:g}",))

    def memory(self) -> tuple[int, int]:
        return self.chip.memory.total, self.chip.memory.free

    def headroom(self) -> int:
        memory = self.chip.memory
        return min(int(memory.fraction * memory.total) - memory.used, memory.free)

    def reset_peak_memory(self) -> int:
        memory = self.chip.memory
        memory.peak = memory.used
        return memory.used

    def peak_memory(self) -> int:
        return self.chip.memory.peak

    def set_memory_fraction(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"memory fraction {fraction}: it lies above 0 and at 1 at most")
        self.chip.memory.fraction = fraction

    def set_threads(self, threads: int, cores: Sequence[int] | None = None) -> None:
        host.set_threads(threads, cores)

    def activate(self) -> None:
        self.chip.activate()

    def synchronize(self) -> None:
        self.chip.synchronize()

    def check(self) -> None:
        self.chip.check()

    def stream(self, priority: int = 0, share: float | None = None) -> base.Stream:
        return Stream(self.chip, min(priority, 0), share)

    def current_stream(self) -> base.Stream:
        return self.chip.current()

    def record_event(self) -> base.Event:
        return self.chip.current().record_event()

    def graph_runner(self) -> base.GraphRunner:
        return ChipGraphRunner(self.chip)

    def pin_in_place(self, memory: Tensor) -> Callable[[], None]:
        return pin(memory)

    def share_memory(self, nbytes: int) -> tuple[Tensor, bytes]:
        return share_memory(self.chip, nbytes)

    def map_memory(self, handle: bytes) -> AbstractContextManager[Tensor]:
        return mapped_memory(self.chip, handle)

    def settle_arrivals(self) -> None:
        """There is no network card that would write without the host."""


def _raw(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, ChipTensor), f"expected a tensor on {TYPE}, found one on {tensor.device}"
    return tensor.raw


def open_device(index: int) -> ChipDevice:
    return ChipDevice(index)
