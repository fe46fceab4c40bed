"""Measure a model's stages on a device over a grid and fit their costs, for ``epd-serve profile``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from device.base import Device
from device.registry import get_device
from epd_serve import __version__
from epd_serve.config.options import decode_graph_sizes
from epd_serve.cost.least_squares import fit_relative
from epd_serve.cost.profile import Line, Profile
from epd_serve.engine.kv_memory import KVMemory
from epd_serve.engine.pace import StepTimer, encode_seconds, median_s
from epd_serve.engine.step import StepRunner
from epd_serve.models.family import Family
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.profiling.fits import Sample, decode_lines, encode_line, with_residuals
from epd_serve.protocol.wire import KVLayout
from epd_serve.sched.step_sizes import StepShape
from epd_serve.transfer.embedded import EmbeddedTransport

#: Grid: image sides and batch sizes; prefill chunks and starts; decodes and mean contexts.
SIDES, BATCHES = (112, 224, 448, 672), (1, 2, 4)
CHUNKS, STARTS = (32, 128, 512, 1024), (0, 256, 1024)
DECODES, CONTEXTS = (1, 2, 3, 4, 6, 8, 16, 32), (32, 256, 1024)
#: Relative spread of lengths in a batch, which slows attention: by 10 % of a step for six requests on a CPU.
SPREAD = 0.6
#: Decodes in a step with a prompt's first chunk, their mean context, and chunk sizes.
MIXED, MIXED_CONTEXT, MIXED_CHUNKS = (4, 16), 256, (128, 512)
#: Time for warming up and for measuring each step.
STEADY_S = 0.2
BLOCK_SIZE = 16
#: KV memory for 16,384 tokens, and the scratch block.
NUM_BLOCKS = 16384 // BLOCK_SIZE + 1
TRANSFERS = (1 << 12, 1 << 18, 1 << 22, 1 << 24)

Clock = Literal["wall", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GridOptions:
    """``clock``: see :func:`profile_device`."""

    model: Path
    model_name: str
    device: str
    dtype: torch.dtype
    threads: int | None
    clock: Clock


def profile_device(options: GridOptions, progress: Callable[[str], None] = lambda text: None) -> Profile:
    """Measure and fit; needs the device exclusively.

    The clock "cpu" counts the CPU time of this process, which for one thread equals wall time on an idle machine.
    Raises ValueError for an unavailable model or device.
    """
    device = get_device(options.device)
    device.activate()
    if options.threads is not None:
        device.set_threads(options.threads)
    family = load_family(options.model)
    if family.audio is not None and "image" not in family.token_ids:
        raise ValueError("the model accepts only sounds; profiles and plans support only text and images")
    grid = _Grid(options, device, family, progress)
    encodes = grid.measure_encodes()
    with _loaded_language(options, device, family) as (language, runner):
        steps = grid.measure_steps(language, runner)
        del runner  # with its KV memory, which a deployment sizes by the rest of the device's memory
    transfers = grid.measure_transfers()
    filled = [one for one in steps if one[0] != "decode"]
    base_s, token_s, sequence_s, context_s, pair_s = fit_relative(
        [[1.0, *work] for _, work, _ in filled], [one[2] for one in filled]
    )
    handshake_s, byte_s = fit_relative([[1.0, *work] for _, work, _ in transfers], [one[2] for one in transfers])
    typical = (448, 448)
    dtype_bytes = options.dtype.itemsize
    kv_token_bytes = 2 * language.num_layers * language.num_kv_heads * language.head_dim * dtype_bytes
    return with_residuals(
        Profile(
            kind="measured",
            device=options.device.split(":")[0],
            description=f"{device.description}, {options.threads or 'all'} threads, {options.clock} time",
            model=options.model_name,
            software={
                "epd-serve": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            threads=(options.threads or device.cores or 1) if device.type == "cpu" else 1,
            dtype=str(options.dtype).removeprefix("torch."),
            step=(
                Line(base_s=base_s, token_s=token_s, sequence_s=sequence_s, context_s=context_s, pair_s=pair_s),
            ),
            encode=(encode_line(encodes),),
            decode=decode_lines([one for one in steps if one[0] == "decode"]),
            memory_bytes=float(device.headroom()),
            kv_token_bytes=kv_token_bytes,
            state_bytes=language.state_blocks(BLOCK_SIZE) * kv_token_bytes * BLOCK_SIZE,
            feature_token_bytes=dtype_bytes * family.config.get_text_config().hidden_size,
            num_layers=language.num_layers,
            pixels_per_token=family.num_pixels(typical) / family.num_image_tokens(typical),
            min_pixels=family.num_pixels((32, 32)),
            max_pixels=family.num_pixels((8192, 8192)),
            handshake_s=handshake_s,
            link_bytes_per_s=1 / (byte_s or 1e-12),
            samples=[*encodes, *steps, *transfers],
        )
    )


class _Grid:
    """Measures all points of the grid."""

    def __init__(
        self, options: GridOptions, device: Device, family: Family, progress: Callable[[str], None]
    ) -> None:
        self._options = options
        self._device = device
        self._family = family
        self._progress = progress
        self._clock = time.process_time if options.clock == "cpu" else time.perf_counter

    def measure_encodes(self) -> list[Sample]:
        family, tower = self._family, Tower(self._options.model, self._options.dtype, self._device)
        samples: list[Sample] = []
        for side, count in product(SIDES, BATCHES):
            self._progress(f"encode {count} x {side}x{side}")
            seconds = encode_seconds(tower, family, count, side=side, clock=self._clock)
            samples.append(("encode", [float(count), float(family.num_pixels((side, side)))], seconds))
        return samples

    def measure_steps(self, language: LanguageModel, runner: StepRunner) -> list[Sample]:
        timer = StepTimer(
            runner,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_position_axes=self._family.num_position_axes,
            state_blocks=language.state_blocks(BLOCK_SIZE),
            clock=self._clock,
        )
        longest = min(language.max_model_len, (NUM_BLOCKS - 1) * BLOCK_SIZE)
        shapes = [("prefill", StepShape(chunks=((start, count),))) for start, count in product(STARTS, CHUNKS)]
        shapes += [
            ("decode", StepShape(num_decodes=count, context=context, spread=SPREAD))
            for count, context in product(DECODES, CONTEXTS)
        ]
        shapes.append(("prefill", StepShape(chunks=((0, min(64, longest)),) * 4)))
        shapes += [
            ("mixed", StepShape(num_decodes=count, context=MIXED_CONTEXT, spread=SPREAD, chunks=((0, chunk),)))
            for count, chunk in product(MIXED, MIXED_CHUNKS)
        ]
        samples: list[Sample] = []
        for kind, shape in shapes:
            lengths = [*shape.contexts, *(start + count for start, count in shape.chunks)]
            if shape.num_blocks(BLOCK_SIZE) < NUM_BLOCKS and max(lengths) <= longest:
                self._progress(f"{kind} {shape}")
                work = shape.work
                row = [work.num_tokens, work.num_sequences, work.decode_context, work.prefill_pairs]
                samples.append((kind, [float(value) for value in row], timer.seconds(shape, STEADY_S)))
        return samples

    def measure_transfers(self) -> list[Sample]:
        """Measure reads between two regions of shared memory, as for features and KV."""
        ours, theirs = EmbeddedTransport(path="shm"), EmbeddedTransport(path="shm")
        try:
            source, target = theirs.allocate("source", max(TRANSFERS)), ours.allocate("target", max(TRANSFERS))
            samples: list[Sample] = []
            for nbytes in TRANSFERS:
                self._progress(f"transfer of {nbytes} bytes")
                with target.buffer[:nbytes] as data:
                    seconds = median_s(lambda data=data: ours.read(source.region, [(0, data)]), self._clock)  # type: ignore[misc]
                samples.append(("transfer", [float(nbytes)], max(seconds, 1e-7)))
            return samples
        finally:
            ours.close()
            theirs.close()


@contextmanager
def _loaded_language(
    options: GridOptions, device: Device, family: Family
) -> Iterator[tuple[LanguageModel, StepRunner]]:
    """Load the language model with its own KV memory."""
    language = LanguageModel(options.model, options.dtype, device)
    layout = KVLayout(
        num_layers=language.num_layers,
        num_kv_heads=language.num_kv_heads,
        head_dim=language.head_dim,
        block_size=BLOCK_SIZE,
        dtype=str(options.dtype).removeprefix("torch."),
        model="profile",
    )
    num_blocks = NUM_BLOCKS + language.state_blocks(BLOCK_SIZE)
    transport = EmbeddedTransport(path="shm")
    try:
        runner = StepRunner(
            language,
            device,
            KVMemory(layout, num_blocks, device, transport).tensor.zero_(),
            num_position_axes=family.num_position_axes,
            graph_sizes=decode_graph_sizes(max(DECODES)),
            max_num_seqs=max(DECODES),
            max_model_len=min(language.max_model_len, (NUM_BLOCKS - 1) * BLOCK_SIZE),
        )
        yield language, runner
    finally:
        transport.close()
