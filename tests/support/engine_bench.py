"""An engine with a tiny model in one process, without a server."""

from __future__ import annotations

import queue
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chip.chip import never_waiting
from clips import LIMITS as CLIP_LIMITS
from clips import Clip
from msgspec.structs import replace
from PIL import Image
from program import wait_until
from sounds import LIMITS as SOUND_LIMITS
from sounds import Sound

from device.base import Device
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import decode_graph_sizes
from epd_serve.engine.device_board import DeviceBoard
from epd_serve.engine.dual_stream import LanguageStream
from epd_serve.engine.engine import Engine, EngineEvent, TokenEvent
from epd_serve.engine.kv_memory import KVMemory
from epd_serve.engine.step import LaunchedStep, StepRunner
from epd_serve.engine.step_loop import StepLoop
from epd_serve.engine.telemetry import StageRates
from epd_serve.instance.loading.language_weights import read_texts
from epd_serve.instance.text.prompt import PromptProcessor
from epd_serve.media.audio import read_audio_facts
from epd_serve.media.video import read_facts
from epd_serve.models.family import TowerInputs
from epd_serve.models.generation_config import GenerationConfig
from epd_serve.models.language import LanguageModel
from epd_serve.models.loader import load_family
from epd_serve.models.tower import Tower
from epd_serve.protocol import wire
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import Sequence
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.types import AS_THE_MODEL, SamplingParams

BLOCK_SIZE = 8
#: A clip has the length and the rate of its file.
Medium = Image.Image | Clip | Sound


class UnwaitingRunner(StepRunner):
    """Refuses what lets the engine's thread wait for a chip, but for a step's end."""

    def launch(self, *args: Any, **kwargs: Any) -> LaunchedStep:
        with never_waiting():
            step = super().launch(*args, **kwargs)
        sample = step.sample

        def unwaiting() -> None:
            with never_waiting():
                sample()

        step.sample = unwaiting  # type: ignore[method-assign]
        return step


@dataclass
class EngineBench:
    """An engine with the parts around it that an instance would have, for which it stands itself."""

    path: Path
    budget: Budget
    num_blocks: int = 200
    block_size: int = BLOCK_SIZE
    device: Device = field(default_factory=lambda: get_device("cpu"))
    runs_ahead: bool = False
    starts: bool = True
    events: queue.Queue[EngineEvent] = field(default_factory=queue.Queue)
    features: dict[str, torch.Tensor] = field(default_factory=dict)

    num_preemptions: int = 0
    num_saved: int = 0
    num_held: int = 0

    def __post_init__(self) -> None:
        device = self.device
        self.family = load_family(self.path)
        if self.family.modalities:
            self.tower = Tower(self.path, torch.float32, device)
        language = LanguageModel(self.path, torch.float32, device)
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=self.block_size,
            dtype="float32",
            model="m",
            state_blocks=language.state_blocks(self.block_size),
        )
        self.transport = EmbeddedTransport(path="shm")
        self.memory = memory = KVMemory(layout, self.num_blocks, device, self.transport)
        runner = UnwaitingRunner(
            language,
            device,
            memory.tensor,
            num_position_axes=self.family.num_position_axes,
            eos_token_ids=frozenset({2}),
            graph_sizes=decode_graph_sizes(self.budget.max_num_seqs),
            max_num_seqs=self.budget.max_num_seqs,
            max_model_len=language.max_model_len,
            prefill_graph_sizes=(8, 64),
            max_num_tokens=self.budget.max_num_tokens,
        )
        self.processor = PromptProcessor(
            read_texts(self.path, self.family),
            self.family,
            language.inner,
            max_model_len=language.max_model_len,
            block_size=self.block_size,
            generation=GenerationConfig(),
            rates=StageRates(time.monotonic),
        )
        self.pool = BlockPool(self.num_blocks, self.block_size, state_blocks=layout.state_blocks)
        own: Any = self
        self.engine = Engine(self.pool, memory, self.budget, own, eos_token_ids=frozenset({2}))
        stream = LanguageStream(device, DeviceBoard(None, 0, time.monotonic), limit_s=None)
        self.loop = StepLoop(self.engine, runner, own, stream, own, runs_ahead=self.runs_ahead)
        if self.starts:
            self.loop.start()

    def shrink(self, num_blocks: int) -> None:
        """Leave that many blocks of an idle engine's pool; nothing is cached any more."""
        self.pool.allocate(self.pool.num_free)
        self.num_held = self.pool.capacity - num_blocks
        self.pool.release(range(1, num_blocks + 1))

    def has(self, mm_hash: str) -> bool:
        return mm_hash in self.features

    def starved(self, mm_hash: str) -> None: ...

    def use(self, mm_hash: str) -> torch.Tensor | None:
        return self.features.get(mm_hash)

    def emit(self, events: list[EngineEvent]) -> None:
        for event in events:
            self.events.put(event)

    def add_step(self, output: ScheduleOutput, seconds: float) -> None:
        self.num_preemptions += len(output.preempted)
        self.num_saved += sum(sequence.saved is not None for sequence in output.preempted)

    def close(self) -> None:
        self.loop.close()
        self.transport.close()

    def sequence(
        self,
        name: str,
        text: str,
        media: Collection[Medium],
        *,
        max_tokens: int | None = 12,
        n: int = 1,
        hand_off: bool = False,
        num_segments: int = 1,
        **sampling: Any,
    ) -> Sequence:
        """A request's sequence; ``num_segments``: of each medium, a video if there is more than one."""
        items = [replace(_item(medium), num_segments=num_segments) for medium in media]
        request = wire.PrefillRequest(
            request_id=name,
            output=wire.OutputOptions(kind="chat", id=name, created=0, model="m"),
            sampling=SamplingParams(
                **{"seed": 0, "temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "n": n, **sampling}
            ),
            items=items,
            messages=[
                wire.ChatMessage(
                    role="user",
                    content=[
                        *(wire.Part(type=item.modality) for item in items),
                        wire.Part(type="text", text=text),
                    ],
                )
            ],
        )
        sequence = self.processor.process(request)
        sequence.hand_off = hand_off
        return sequence

    def encode(self, media: Collection[Medium], num_segments: int = 1) -> None:
        parts = [
            (medium, part)
            for medium in media
            for part in self.processor.segments([replace(_item(medium), num_segments=num_segments)])
        ]
        inputs = [self._inputs(medium, part) for medium, part in parts]
        for (_, part), feature in zip(parts, self.tower.encode(inputs), strict=True):
            self.features[part.mm_hash] = feature
        self.engine.wake()

    def _inputs(self, medium: Medium, item: wire.MediaRef) -> TowerInputs:
        if isinstance(medium, Image.Image):
            return self.family.preprocess(np.array(medium))
        if isinstance(medium, Sound):
            assert self.family.audio is not None
            return self.family.audio.inputs(medium.samples(self.family.audio.rate))
        assert self.family.video is not None
        frames, _ = medium.frames()
        inputs = self.family.video.inputs(item)
        inputs.add(frames[self.family.video.indices(item)])
        return inputs.finish()

    def collect(self, count: int) -> dict[tuple[str, int], list[int]]:
        """Tokens by (request, choice) until ``count`` choices have finished."""
        tokens: dict[tuple[str, int], list[int]] = {}
        while count:
            event = self.events.get(timeout=60)
            assert isinstance(event, TokenEvent), event
            tokens.setdefault((event.sequence.request_id, event.sequence.index), []).append(event.token.token_id)
            count -= event.finish_reason is not None
        return tokens

    def check_idle(self) -> None:
        num_usable = self.pool.capacity - self.num_held
        wait_until(lambda: self.pool.num_free >= num_usable, "all blocks are free", 10)
        self.pool.check_integrity()
        assert self.pool.num_free == num_usable


def _item(medium: Medium) -> wire.MediaRef:
    if isinstance(medium, Image.Image):
        return wire.MediaRef(mm_hash=f"{hash(medium.tobytes()):x}", width=medium.width, height=medium.height)
    assert isinstance(medium.data, bytes), "a list of frames"
    if isinstance(medium, Sound):
        item = wire.MediaRef.of_audio(read_audio_facts(medium.data, SOUND_LIMITS))
    else:
        item = wire.MediaRef.of_video(read_facts(medium.data, CLIP_LIMITS), AS_THE_MODEL)
    return replace(item, mm_hash=f"{hash(medium.data):x}")
