"""Our engine as a benchmark's worker, or transformers': reads cases from standard input, answers with their times.

The engine is the one that an instance runs, without the servers around it: scheduler, block pool, runner, sampler.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.common import argument_parser
from device.base import Device
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import LanguageStream
from epd_serve.engine.engine import Engine, EngineEvent, FailureEvent, TokenEvent
from epd_serve.engine.kv_memory import KVMemory
from epd_serve.engine.step import StepRunner
from epd_serve.engine.step_loop import StepLoop
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.protocol.wire import KVLayout
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.types import SamplingParams

BLOCK_SIZE = 16
MAX_TOKENS = 16_384
MAX_TOKENS_PER_STEP, MAX_NUM_SEQS = 4096, 256


class NativeEngine:
    """The language stages of an instance."""

    def __init__(self, path: Path, device: Device, dtype: torch.dtype) -> None:
        model = LanguageModel(path, dtype, device)
        self._axes = load_family(path).num_position_axes
        num_blocks = MAX_TOKENS // BLOCK_SIZE + 2
        layout = KVLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=BLOCK_SIZE,
            dtype=str(dtype).removeprefix("torch."),
            model="benchmark",
        )
        self._transport = EmbeddedTransport(path="shm")
        memory = KVMemory(layout, num_blocks, device, self._transport)
        kv = memory.tensor.zero_()  # its pages are the system's to clear when first written: not during a case
        self.runner = StepRunner(
            model,
            device,
            kv,
            num_position_axes=self._axes,
            graph_sizes=[],
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=model.max_model_len,
        )
        self._events: queue.SimpleQueue[list[EngineEvent]] = queue.SimpleQueue()
        own: Any = self
        self._engine = Engine(
            BlockPool(num_blocks, BLOCK_SIZE),
            memory,
            Budget(max_num_tokens=MAX_TOKENS_PER_STEP, max_num_seqs=MAX_NUM_SEQS),
            own,
            eos_token_ids=frozenset(),
        )
        stream = LanguageStream(device, DeviceBoard(None, 0, time.monotonic), limit_s=None)
        self._loop = StepLoop(self._engine, self.runner, own, stream, InstanceTelemetry("benchmark"))
        self._loop.start()

    def emit(self, events: list[EngineEvent]) -> None:
        self._events.put(events)

    def has(self, mm_hash: str) -> bool:
        """No prompt has media."""
        return False

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate ``num_tokens`` for each prompt of a batch, greedily."""
        greedy = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
        sequences = [
            Sequence(
                request_id=str(index),
                prompt_ids=prompt,
                sampling=greedy,
                max_tokens=num_tokens,
                positions=torch.arange(len(prompt)).expand(self._axes, -1),
            )
            for index, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            self._engine.submit(sequence)
        running = len(sequences)
        while running:
            for event in self._events.get():
                if isinstance(event, FailureEvent):
                    raise event.error
                if isinstance(event, TokenEvent) and event.finish_reason is not None:
                    running -= 1

    def close(self) -> None:
        self._loop.close()
        self._transport.close()


def random_prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[list[int]] = torch.randint(16, vocabulary, (batch, length), generator=generator).tolist()
    return tokens


def serve(generate: Callable[..., None]) -> None:
    """Answer lines of ``{"batch": ..., "prompt": ..., "tokens": ...}`` with that call's times."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        wall, cpu = time.perf_counter(), time.process_time()
        generate(**case)
        result = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(result), flush=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, required=True, help="random prompts are of tokens below this")
    parser.add_argument(
        "--transformers", action="store_true", help="transformers' generate in place of the engine"
    )
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    serve_engine = serve_transformers if arguments.transformers else serve_native
    serve_engine(arguments.model, arguments.vocabulary, getattr(torch, arguments.dtype))


def serve_native(model: Path, vocabulary: int, dtype: torch.dtype) -> None:
    device = get_device("cpu")
    engine = NativeEngine(model, device, dtype)

    def generate(batch: int, prompt: int, tokens: int) -> None:
        engine.generate(random_prompts(batch, prompt, vocabulary), tokens)

    serve(generate)
    engine.close()


def serve_transformers(path: Path, vocabulary: int, dtype: torch.dtype) -> None:
    has_tower = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    auto_model = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    model: Any = auto_model.from_pretrained(path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(batch: int, prompt: int, tokens: int) -> None:
        ids = torch.tensor(random_prompts(batch, prompt, vocabulary))
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    serve(generate)


if __name__ == "__main__":
    main()
