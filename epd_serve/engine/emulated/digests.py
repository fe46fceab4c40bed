"""An emulated model: digests instead of numbers, an emulated device's time instead of computation.

A token is a hash of all tokens and images before it, identical on every instance and after every recomputation. A
KV block holds, for each layer, a digest of everything computed up to there. A step verifies the digests of the
blocks that it reads and fails otherwise, so lost, swapped or late KV never yields an answer. A digest
replaces thousands of bytes; times and byte counts are those of the real model.
"""

from __future__ import annotations

import mmap
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from blake3 import blake3

from device.emulated.timed import TimedDevice
from device.emulated.timeline import Demand
from epd_serve.cost.profile import Profile
from epd_serve.engine.engine import SampledToken, SampledTokens
from epd_serve.protocol.wire import KVLayout, Region
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.sequence import PLACEHOLDER
from epd_serve.sched.sequence import Sequence as TokenSequence
from epd_serve.sched.step_cost import StepWork
from epd_serve.transfer.staging import StagingArea
from epd_serve.transfer.transport import Span, TransferError, Transport
from epd_serve.types import MediaSpan, SamplingParams

#: Bytes per token of an image; per block and layer, holding a digest of everything up to there; and at the start
#: of the first layer's part, naming the block's images.
FEATURE_WIDTH, LAYER_BYTES, _PICTURES = 16, 16, 8
_ROOT = b"epd-serve digest chain 1"
_NO_PICTURES = bytes(_PICTURES)


class DigestError(RuntimeError):
    """KV or a feature differs from the one computed for these tokens."""


@dataclass(frozen=True, slots=True)
class Feature:
    """The digest of an image: ``FEATURE_WIDTH`` bytes for each token."""

    data: bytes | bytearray
    shape: tuple[int, int]
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        return len(self.data)


def feature_of(mm_hash: str, num_tokens: int) -> Feature:
    return Feature(blake3(mm_hash.encode()).digest(FEATURE_WIDTH * num_tokens), (num_tokens, FEATURE_WIDTH))


@dataclass(frozen=True, slots=True)
class Picture:
    """Inputs of the tower: hash, placeholder tokens, and pixels of an image or of a video's ``count`` frames."""

    mm_hash: str
    num_tokens: int
    num_pixels: int
    count: int = 1


class Held:
    """Device memory, freed with this object. Raises TimedMemoryError if the device is full."""

    def __init__(self, device: TimedDevice, num_bytes: int) -> None:
        device.take(num_bytes)
        weakref.finalize(self, device.take, -num_bytes).atexit = False


class DigestTower:
    """An encoder's Tower that takes the time of a vision tower."""

    def __init__(
        self,
        profile: Profile,
        device: TimedDevice,
        *,
        num_layers: int,
        num_parameters: int,
        before_layer: Callable[[], None],
    ) -> None:
        self._weights = Held(device, int(profile.tower_bytes))
        self.num_parameters = num_parameters
        self._profile, self._device = profile, device
        self._num_layers, self._before_layer = num_layers, before_layer

    def encode(self, batch: Sequence[Picture]) -> list[Feature]:
        pixels = [one.num_pixels // one.count for one in batch for _ in range(one.count)]
        seconds, demand = self._profile.encode_demand(pixels)
        layer_s = seconds / self._num_layers
        stream = self._device.current_stream()
        for _ in range(self._num_layers):
            self._before_layer()
            stream.launch(layer_s, demand=demand)
        stream.synchronize()
        return [feature_of(picture.mm_hash, picture.num_tokens) for picture in batch]


class DigestMemory:
    """A KVMemory of digests: blocks on the device, and a slab of cells registered with the transport.

    ``token_bytes``: KV bytes of a token in all layers on the emulated device, which determine copy times.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: TimedDevice,
        transport: Transport,
        token_bytes: int,
        staging_bytes: int,
    ) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        self._device, self._token_bytes = device, token_bytes
        self._steps = device.current_stream()
        self.block_bytes = layout.num_layers * LAYER_BYTES
        self._held = Held(device, self.nbytes(layout.num_layers, num_blocks))
        block_nbytes = self.nbytes(layout.num_layers, 1)
        num_cells = staging_bytes * layout.num_layers // block_nbytes
        self._area = StagingArea(num_cells, num_blocks * layout.num_layers, quarantine_s=0.0)
        self.staged_cells: int | None = self._area.round_cells
        self.slab = transport.allocate("kv", self._area.num_cells * LAYER_BYTES)
        self.region, self.buffer = self.slab.region, self.slab.buffer
        self._cache = mmap.mmap(-1, num_blocks * self.block_bytes)

    def read(self, block: int) -> bytes:
        """Return all layers of a block."""
        start = block * self.block_bytes
        return self._cache[start : start + self.block_bytes]

    def write(self, block: int, content: bytes, layers: range) -> None:
        start, part = block * self.block_bytes, slice(layers.start * LAYER_BYTES, layers.stop * LAYER_BYTES)
        self._cache[start + part.start : start + part.stop] = content[part]

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Return the bytes of blocks in layers on the emulated device."""
        return self._token_bytes * self.layout.block_size * num_blocks * num_layers // self.layout.num_layers

    def copy_block(self, source: int, target: int) -> None:
        layers = range(self.layout.num_layers)
        self._steps.launch(0.0, lambda: self.write(target, self.read(source), layers))

    @property
    def num_staged(self) -> int:
        return self._area.num_lent

    def maps(self, region: Region) -> bool:
        return False

    def read_mapped(self, region: Region, layers: range, source: Sequence[int], blocks: Sequence[int]) -> None:
        raise TransferError("an emulated device cannot map memory")

    def check_integrity(self) -> None:
        self._area.check_integrity()

    @contextmanager
    def stage(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[list[list[Span]]]:
        """Copy blocks to cells; the transport models the time of the link."""
        blocks = [block for part in parts for block in part]
        with self._area.leaving.lend(len(layers) * len(blocks)) as first:
            for here, place in self._places(layers, blocks, first):
                self.buffer[here] = self._cache[place]
            yield _spans(layers, parts, first)

    @contextmanager
    def land(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[list[list[Span]]]:
        blocks = [block for part in parts for block in part]
        with self._area.arriving.lend(len(layers) * len(blocks)) as first:
            yield _spans(layers, parts, first)
            for here, place in self._places(layers, blocks, first):
                self._cache[place] = self.buffer[here]

    def save(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks after the link's transfer time."""
        self._device.synchronize()
        self._device.copy(self.nbytes(self.layout.num_layers, len(blocks))).wait()
        return [self.read(block) for block in blocks]

    def restore(self, saved: list[bytes], first: int, blocks: Sequence[int]) -> None:
        layers = range(self.layout.num_layers)
        self._device.copy(self.nbytes(len(layers), len(blocks))).wait()
        for block, content in zip(blocks, saved[first : first + len(blocks)], strict=True):
            self.write(block, content, layers)

    def _places(self, layers: range, blocks: Sequence[int], first_cell: int) -> Iterator[tuple[slice, slice]]:
        """Yield (slice of the cells, slice of the cache) for some layers of each block."""
        count, here = len(layers) * LAYER_BYTES, first_cell * LAYER_BYTES
        for block in blocks:
            there = block * self.block_bytes + layers.start * LAYER_BYTES
            yield slice(here, here + count), slice(there, there + count)
            here += count


def _spans(layers: range, parts: Sequence[Sequence[int]], first_cell: int) -> list[list[Span]]:
    """Return the spans of each part in the cells from ``first_cell`` on, where a block's layers are adjacent."""
    starts = accumulate((len(part) for part in parts), initial=0)
    start, size = first_cell * LAYER_BYTES, len(layers) * LAYER_BYTES
    return [[(start + number * size, len(part) * size)] for part, number in zip(parts, starts, strict=False)]


@dataclass(slots=True)
class _Known:
    """The verified full blocks of a sequence, and the chain's digest and the images after each.

    ``tail`` is the content of the block after them, which ends with token ``num_tokens``.
    """

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    tail: bytes = b""

    def cut(self, blocks: Sequence[int]) -> None:
        """Forget all blocks from the first one outside ``blocks``."""
        count = min(len(blocks), len(self.blocks))
        if self.blocks[:count] != blocks[:count]:
            count = next(i for i in range(count) if self.blocks[i] != blocks[i])
        del self.blocks[count:], self.chain[count:], self.pictures[count:]

    def add(self, block: int, after: bytes, pictures: bytes) -> None:
        self.blocks.append(block)
        self.chain.append(after)
        self.pictures.append(pictures)

    @property
    def end(self) -> bytes:
        return self.chain[-1] if self.chain else _ROOT


class DigestRunner:
    """Runner whose steps take the emulated device's time.

    ``choose``: (digest of all earlier tokens, sampling, index of the choice, index of its token) → token.
    """

    def __init__(
        self,
        memory: DigestMemory,
        device: TimedDevice,
        profile: Profile,
        choose: Callable[[bytes, SamplingParams, int, int], int],
    ) -> None:
        self.memory, self.device, self.profile, self.choose = memory, device, profile, choose
        self.num_layers, self.block_size = memory.layout.num_layers, memory.layout.block_size
        self.known: WeakKeyDictionary[TokenSequence, _Known] = WeakKeyDictionary()

    def activate(self) -> None:
        self.device.activate()

    def launch(
        self,
        output: ScheduleOutput,
        features_by_hash: Mapping[str, Feature],
        on_layer: Callable[[int], None] | None = None,
        before: DigestStep | None = None,
    ) -> DigestStep:
        for sequence, count in output.prefills:
            self._check_features(sequence, count, features_by_hash)
        chunks = [(sequence.num_computed, count) for sequence, count in output.prefills]
        seconds, demand = self.cost(StepWork.of([one.num_tokens for one in output.decodes], chunks))
        step = DigestStep(self, output, before)
        stream, layers = self.device.current_stream(), range(self.num_layers)
        if on_layer is None or not output.prefills:
            step.end = stream.launch(seconds, partial(step.compute, layers), demand=demand)
            return step
        for layer in layers:
            part = partial(step.compute, range(layer, layer + 1))
            step.end = stream.launch(seconds / self.num_layers, part, demand=demand)
            on_layer(layer)
        return step

    def cost(self, work: StepWork) -> tuple[float, Demand]:
        """Return the seconds of a step that runs alone, and its demand on the device."""
        return self.profile.step_demand(
            work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs
        )

    def content(self, chain: bytes, pictures: bytes) -> bytes:
        """Return the content [layers, LAYER_BYTES] of a block at whose last token the chain has this digest."""
        return pictures + blake3(chain).digest(LAYER_BYTES * self.num_layers - _PICTURES)

    def _check_features(self, sequence: TokenSequence, count: int, features: Mapping[str, Feature]) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        for span in sequence.spans:
            if span.start < end and start < span.end:
                found = features[span.mm_hash]
                if found.data != feature_of(span.mm_hash, found.shape[0]).data:
                    raise DigestError(f"feature {span.mm_hash[:12]} does not match its image")


@dataclass(slots=True)
class _Part:
    """Tokens ``start`` ... ``end - 1`` of a sequence; the last one, or PLACEHOLDER, is ``token``.

    ``num_sampled`` tokens will be chosen after them; ``num_output`` were generated before.
    """

    sequence: TokenSequence
    start: int
    end: int
    table: list[int]
    token: int
    num_sampled: int
    num_output: int


class DigestStep:
    """A launched step, which reads and writes KV when the device's clock reaches it."""

    def __init__(self, runner: DigestRunner, output: ScheduleOutput, before: DigestStep | None) -> None:
        self._runner = runner
        self._before = before
        self._error: Exception | None = None
        self._writes: list[tuple[int, bytes]] = []
        self.tokens: dict[TokenSequence, list[int]] = {}
        self.end: Any = None
        self._parts: list[_Part] = []
        chunks = [(one, one.num_tokens - 1, one.num_tokens) for one in output.decodes]
        chunks += [(one, one.num_computed, one.num_computed + count) for one, count in output.prefills]
        for one, start, end in chunks:
            num_sampled = one.num_sampled if end == one.num_tokens else 0
            [token] = _ids(one, end - 1, end)
            part = _Part(one, start, end, one.blocks, token, num_sampled, len(one.output_ids))
            self._parts.append(part)

    def sample(self) -> None:
        """Do nothing: the step itself chooses at its end."""

    def read(self) -> SampledTokens:
        """Wait for the end of the step. Raises DigestError if KV was wrong."""
        self.end.wait()
        if self._error is not None:
            raise self._error
        sampled = [part.sequence for part in self._parts if part.num_sampled]
        return [(one, [SampledToken(token) for token in self.tokens[one]]) for one in sampled]

    # ------------------------------------------------------------------ on the device

    def compute(self, layers: range) -> None:
        """Compute some layers, in order."""
        try:
            if not layers.start:
                for part in self._parts:
                    self._compute(part)
                self._before = None
            if self._error is None:
                for block, content in self._writes:
                    self._runner.memory.write(block, content, layers)
        except Exception as error:  # noqa: BLE001 - raised again by read()
            self._error = self._error or error

    def _compute(self, part: _Part) -> None:
        """Verify all KV before the part, write the part's KV and choose its tokens."""
        sequence, runner = part.sequence, self._runner
        if part.token == PLACEHOLDER:
            assert self._before is not None, "the placeholder lacks an earlier step"
            if sequence not in self._before.tokens:  # the previous step failed
                raise DigestError(f"request {sequence.request_id}: the previous token was not computed")
            [part.token] = self._before.tokens[sequence]
        known = runner.known.setdefault(sequence, _Known())
        size, first = runner.block_size, part.start // runner.block_size
        known.cut(part.table[:first])
        for number in range(len(known.blocks), first):
            self._check(part, known, number, _ids(sequence, number * size, (number + 1) * size))
        if part.num_output and known.blocks:  # verify one full block per token
            again = part.end % len(known.blocks)
            self._same(part, again, runner.content(known.chain[again], known.pictures[again]))
        ids = [*_ids(sequence, first * size, part.end - 1), part.token]
        is_begun = part.start > first * size
        if is_begun and known.num_tokens == part.start:
            self._same(part, first, known.tail)
        elif is_begun:
            self._check(part, known, first, ids[: part.start - first * size])
        chain = known.end
        for number in range(first, -(-part.end // size)):
            tokens = ids[(number - first) * size : (number - first + 1) * size]
            pictures = self._pictures(part, number, is_begun=is_begun and number == first)
            chain = _fold(known.end, tokens, pictures)
            known.tail = runner.content(chain, pictures)
            self._writes.append((part.table[number], known.tail))
            if len(tokens) == size:
                known.add(part.table[number], chain, pictures)
        known.num_tokens = part.end
        if part.num_sampled:
            choices = range(sequence.index, sequence.index + part.num_sampled)
            number = part.num_output + 1
            self.tokens[sequence] = [runner.choose(chain, sequence.sampling, one, number) for one in choices]

    def _check(self, part: _Part, known: _Known, number: int, ids: list[int]) -> None:
        """Verify a block computed before this step, and remember it if it is full."""
        pictures = self._pictures(part, number, is_begun=True)
        chain = _fold(known.end, ids, pictures)
        self._same(part, number, self._runner.content(chain, pictures))
        if len(ids) == self._runner.block_size:
            known.add(part.table[number], chain, pictures)

    def _same(self, part: _Part, number: int, expected: bytes) -> None:
        if self._runner.memory.read(part.table[number]) != expected:
            raise DigestError(
                f"request {part.sequence.request_id}: the KV in block {part.table[number]}, number {number} of "
                "its sequence, does not match its tokens"
            )

    def _pictures(self, part: _Part, number: int, *, is_begun: bool) -> bytes:
        """Return the digest of the images in a block, from its KV if another instance computed the prompt."""
        size, sequence = self._runner.block_size, part.sequence
        if sequence.positions is not None:
            return _pictures(sequence.spans, number * size, (number + 1) * size)
        return self._runner.memory.read(part.table[number])[:_PICTURES] if is_begun else _NO_PICTURES


def _ids(sequence: TokenSequence, start: int, end: int) -> list[int]:
    length = len(sequence.prompt_ids)
    ids = sequence.prompt_ids[start:end]
    return ids + sequence.output_ids[max(start - length, 0) : end - length] if end > length else ids


def _fold(chain: bytes, ids: Sequence[int], pictures: bytes) -> bytes:
    return blake3(chain + pictures + array("q", ids).tobytes()).digest()


def _pictures(spans: Sequence[MediaSpan], start: int, end: int) -> bytes:
    inside = [span for span in spans if span.start < end and start < span.end]
    if not inside:
        return _NO_PICTURES
    hasher = blake3()
    # the same for a run of rows however a video is segmented
    for name, place in dict.fromkeys(
        (span.item or span.mm_hash, span.first + span.offset + start - span.start) for span in inside
    ):
        hasher.update(name.encode() + place.to_bytes(8, "little", signed=True))
    return hasher.digest(_PICTURES)
