"""A model that computes nothing: digests in place of numbers, an emulated device's time in place of arithmetic.

A token is a hash of all tokens and pictures before it, the same wherever and however often it is computed. A block
of KV holds, for each layer, a digest of all that was computed up to there. A step finds the digests of the blocks
that it reads right, or fails: KV that was lost, swapped, or is not there yet gives no answer. A digest takes the
place of thousands of bytes; times and amounts are those of the model.
"""

from __future__ import annotations

import mmap
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from blake3 import blake3

from device.timed import TimedDevice
from device.timeline import Demand
from epd_serve.cost.device_time import DeviceTime
from epd_serve.engine.computing import SampledToken, StepResult
from epd_serve.protocol.wire import KVLayout
from epd_serve.sched.schedule import ScheduleOutput
from epd_serve.sched.step_cost import StepWork, work_done
from epd_serve.sequence import PLACEHOLDER
from epd_serve.sequence import Sequence as TokenSequence
from epd_serve.transfer.transport import Piece, Transport
from epd_serve.types import MediaSpan, SamplingParams

#: Bytes that stand for a token of a picture; and for a block in one layer: its pictures, and the digest of all
#: up to there.
FEATURE_WIDTH, _PICTURES, _DIGEST = 16, 8, 8
LAYER_BYTES = _PICTURES + _DIGEST
_ROOT = b"epd-serve digest chain 1"
_NO_PICTURES = bytes(_PICTURES)


class DigestError(RuntimeError):
    """KV or a feature is not what was computed for these tokens."""


@dataclass(frozen=True, slots=True)
class Feature:
    """The digest of a picture: ``FEATURE_WIDTH`` bytes for each of its tokens."""

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
    """The inputs of the tower: the picture's name, its placeholder tokens, the pixels of it."""

    mm_hash: str
    num_tokens: int
    num_pixels: int


class Held:
    """Memory of the device, for as long as this lives. Raises TimedMemoryError where there is too little."""

    def __init__(self, device: TimedDevice, num_bytes: int) -> None:
        device.take(num_bytes)
        weakref.finalize(self, device.take, -num_bytes).atexit = False


class DigestTower:
    """Takes the time of a vision tower. Fills the Tower protocol of an encoder."""

    def __init__(
        self,
        time: DeviceTime,
        device: TimedDevice,
        *,
        num_layers: int,
        num_parameters: int,
        before_layer: Callable[[], None],
    ) -> None:
        self._weights = Held(device, int(time.profile.tower_bytes))
        self.num_parameters = num_parameters
        self._time, self._device = time, device
        self._num_layers, self._before_layer = num_layers, before_layer

    def encode(self, batch: Sequence[Picture]) -> list[Feature]:
        seconds, demand = self._time.encode([picture.num_pixels for picture in batch])
        layer_s = seconds / self._num_layers
        stream = self._device.current_stream()
        for _ in range(self._num_layers):
            self._before_layer()
            stream.launch(layer_s, demand=demand)
        stream.synchronize()
        return [feature_of(picture.mm_hash, picture.num_tokens) for picture in batch]


class DigestMemory:
    """Fills the KVCacheMemory protocol: the blocks on the device, and a slab of them that the transport knows.

    Args:
        token_bytes: KV of a token in all layers, on the device whose time copies take.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: TimedDevice, transport: Transport, token_bytes: int
    ) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        self._device, self._token_bytes = device, token_bytes
        self.block_bytes = layout.num_layers * LAYER_BYTES
        self._held = Held(device, self.nbytes(layout.num_layers, num_blocks))
        self.slab = transport.allocate("kv", num_blocks * self.block_bytes)
        self.region = self.slab.region
        self._shared = self.slab.buffer
        self._cache = mmap.mmap(-1, num_blocks * self.block_bytes)

    def read(self, block: int) -> bytes:
        """All layers of a block, as the device has them."""
        start = block * self.block_bytes
        return self._cache[start : start + self.block_bytes]

    def write(self, block: int, content: bytes, layers: range) -> None:
        start, part = block * self.block_bytes, slice(layers.start * LAYER_BYTES, layers.stop * LAYER_BYTES)
        self._cache[start + part.start : start + part.stop] = content[part]

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        """Bytes of so many blocks in so many layers on the device that is emulated."""
        return self._token_bytes * self.layout.block_size * num_blocks * num_layers // self.layout.num_layers

    def copy_block(self, source: int, target: int) -> None:
        layers = range(self.layout.num_layers)
        self._device.current_stream().launch(0.0, lambda: self.write(target, self.read(source), layers))

    def stage(self, layers: range, blocks: Sequence[int]) -> None:
        """Bring blocks of some layers to the slab. The transport takes the time of the link."""
        for place in self._places(layers, blocks):
            self._shared[place] = self._cache[place]

    def land(self, blocks: Sequence[int]) -> None:
        for place in self._places(range(self.layout.num_layers), blocks):
            self._cache[place] = self._shared[place]

    def save(self, blocks: Sequence[int]) -> list[bytes]:
        """The contents of blocks, in the time that the link takes for them."""
        self._device.synchronize()
        self._device.copy(self.nbytes(self.layout.num_layers, len(blocks))).wait()
        return [self.read(block) for block in blocks]

    def restore(self, saved: list[bytes], first: int, blocks: Sequence[int]) -> None:
        layers = range(self.layout.num_layers)
        self._device.copy(self.nbytes(len(layers), len(blocks))).wait()
        for block, content in zip(blocks, saved[first : first + len(blocks)], strict=True):
            self.write(block, content, layers)

    def pieces(
        self, layers: range, local: Sequence[int], remote: Sequence[int], remote_num_blocks: int
    ) -> list[Piece]:
        here, there = self._places(layers, local), self._places(layers, remote)
        return [(to.start, self._shared[place]) for place, to in zip(here, there, strict=True)]

    def _places(self, layers: range, blocks: Sequence[int]) -> list[slice]:
        size, first, stop = self.block_bytes, layers.start * LAYER_BYTES, layers.stop * LAYER_BYTES
        return [slice(block * size + first, block * size + stop) for block in blocks]


@dataclass(slots=True)
class _Known:
    """The full blocks of a sequence that were found right: where they are, and the chain's digest after each."""

    blocks: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)

    def cut(self, blocks: Sequence[int]) -> None:
        """Forget what no longer lies in ``blocks``."""
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
    """Fills the Runner protocol. A step takes the time of the device.

    Args:
        choose: (digest of all tokens before, sampling, number of the choice, number of the token in its answer) →
            the token.
    """

    def __init__(
        self,
        memory: DigestMemory,
        device: TimedDevice,
        time: DeviceTime,
        choose: Callable[[bytes, SamplingParams, int, int], int],
    ) -> None:
        self.memory, self.device, self.time, self.choose = memory, device, time, choose
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
        work = work_done(output.decodes, output.prefills)
        seconds, demand = self.cost(work)
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
        """Seconds of a step that is alone on the device, and what it uses of it."""
        return self.time.step(work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs)

    def content(self, chain: bytes, pictures: bytes) -> bytes:
        """A block whose last token ends the chain with this digest: [layers, pictures and a digest of its own]."""
        digests = blake3(chain).digest(_DIGEST * self.num_layers)
        ends = range(0, len(digests), _DIGEST)
        return b"".join([pictures + digests[start : start + _DIGEST] for start in ends])

    def _check_features(self, sequence: TokenSequence, count: int, features: Mapping[str, Feature]) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        for span in sequence.spans:
            if span.start < end and start < span.end:
                found = features[span.mm_hash]
                if found.data != feature_of(span.mm_hash, found.shape[0]).data:
                    raise DigestError(f"feature {span.mm_hash[:12]} is not that of its picture")


@dataclass(slots=True)
class _Part:
    """The tokens ``start`` ... ``end - 1`` of a sequence, and the blocks of all its tokens up to there."""

    sequence: TokenSequence
    start: int
    end: int
    blocks: list[int]
    ids: list[int]  # of tokens from the first block on that is not full at ``start``
    samples: bool
    num_output: int  # tokens of the answer that the sequence had

    @property
    def is_decoding(self) -> bool:
        return self.num_output > 0


class DigestStep:
    """A step that the device was given. Reads and writes KV when the device's time for it has come.

    Attributes:
        tokens: that were chosen, by sequence.
    """

    def __init__(self, runner: DigestRunner, output: ScheduleOutput, before: DigestStep | None) -> None:
        self._runner = runner
        self._before = before
        self._error: Exception | None = None
        self._writes: list[tuple[int, bytes]] = []
        self.tokens: dict[TokenSequence, list[int]] = {}
        self.end: Any = None
        chunks = [(sequence, sequence.num_tokens - 1, sequence.num_tokens) for sequence in output.decodes]
        chunks += [(s, s.num_computed, s.num_computed + count) for s, count in output.prefills]
        self._parts = [self._part(*chunk) for chunk in chunks]

    def _part(self, sequence: TokenSequence, start: int, end: int) -> _Part:
        size = self._runner.block_size
        first = start - start % size
        return _Part(
            sequence=sequence,
            start=start,
            end=end,
            blocks=sequence.blocks[: -(-end // size)],
            ids=_ids(sequence, first, end),
            samples=end == sequence.num_tokens,
            num_output=len(sequence.output_ids),
        )

    def sample(self) -> None:
        """Do nothing: the device chooses at the end of the step."""

    def read(self) -> StepResult:
        """Wait for the end of the step. Raises DigestError where KV was not what it must be."""
        self.end.wait()
        if self._error is not None:
            raise self._error
        result = StepResult([], [])
        for part in self._parts:
            if part.samples:
                tokens = [SampledToken(token) for token in self.tokens[part.sequence]]
                if part.is_decoding:
                    result.decoded.append((part.sequence, tokens[0]))
                else:
                    result.first.append((part.sequence, tokens))
        return result

    # ------------------------------------------------------------------ on the device

    def compute(self, layers: range) -> None:
        """Some layers, in order."""
        try:
            if not layers.start:
                for part in self._parts:
                    self._compute(part)
            if self._error is None:
                for block, content in self._writes:
                    self._runner.memory.write(block, content, layers)
        except Exception as error:  # noqa: BLE001 - whoever reads the step hears of it
            self._error = self._error or error

    def _compute(self, part: _Part) -> None:
        runner, sequence, ids = self._runner, part.sequence, part.ids
        if ids[-1] == PLACEHOLDER:
            assert self._before is not None, "nobody knows the token"
            if sequence not in self._before.tokens:  # the step before has failed
                raise DigestError(f"request {sequence.request_id}: the token before was not computed")
            ids[-1:] = self._before.tokens[sequence]
        known = runner.known.setdefault(sequence, _Known())
        size, first = runner.block_size, part.start // runner.block_size
        known.cut(part.blocks[:first])
        for number in range(len(known.blocks), first):
            self._check(part, known, number, _ids(sequence, number * size, (number + 1) * size))
        if known.blocks and part.is_decoding:  # one more at each token: a block may also go bad later
            again = part.end % len(known.blocks)
            self._same(part, again, runner.content(known.chain[again], known.pictures[again]))
        is_begun = part.start > first * size
        if is_begun:
            self._check(part, known, first, ids[: part.start - first * size])
        chain = known.end
        for number in range(first, len(part.blocks)):
            tokens = ids[(number - first) * size : (number - first + 1) * size]
            pictures = self._pictures(part, number, is_begun=is_begun and number == first)
            chain = _fold(known.end, tokens, pictures)
            self._writes.append((part.blocks[number], runner.content(chain, pictures)))
            if len(tokens) == size:
                known.add(part.blocks[number], chain, pictures)
        if part.samples:
            indices = range(sequence.index, sequence.index + (1 if part.is_decoding else sequence.num_sequences))
            self.tokens[sequence] = [
                runner.choose(chain, sequence.sampling, index, part.num_output + 1) for index in indices
            ]

    def _check(self, part: _Part, known: _Known, number: int, ids: list[int]) -> None:
        """Find a block's content right that was computed before this step, and remember it where it is full."""
        pictures = self._pictures(part, number, is_begun=True)
        chain = _fold(known.end, ids, pictures)
        self._same(part, number, self._runner.content(chain, pictures))
        if len(ids) == self._runner.block_size:
            known.add(part.blocks[number], chain, pictures)

    def _same(self, part: _Part, number: int, expected: bytes) -> None:
        found = self._runner.memory.read(part.blocks[number])
        if found == expected:
            return
        layers = [
            layer
            for layer in range(self._runner.num_layers)
            if found[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
            != expected[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES]
        ]
        raise DigestError(
            f"request {part.sequence.request_id}: the KV in block {part.blocks[number]}, number {number} of the "
            f"sequence, is not that of its tokens in {len(layers)} of {self._runner.num_layers} layers, "
            f"layer {layers[0]} the first"
        )

    def _pictures(self, part: _Part, number: int, *, is_begun: bool) -> bytes:
        """Digest of the pictures in a block. An instance that did not compute the prompt knows it by the KV."""
        size, sequence = self._runner.block_size, part.sequence
        if sequence.positions is not None:
            return _pictures(sequence.spans, number * size, (number + 1) * size)
        return self._runner.memory.read(part.blocks[number])[:_PICTURES] if is_begun else _NO_PICTURES


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
    for span in inside:
        place = span.offset + start - span.start
        hasher.update(span.mm_hash.encode() + place.to_bytes(8, "little", signed=True))
    return hasher.digest(_PICTURES)
