"""The protocols that every backend fills: Device, Stream and Event, AttentionOps, GraphRunner, Partition.

torch is named in annotations only: importing this module leaves torch out.
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
    """The named device is not on this machine; the message says what is missing and how to get it."""


class DeviceLost(RuntimeError):
    """The device is gone for this process: nothing that was launched there will be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttnMeta:
    """One step's batch: ``num_decodes`` decode tokens (one per sequence), then the prefill chunks back to back.

    Lengths of prefills are host integers, because they shape the work; lengths of decodes are given twice, on the
    device (a captured graph reads them) and on the host (Ascend's operators take host lists). ``context`` counts
    the tokens in the sequence up to and including this step's, so a chunk starts at ``context - query``. A chunk
    has at least one token; decodes, chunks or both may be missing.

    Block 0 belongs to no sequence and takes the padding's K/V. A row of padding, as a graph larger than its batch
    has, is a decode of context 1 with a slot of block 0 and a table of zeros; its output is finite and read by
    nobody. Tables are int32 and have at least one column; their rows may lie apart. Behind the blocks of a context
    its row names any blocks, whose numbers may be no numbers.
    """

    block_size: int
    slot_mapping: Tensor
    """[num_tokens] int64: block * block_size + offset where each token's K/V goes."""
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
    """A backend's preparation of one step's AttnMeta; backends add their masks and views in a subclass.

    The caller only carries it from ``prepare`` to each layer's ``attend``.
    """

    meta: AttnMeta


class Draw(Protocol):
    """Draws a token for each row without sorting the vocabulary."""

    def __call__(self, scores: Tensor, counters: Tensor, limits: Tensor) -> Tensor:
        """Tokens [N] int64 from scores [N, V] float32.

        A row with a NaN gives the place of its first one; one that is minus infinity throughout gives 0.

        Args:
            counters: [N, 3] int64: seed, choice and position of each row's random numbers (Philox 4x64-10).
            limits: [N, 4] float32: temperature, min_p, top_p and top_k (0: none). Top-p is a share of what the
                others leave.
        """


class EncodeCaptured(Protocol):
    """Attention of a vision tower by borders on the device, which a captured graph reads at each replay."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int, scale: float
    ) -> Tensor:
        """As :meth:`AttentionOps.encode`.

        Args:
            borders: [S + 1] int32, ascending from 0; equal neighbours are an empty segment. Tokens behind the last
                one are padding: no segment sees them, and their results may be anything.
            longest: tokens of the longest segment that there may be.
        """


class AttentionOps(Protocol):
    """The operators of a transformer over a paged KV cache. T tokens (0 is possible), H heads of dimension D.

    Query head h reads KV head ``h // (Hq // Hkv)``. Tensors may have any strides, but for the cache, which is
    contiguous; results are new tensors of the inputs' dtype. Norms, softmax and rotations are computed in float32
    or rounded to the dtype between steps, as is fast: tests compare with a tolerance. In the cache, block 0 and
    the blocks that a sequence owns hold finite numbers, also past its context; other blocks may hold anything.
    """

    name: str
    """How the backend calls itself in ``epd-serve devices``."""
    compiled_by: tuple[tuple[int, int], ...] = ()
    """Steps that compile each kernel in each of its forms: tokens of prompts, the context of a decode beside them
    (0: none). Empty where nothing is compiled."""
    draw: Draw | None = None
    """None where there is no such operator."""

    def prepare(self, meta: AttnMeta, dtype: torch.dtype) -> AttentionPlan:
        """Masks and views that all layers share. Reads no device value back, so it may stand inside a graph.

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
        """Build what this thread's first calls of ``attend`` would else build: libraries keep plans by thread.

        Args:
            max_num_tokens: of a step. num_heads: of the queries, and of K and V.
        """
        return

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        """Store K and V [T, Hkv, D] into ``kv_layer`` [2, num_blocks, block_size, Hkv, D] at their slots [T].

        The cache has their dtype. Slots are distinct, but for those of block 0 where a step has more rows of
        padding than it has slots: any write may win there.
        """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan, scale: float
    ) -> Tensor:
        """Causal attention of one step, whose K/V are already written.

        Token i of a chunk of n tokens with context m sees positions 0 ... m - n + i; a decode is a chunk of one.

        Args:
            query: [T, Hq, D]. key, value: [T, Hkv, D], this step's own.
            kv_layer: [2, num_blocks, block_size, Hkv, D].

        Returns:
            [T, Hq, D], contiguous.
        """

    def encode(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_host: Sequence[int], scale: float
    ) -> Tensor:
        """Attention of a vision tower: each segment sees all of itself and nothing else.

        Args:
            query: [T, H, D]. key, value: the same shape.
            cu_seqlens_host: ``[0, end of segment 1, ..., T]``, ascending; equal neighbours are an empty segment.

        Returns:
            [T, H, D], contiguous.
        """

    def encode_captured(self, dtype: torch.dtype) -> EncodeCaptured | None:
        """:meth:`encode` for graphs, and states of a dtype; None where there is no such operator."""
        return None

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
        """Index of the largest entry of each row [N, V], the first among equals; [N] int64.

        Minus infinity is an entry like any other; NaN is none.
        """
        return logits.argmax(dim=-1)


class Event(Protocol):
    """A point in a stream's work. ``torch.Event`` is one."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work given so far to ``stream`` (default: the current one)."""

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream`` (default: the current one) go on only after the event; the host does not wait."""

    def query(self) -> bool:
        """Whether the recorded work is done."""

    def synchronize(self) -> None:
        """Block the host until the recorded work is done."""


class Stream(Protocol):
    """A queue of work on a device; ``with stream:`` makes it the current one. ``torch.Stream`` is one."""

    def synchronize(self) -> None:
        """Block the host until all work of the stream is done."""

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event: ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, *error: object) -> None: ...


class GraphRunner(Protocol):
    """Runs a step that was captured once per padded batch size.

    The step reads its inputs from static buffers and returns a static tensor. Per step the caller fills the
    buffers, calls ``update`` with what lives on the host, then ``replay``. A step that was captured in pieces
    (``cut``) has no lengths on the host, and no ``update``.
    """

    name: str
    """``eager``, ``CUDA graph``."""
    captures: bool
    """False where replay simply calls the step."""
    cuts: bool
    """Whether a step may be captured in pieces."""

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        """Warm up and record ``step`` for batches padded to ``size``; a second capture replaces the first."""

    def cut(self, between: Callable[[], None]) -> None:
        """Called by a step: where it is captured, each replay calls ``between`` here, else this does at once.

        The piece before has then been launched, and the one after has not.
        """
        between()

    def update(self, size: int, decode_context_lens: Sequence[int]) -> None:
        """Bind the host lengths of the next replay, ``size`` of them. Raises KeyError before capture."""

    def replay(self, size: int) -> Tensor:
        """Run the step; the tensor is overwritten by the next replay. Raises KeyError before capture."""


class PartitionStrength(StrEnum):
    """The strength of the separation between two instances on one device."""

    ISOLATED = "isolated"
    """The hardware enforces the share (MIG)."""
    COOPERATIVE = "cooperative"
    """Each process limits itself; a process that does not can take more."""
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """The ways to share a device among several processes, and how strong the separation is."""

    strength: PartitionStrength
    mechanisms: tuple[str, ...]
    """The mechanisms that set the shares, in words; empty only where strength is NONE."""


class BareDevice(Protocol):
    """One device as far as it has nothing to do with torch: its name, its memory, its streams."""

    name: str
    """``cpu``, ``cuda:1``, ``npu:0``."""
    type: str
    """torch's device type: ``cpu``, ``cuda``, ``npu``."""
    index: int
    """Among the visible devices of its type; 0 for the CPU."""
    description: str
    """The vendor's name of the hardware."""
    cores: int | None
    """Cores this process may use (CPU) or multiprocessors (accelerators); None where nobody tells."""
    has_streams: bool
    """Whether two streams can overlap; False where streams and events are no-ops."""
    partition: Partition
    """The mechanisms that can set this device's shares."""

    def apply_share(self, share: float, start: float = 0.0) -> Partition:
        """Limit this process to ``share`` of the device, beginning at ``start`` (both as fractions of 1).

        Returns what was set. Raises ValueError for a share outside (0, 1] or one that ends beyond 1.
        """

    def memory(self) -> tuple[int, int]:
        """(total, free) bytes of the device."""

    def headroom(self) -> int:
        """Bytes that this process can still take, those included that its allocator holds and nobody uses."""

    def reset_peak_memory(self) -> int:
        """Let :meth:`peak_memory` begin anew. Returns the bytes that this process uses now."""

    def peak_memory(self) -> int:
        """The most bytes that this process used at once since :meth:`reset_peak_memory`."""

    def set_memory_fraction(self, fraction: float) -> None:
        """Cap this process's allocations at a fraction of the device's memory, in (0, 1].

        Raises ValueError for other fractions and on devices whose allocator knows no cap.
        """

    def set_threads(self, threads: int, cores: Sequence[int] | None = None) -> None:
        """Use ``threads`` host threads for torch, on ``cores`` only where given. Raises ValueError."""

    def activate(self) -> None:
        """Make it this thread's current device, which vendor libraries ask for; nothing to do on a CPU."""

    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    def check(self) -> None:
        """Return at once where the device can go on. Raises DeviceLost where only another process may get it back.

        An error of the device, such as an illegal address, makes all further work of its process fail.
        """

    def stream(self, priority: int = 0, share: float | None = None) -> Stream:
        """A new stream; a lower number is served first.

        An accelerator serves none after those of priority 0. On a CPU priorities mean nothing.

        Args:
            share: part of the arithmetic that this process has to which the stream's work keeps, in (0, 1]; other
                streams may use all of it. None: no limit.

        Raises ValueError for another share, and where the device limits no stream.
        """

    def current_stream(self) -> Stream: ...

    def record_event(self) -> Event:
        """A new event, recorded on the current stream."""


class Device(BareDevice, Protocol):
    """One device of this machine, present and usable. Get it from ``device.registry.get_device``."""

    torch_device: torch.device
    dtypes: tuple[torch.dtype, ...]
    """Floating types that the device computes in."""
    ops: AttentionOps
    transport: TransportCapability

    def graph_runner(self) -> GraphRunner: ...

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """A copy of the host tensor from which the device can copy asynchronously (itself on a CPU)."""

    def pin_in_place(self, memory: Tensor) -> Callable[[], None]:
        """Let the device copy asynchronously from and to this host memory, until the returned function is called.

        Copies are right without it, and slower: where it cannot be had, nothing happens.
        """

    def share_memory(self, nbytes: int) -> tuple[Tensor, bytes]:
        """Zeroed memory of the device, [nbytes] uint8, and a handle by which other processes of this host map it.

        The handle is empty where they cannot. The memory begins at a multiple of ``transport.alignment_bytes``,
        and nothing else lies in the last such part of it.
        """

    def map_memory(self, handle: bytes) -> AbstractContextManager[Tensor]:
        """A context in which memory that another process shares, [nbytes] uint8, is memory of this device.

        No work of the device may use it any more when the context ends. Raises ValueError where it cannot be
        mapped.
        """

    def settle_arrivals(self) -> None:
        """Let what is launched from now on see what a network card has written to the device's memory.

        Raises ValueError where that cannot be had.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """One row of ``epd-serve devices``: a device, or a kind of device that is missing."""

    name: str
    """``cpu``, ``cuda:0``; only the kind where none is there."""
    kind: str
    available: bool
    reason: str | None = None
    """The missing part and how to get it, where not available."""
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
    """Protocols of Mooncake that reach what an instance offers."""


class EagerRunner(GraphRunner):
    """Calls the step: the same contract as a graph's, nothing saved."""

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
    """Raises KeyError for a size that was not captured, ValueError for another number of lengths."""
    if size not in captured:
        raise KeyError(size)
    if len(decode_context_lens) != size:
        raise ValueError(
            f"{len(decode_context_lens)} context lengths for a graph of {size} sequences; pad them to {size}"
        )
