"""The engine in one process: equal to ``generate`` with chunked prefill, mixed batches, prefix reuse, aborts."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from pictures import noise
from PIL import Image
from reference import Reference

from device.base import Device
from device.cpu import CpuDevice
from device.graphs import EagerRunner
from device.registry import get_device
from epd_serve.cache.block_pool import BlockPool
from epd_serve.config import decode_graph_sizes
from epd_serve.errors import InvalidRequest
from epd_serve.models.family import load_family
from epd_serve.models.language import LanguageModel
from epd_serve.models.tower import Tower
from epd_serve.protocol import wire
from epd_serve.request import Sequence
from epd_serve.sched.language import Budget
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.types import SamplingParams
from epd_serve.worker.engine import Engine
from epd_serve.worker.events import EngineEvent, FailureEvent, TokenEvent
from epd_serve.worker.kv_memory import KVMemory
from epd_serve.worker.prompt import PromptProcessor
from epd_serve.worker.runner import LanguageRunner
from epd_serve.worker.step import StepExecutor

BLOCK_SIZE = 8


@dataclass
class Bench:
    """An engine with the parts around it that an instance would have."""

    path: Path
    budget: Budget
    num_blocks: int = 200
    device: Device = field(default_factory=lambda: get_device("cpu"))
    events: queue.Queue[EngineEvent] = field(default_factory=queue.Queue)
    features: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.device
        self.family = load_family(self.path)
        self.tower = Tower(self.path, torch.float32, device)
        language = LanguageModel(self.path, torch.float32, device)
        layout = wire.KVLayout(
            num_layers=language.num_layers,
            num_kv_heads=language.num_kv_heads,
            head_dim=language.head_dim,
            block_size=BLOCK_SIZE,
            dtype="float32",
            model="m",
        )
        self.transport = EmbeddedTransport(path="shm")
        memory = KVMemory(layout, self.num_blocks, device, self.transport)
        executor = StepExecutor(
            language,
            device,
            memory.tensor,
            num_position_axes=self.family.num_position_axes,
            graph_sizes=decode_graph_sizes(self.budget.max_num_seqs),
            max_model_len=language.max_model_len,
        )
        runner = LanguageRunner(
            executor,
            device.ops,
            block_size=BLOCK_SIZE,
            num_position_axes=self.family.num_position_axes,
            eos_token_ids=frozenset({2}),
        )
        self.processor = PromptProcessor(
            self.path,
            self.family,
            language.inner,
            max_model_len=language.max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks - 1,
        )
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        self.engine = Engine(
            runner,
            self.pool,
            self.budget,
            num_layers=language.num_layers,
            eos_token_ids=frozenset({2}),
            feature_of=self.features.get,
            copy_block=memory.copy_block,
            block_nbytes=1,
            record_event=lambda: lambda: None,
            sender=None,
            emit=lambda events: [self.events.put(event) for event in events] and None,
            on_free=lambda: None,
        )
        self.engine.start()

    def sequence(
        self, name: str, text: str, images: list[Image.Image], *, max_tokens: int | None = 12, n: int = 1
    ) -> Sequence:
        hashes = [f"{hash(image.tobytes()):x}" for image in images]
        request = wire.PrefillRequest(
            request_id=name,
            output=wire.OutputOptions(kind="chat", id=name, created=0, model="m"),
            sampling=SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n),
            items=[
                wire.MediaRef(mm_hash=h, width=image.width, height=image.height)
                for h, image in zip(hashes, images, strict=True)
            ],
            messages=[
                wire.ChatMessage(
                    role="user",
                    content=[wire.Part(type="image")] * len(images) + [wire.Part(type="text", text=text)],
                )
            ],
        )
        prompt = self.processor.process(request)
        return Sequence(
            request_id=name,
            prompt_ids=prompt.ids,
            sampling=request.sampling,
            max_tokens=prompt.max_tokens,
            positions=prompt.positions,
            position_delta=prompt.position_delta,
            spans=prompt.spans,
            block_hashes=prompt.block_hashes,
            num_sequences=n,
        )

    def encode(self, images: list[Image.Image]) -> None:
        inputs = [self.family.preprocess(image) for image in images]
        for image, feature in zip(images, self.tower.encode(inputs), strict=True):
            self.features[f"{hash(image.tobytes()):x}"] = feature
        self.engine.wake()

    def collect(self, count: int) -> dict[tuple[str, int], list[int]]:
        """Tokens by (request, choice) until ``count`` choices have finished."""
        tokens: dict[tuple[str, int], list[int]] = {}
        while count:
            event = self.events.get(timeout=60)
            assert isinstance(event, TokenEvent), event
            tokens.setdefault((event.request_id, event.sequence.index), []).append(event.token.token_id)
            count -= event.finish_reason is not None
        return tokens

    def check_idle(self) -> None:
        deadline = time.monotonic() + 10
        while self.pool.num_free < self.pool.capacity and time.monotonic() < deadline:
            time.sleep(0.01)
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.capacity, "blocks leaked"


@pytest.fixture(params=[(7, 3), (2048, 64)], ids=["tiny-budget", "large-budget"])
def bench(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Bench]:
    tokens, seqs = request.param
    bench = Bench(tiny_model, Budget(max_num_tokens=tokens, max_num_seqs=seqs))
    yield bench
    bench.engine.close()
    bench.transport.close()


class StaticRunner(EagerRunner):
    """Keeps to a capturing runner's contract on a CPU: steps read static buffers and fill a static output."""

    captures = True

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, torch.Tensor] = {}
        self.num_replays = 0

    def capture(self, size: int, step: Callable[[], torch.Tensor]) -> None:
        super().capture(size, step)
        self.outputs[size] = step().clone()

    def replay(self, size: int) -> torch.Tensor:
        self.num_replays += 1
        return self.outputs[size].copy_(super().replay(size))


class CapturingCpu(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.graphs = StaticRunner()

    def graph_runner(self) -> StaticRunner:
        return self.graphs


def test_decode_graphs_change_no_token(tiny_model: Path) -> None:
    """Batches of one to six rows in graphs of one, two, four and six, between steps with prefills."""
    device = CapturingCpu()
    bench = Bench(tiny_model, Budget(max_num_tokens=64, max_num_seqs=6), device=device)
    assert sorted(device.graphs.outputs) == [1, 2, 4, 6]
    reference = Reference(tiny_model)
    answers: dict[str, list[int]] = {}
    for count, (name, text, images) in enumerate(requests(), start=1):
        if images:
            bench.encode(images)
        bench.engine.submit(bench.sequence(name, text, images, max_tokens=4 * count))
    for (name, _), ids in bench.collect(len(requests())).items():
        answers[name] = ids
    for count, (name, text, images) in enumerate(requests(), start=1):
        assert answers[name] == reference.generate(text, images, max_tokens=4 * count)
    assert device.graphs.num_replays > 8
    bench.check_idle()
    bench.engine.close()
    bench.transport.close()


def requests() -> list[tuple[str, str, list[Image.Image]]]:
    one, two, three = noise(1), noise(2, (60, 140)), noise(3, (90, 90))
    return [
        ("one image", "What is this?", [one]),
        ("text", "Say apple", []),
        ("two images", "What is in the picture?", [two, three]),
        ("same image again", "What color is the circle?", [one]),
        ("long text", "Repeat: " + "apple banana " * 12, []),
        ("same two images, other order", "What is in the picture?", [three, two]),
    ]


def test_identical_to_generate_in_a_mixed_batch_and_again_from_the_prefix_cache(
    bench: Bench, tiny_model: Path
) -> None:
    reference = Reference(tiny_model)
    expected = {name: reference.generate(text, images, max_tokens=12) for name, text, images in requests()}
    images = [noise(1), noise(2, (60, 140)), noise(3, (90, 90))]
    for name, text, pictures in requests():
        bench.engine.submit(bench.sequence(name, text, pictures))
    time.sleep(0.05)
    for image in images:
        bench.encode([image])  # features come while text before the images may be running already
        time.sleep(0.05)
    answers = bench.collect(len(requests()))
    assert {name: ids for (name, _), ids in answers.items()} == expected
    bench.check_idle()
    bench.features.clear()  # the prefix cache must do without
    again = bench.sequence("again", *requests()[2][1:])
    bench.engine.submit(again)
    assert bench.collect(1)["again", 0] == expected["two images"]
    bench.check_idle()


def test_choices_fork_from_one_prompt(bench: Bench, tiny_model: Path) -> None:
    expected = Reference(tiny_model).generate("Say apple", max_tokens=12)
    bench.engine.submit(bench.sequence("r", "Say apple", [], n=3))
    assert bench.collect(3) == {("r", i): expected for i in range(3)}
    bench.check_idle()


def test_abort_at_any_time_frees_every_block(bench: Bench) -> None:
    bench.encode([noise(1)])
    for i in range(12):
        bench.engine.submit(bench.sequence(f"r{i}", f"What is this? {i}", [noise(1)], max_tokens=40))
    for i in range(12):
        time.sleep(0.004 * i)
        bench.engine.abort(f"r{i}")
        bench.engine.abort(f"r{i}")
    bench.check_idle()
    assert bench.engine.load().num_running == 0


def test_a_request_waits_for_its_feature_and_can_be_aborted_while_it_does(bench: Bench) -> None:
    bench.engine.submit(bench.sequence("r", "What is this?", [noise(5)]))
    time.sleep(0.2)
    assert bench.events.empty()
    bench.engine.abort("r")
    bench.check_idle()


def test_a_failing_step_fails_its_requests_and_nothing_else(bench: Bench, tiny_model: Path) -> None:
    bench.features[f"{hash(noise(6).tobytes()):x}"] = torch.zeros(3, 5)  # not what the prompt counts on
    bench.engine.submit(bench.sequence("broken", "What is this?", [noise(6)]))
    event = bench.events.get(timeout=30)
    assert isinstance(event, FailureEvent)
    assert event.request_id == "broken"
    bench.check_idle()
    bench.engine.submit(bench.sequence("fine", "Say apple", []))
    assert bench.collect(1)["fine", 0] == Reference(tiny_model).generate("Say apple", max_tokens=12)


def test_a_feature_that_another_request_held_may_go_at_any_moment(bench: Bench, tiny_model: Path) -> None:
    bench.encode([noise(1)])
    looks = itertools.count()
    gone = {2, 5, 6, 8}  # the third look was the one that the engine did not survive
    bench.engine._feature_of = lambda name: None if next(looks) in gone else bench.features.get(name)
    bench.engine.submit(bench.sequence("r", "What is this?", [noise(1)]))
    for _ in range(10):
        time.sleep(0.02)
        bench.engine.wake()
    assert bench.collect(1)["r", 0] == Reference(tiny_model).generate("What is this?", [noise(1)], max_tokens=12)


def test_a_cached_prefix_that_waits_for_a_feature_holds_nobody_up(tiny_model: Path) -> None:
    bench = Bench(tiny_model, Budget(max_num_tokens=16, max_num_seqs=8))
    images = [noise(1), noise(2, (60, 140))]
    bench.encode(images)
    bench.engine.submit(bench.sequence("first", "What is this?", images))
    bench.collect(1)
    bench.check_idle()
    bench.features.clear()
    sequence = bench.sequence("waits", "What is this?", images)
    num_cached = sequence.spans[1].start // BLOCK_SIZE + 1  # ends within the second image
    assert 16 <= num_cached * BLOCK_SIZE < sequence.spans[1].end
    sequence.block_hashes = sequence.block_hashes[:num_cached]
    with bench.engine._changed:
        bench.engine.submit(sequence)
        bench.engine.submit(bench.sequence("behind", "Say apple", []))
    assert ("behind", 0) in bench.collect(1)
    bench.engine.abort("waits")
    bench.check_idle()
    bench.engine.close()
    bench.transport.close()


def test_several_choices_of_open_length_fit_the_pool(bench: Bench) -> None:
    for n in (1, 2, 3):
        sequence = bench.sequence(f"r{n}", "Say apple", [], max_tokens=None, n=n)
        bench.engine.check_fits(sequence.num_prompt_tokens, sequence.max_tokens, n)
        assert sequence.max_tokens > 400


def test_a_request_that_can_never_fit_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="KV blocks"):
        bench.engine.check_fits(100, 100_000, 1)
