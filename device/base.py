"""The protocols that every backend fills: Device, Stream and Event, AttentionOps, GraphRunner, Partition.

torch appears in annotations only: importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from device.transport import TransportCapability


class DeviceUnavailable(ValueError):
    """The named device is not on this machine; the message names the missing part and how to get it."""


class DeviceLost(RuntimeError):
    """The device is lost to this process: work launched on it will never finish."""


def check_share(share: float, start: float) -> None:
    """Raise ValueError unless ``start`` and ``share`` lie within the device, both as fractions of 1."""
    # Thirds written as decimals may add up to slightly above 1.
    if not (0 < share <= 1 and start >= 0 and start + share <= 1 + 1e-6):
        raise ValueError(f"share {share} from {start}: both are fractions of the device, with a sum of at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttnMeta:
    """One step's batch: ``num_decodes`` decode tokens (one per sequence), then the prefill chunks back to back.

    Prefill lengths are host integers, because they shape the work; decode lengths are given both on the device (a
    captured graph reads them) and on the host (Ascend's operators take host lists). ``context`` counts the tokens
    in the sequence up to and including this step's, so a chunk starts at ``context - query``. A chunk has at least
    one token; decodes, chunks or both may be missing.

    Block 0 is reserved for the K/V of padding. A graph larger than its batch pads it with decodes of context 1,
    a slot in block 0 and a table of zeros; their output is finite and ignored. Tables are int32 with at least one
    column; their rows may have any stride. Entries past a context's last block are arbitrary blocks, which may
    hold NaN.
    """

    block_size: int
    slot_mapping: Tensor
    """[num_tokens] int64: block * block_size + offset to store each token's K/V."""
    num_decodes: int
    decode_block_table: Tensor
    """[num_decodes, max_blocks] int32."""
    decode_context_lens: Tensor
    """[num_decodes] int64."""
    decode_context_lens_host: list[int]
    prefill_query_lens: list[int]
    prefill_context_lens: list[int]
    prefill_block_table: Tensor
    """[num_prefills, max_blocks] int32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """A backend's preparation of one step, carried from ``prepare`` to each layer's ``attend``.

    Backends add their masks and views in a subclass.
    """

    meta: AttnMeta


class Draw(Protocol):
    """Draws a token for each row without sorting the vocabulary."""

    def __call__(self, scores: Tensor, counters: Tensor, limits: Tensor) -> Tensor:
        """Return tokens [N] int64 drawn from scores [N, V] float32.

        A row with a NaN returns the index of its first NaN; a row of minus infinity returns 0.

        Args:
            counters: [N, 3] int64: seed, choice and position of each row's random numbers (Philox 4x64-10).
            limits: [N, 4] float32: temperature, min_p, top_p and top_k (0: none). Top-p is a share of the
                probability left by the others.
        """


class AttentionOps(Protocol):
    """Transformer operators over a paged KV cache. T tokens (may be 0), H heads of dimension D.

    Query head h reads KV head ``h // (Hq // Hkv)``. Tensors may have any strides, except the cache, which is
    contiguous; results are new tensors of the inputs' dtype. Norms, softmax and rotations are computed in float32
    or rounded to the dtype between steps, whichever is faster: tests compare with a tolerance. In the cache, block
    0 and the blocks of a sequence hold finite numbers, even past its context; other blocks may hold anything.
    """

    name: str
    """Backend name shown by ``epd-serve devices``."""
    compiled_by: tuple[tuple[int, int], ...] = ()
    """Steps that compile every form of every kernel: (prompt tokens, context of one decode or 0 for none).
    Empty if nothing is compiled."""
    draw: Draw | None = None
    """The operator that draws tokens; None if the backend lacks it."""

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> AttentionPlan:
        """Return masks and views shared by all layers. Never reads from the device, so a graph may capture it.

        Args:
            dtype: dtype of the queries, keys and values.
        """

    def build_plans(
        self,
        max_num_tokens: int,
        num_heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build library plans, which are kept per thread, before this thread's first ``attend`` would.

        Args:
            max_num_tokens: largest step. num_heads: heads of the queries, and of K and V.
        """
        return

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        """Store K and V [T, Hkv, D] into ``kv_layer`` [2, num_blocks, block_size, Hkv, D] at their slots [T].

        The cache has their dtype. Slots are distinct, except in block 0 when the padding has more rows than the
        block has slots: any write may win there.
        """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Compute causal attention of one step, after its K/V have been written.

        Token i of a chunk of n tokens with context m sees positions 0 ... m - n + i; a decode is a chunk of one.

        Args:
            query: [T, Hq, D]. key, value: [T, Hkv, D] of this step.
            kv_layer: [2, num_blocks, block_size, Hkv, D].

        Returns:
            [T, Hq, D], contiguous.
        """

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        """Compute vision tower attention: each segment sees all of itself and nothing else.

        Args:
            query: [T, H, D]. key, value: the same shape.
            cu_seqlens_host: ``[0, end of segment 1, ..., T]``, ascending; equal neighbours are an empty segment.

        Returns:
            [T, H, D], contiguous.
        """

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``hidden / sqrt(mean(hidden²) + epsilon) * weight`` over the last dimension.

        Args:
            hidden: [T, D], or the heads of a query or key [T, H, D]. weight: [D], of the same dtype.
        """

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """``(rms_norm(hidden + residual), hidden + residual)``, the sum rounded to the dtype."""

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, Hq, D] and key [T, Hkv, D] by halves: the pair (x_i, x_{i + D/2}) turns by angle i.

        Args:
            cos, sin: [T, D] float32, whatever the dtype of the states; the second half repeats the first
                (``ops.rotary`` makes them).
        """

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of a fused [..., 2 * F] projection, gate first; returns [..., F]."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the index [N] int64 of the largest entry of each row [N, V], the first among equals.

        Minus infinity counts as an entry; NaN entries are not supported.
        """
        return logits.argmax(dim=-1)


class Event(Protocol):
    """A point in a stream's work, such as ``torch.Event``."""

    def query(self) -> bool:
        """Return whether the recorded work is done."""

    def synchronize(self) -> None:
        """Block the host until the recorded work is done."""


class Stream(Protocol):
    """A queue of work on a device, such as ``torch.Stream``; ``with stream:`` makes it the current one."""

    def synchronize(self) -> None:
        """Block the host until all work of the stream is done."""

    def wait_event(self, event: Event) -> None:
        """Make later work of the stream wait for the event, without blocking the host."""

    def record_event(self) -> Event:
        """Return an event that marks the work given to the stream so far."""

    def __enter__(self) -> Stream: ...

    def __exit__(self, *error: object) -> None: ...


class GraphRunner(Protocol):
    """Runs a step captured once per padded batch size.

    The step reads its inputs from static buffers and returns a static tensor. Per step the caller fills the
    buffers, calls ``update`` with the host's lengths, then ``replay``. A step captured in pieces (``cut``) takes
    neither host lengths nor ``update``.
    """

    name: str
    """``eager``, ``CUDA graph``."""
    captures: bool
    """False if replay simply calls the step."""
    cuts: bool
    """True if a step may be captured in pieces."""

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        """Warm up and record ``step`` for batches padded to ``size``; a second capture replaces the first."""

    def cut(self, between: Callable[[], None]) -> None:
        """Cut the running step here: every replay calls ``between`` at this point; outside a capture, call it now.

        At that time the piece before is launched and the piece after is not.
        """
        between()

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        """Bind the ``size`` host lengths of the next replay. Raises KeyError before capture."""

    def replay(self, size: int) -> Tensor:
        """Run the step; the next replay overwrites the result. Raises KeyError before capture."""


class PartitionStrength(StrEnum):
    """Isolation between two instances on one device."""

    ISOLATED = "isolated"
    """The hardware enforces the share (MIG)."""
    COOPERATIVE = "cooperative"
    """Each process limits itself; an unlimited process can take more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Mechanisms that share a device among processes, and their isolation."""

    strength: PartitionStrength
    mechanisms: tuple[str, ...]
    """Human-readable mechanisms that set the shares."""


class BareDevice(Protocol):
    """The torch-free part of a device: name, memory, streams."""

    name: str
    """``cpu``, ``cuda:1``, ``npu:0``."""
    type: str
    """torch's device type: ``cpu``, ``cuda``, ``npu``."""
    index: int
    """Index among the visible devices of its type; 0 for the CPU."""
    description: str
    """The vendor's name of the hardware."""
    cores: int | None
    """Cores this process may use (CPU) or multiprocessors (accelerators); None if unknown."""
    has_streams: bool
    """True if two streams can overlap; False if streams and events are no-ops."""
    partition: Partition
    """Mechanisms available for this device's shares."""

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Limit this process to ``share`` of the device, beginning at ``start`` (both as fractions of 1).

        Return the partition. Raises ValueError for a share outside (0, 1] or one that ends beyond 1.
        """

    def memory(self) -> tuple[int, int]:
        """Return (total, free) bytes of the device."""

    def headroom(self) -> int:
        """Return the bytes that this process can still allocate, including cached free memory of its allocator."""

    def reset_peak_memory(self) -> int:
        """Reset :meth:`peak_memory` and return the bytes that this process uses now."""

    def peak_memory(self) -> int:
        """Return the peak of this process's memory in bytes since :meth:`reset_peak_memory`."""

    def set_memory_fraction(self, fraction: float) -> None:
        """Cap this process's allocations at a fraction of the device's memory, in (0, 1].

        Raises ValueError for other fractions and on devices whose allocator cannot cap memory.
        """

    def set_threads(self, threads: int, cores: Sequence[int] | None = None) -> None:
        """Use ``threads`` host threads for torch, pinned to ``cores`` if given. Raises ValueError."""

    def activate(self) -> None:
        """Make it this thread's current device, as vendor libraries require; no-op on a CPU."""

    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    def check(self) -> None:
        """Return at once if the device works. Raises DeviceLost if only a new process can use it again.

        A device error, such as an illegal address, makes all further work of the process fail.
        """

    def stream(self, priority: int = 0, share: float | None = None) -> Stream:
        """Return a new stream; lower priority numbers are served first.

        Accelerators clamp positive priorities to 0; a CPU ignores priorities.

        Args:
            share: fraction of this process's compute, in (0, 1], that limits the stream; other streams may still
                use all of it. None: no limit.

        Raises ValueError for another share, and if the device cannot limit a stream.
        """

    def current_stream(self) -> Stream: ...

    def record_event(self) -> Event:
        """Return a new event, recorded on the current stream."""


class Device(BareDevice, Protocol):
    """One device of this machine, present and usable. Get it from ``device.registry.get_device``."""

    torch_device: torch.device
    dtypes: tuple[torch.dtype, ...]
    """Floating-point types supported by the device."""
    ops: AttentionOps
    transport: TransportCapability

    def graph_runner(self) -> GraphRunner: ...

    def pin_in_place(self, memory: Tensor) -> Callable[[], None]:
        """Pin this host memory for asynchronous copies until the returned function is called.

        Without pinning, copies are correct but slower: a device that cannot pin does nothing.
        """

    def share_memory(self, nbytes: int) -> tuple[Tensor, bytes]:
        """Return zeroed device memory, [nbytes] uint8, and a handle for other processes of this host to map it.

        The handle is empty if they cannot. The memory is aligned to ``transport.alignment_bytes`` and shares its
        last aligned part with nothing else.
        """

    def map_memory(self, handle: bytes) -> AbstractContextManager[Tensor]:
        """Map memory shared by another process, [nbytes] uint8, for the time of the context.

        All device work on it must be finished before the context ends. Raises ValueError if it cannot be mapped.
        """

    def settle_arrivals(self) -> None:
        """Make a network card's writes to device memory visible to work launched from now on.

        Raises ValueError if the device cannot.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """One row of ``epd-serve devices``: a device, or a missing kind of device."""

    name: str
    """Name, such as ``cpu`` or ``cuda:0``; the kind alone if none is present."""
    kind: str
    available: bool
    reason: str | None = None
    """Reason and remedy if the device is unavailable."""
    description: str | None = None
    """The vendor's name of the hardware."""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    cores: int | None = None
    dtypes: tuple[str, ...] = ()
    attention: str | None = None
    graphs: str | None = None
    partition: Partition | None = None
    transports: tuple[str, ...] = ()
    """Mooncake protocols that can reach an instance's buffers."""


class EagerRunner(GraphRunner):
    """Graph runner that captures nothing and calls the step."""

    name = "eager"
    captures = cuts = False

    def __init__(self) -> None:
        self._steps: dict[int, Callable[[], Tensor]] = {}

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        self._steps[size] = step

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        check_update(size, decode_context_lens, self._steps)

    def replay(self, size: int) -> Tensor:
        return self._steps[size]()


def check_update(size: int, decode_context_lens: Sequence[int], captured: Mapping[int, object]) -> None:
    """Raise KeyError for a size without a captured step, ValueError for a wrong number of lengths."""
    if size not in captured:
        raise KeyError(size)
    if len(decode_context_lens) != size:
        raise ValueError(
            f"{len(decode_context_lens)} context lengths for a graph of {size} sequences; pad them to {size}"
        )
