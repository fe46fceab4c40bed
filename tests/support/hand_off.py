"""The two sides of a hand-off without a model: services over an engine of ten blocks, and peers that are told what
to answer."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from epd_serve.cache.block_pool import BlockPool, RequestBlocks
from epd_serve.engine.engine import Engine, Outbox
from epd_serve.engine.telemetry import InstanceTelemetry
from epd_serve.errors import ServeError
from epd_serve.instance.calls import CleanUps, Refusals
from epd_serve.instance.decode import Decoder
from epd_serve.instance.prefill import Prefiller
from epd_serve.instance.text.request_processor import RequestProcessor
from epd_serve.protocol import wire
from epd_serve.sched.schedule import Budget
from epd_serve.sched.sequence import Sequence as Prompt
from epd_serve.transfer.kv_sender import OutgoingTransfer
from epd_serve.types import SamplingParams

LAYOUT = wire.KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32", model="m")
REGION = wire.Region(name="kv", nbytes=1, host_id="h", pid=1, fd=1, host="", port=0)


class Tokenizer:
    special_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(token_ids)

    def bytes_of(self, token_id: int) -> bytes:
        return b"x"

    def text_of(self, token_id: int) -> str | None:
        return "x"


class TenBlocks(Engine):
    """An engine with ten blocks of four tokens that computes nothing."""

    def __init__(self) -> None:
        self.pool = BlockPool(11, 4)
        self.resumed: list[RequestBlocks] = []
        unused: Any = None
        budget = Budget(max_num_tokens=64, max_num_seqs=64)
        super().__init__(self.pool, unused, budget, Outbox(), eos_token_ids=frozenset())
        self.queues.features = unused

    def resume(self, sequence: Prompt, blocks: RequestBlocks, tokens: Any) -> None:
        self.resumed.append(blocks)


class Memory:
    """A byte for each block."""

    layout, region = LAYOUT, REGION
    num_blocks = 11
    staged_cells = None

    def __init__(self) -> None:
        self.landed: list[int] = []
        self.buffer = memoryview(bytearray(11))

    @contextmanager
    def land(self, layers: range, parts: Sequence[Sequence[int]]) -> Iterator[list[list[tuple[int, int]]]]:
        assert threading.current_thread() is not threading.main_thread(), "never on the event loop"
        yield [[(block, 1) for block in part] for part in parts]
        for part in parts:
            self.landed += part

    def nbytes(self, num_layers: int, num_blocks: int) -> int:
        return num_layers * num_blocks


def decode_service(
    engine: Any, *, memory: Any = None, transport: Any = None, queue_timeout_s: float = 60
) -> Decoder:
    tokenizer: Any = Tokenizer()
    return Decoder(
        engine=engine,
        memory=memory or Memory(),
        tokenizer=tokenizer,
        transport=transport,
        compiler=None,
        telemetry=InstanceTelemetry("d0"),
        queue_timeout_s=queue_timeout_s,
    )


class Peers:
    """An instance that answers as it is told, by path."""

    def __init__(self, **answers: bytes | ServeError | Callable[[], Awaitable[bytes]]) -> None:
        self.answers = {f"/kv/{name}": answer for name, answer in answers.items()}
        self.calls: list[str] = []

    async def call(self, url: str, path: str, message: wire.Message, timeout_s: float | None = None) -> bytes:
        self.calls.append(path)
        answer = self.answers.get(path, b"")
        if isinstance(answer, ServeError):
            raise answer
        return answer if isinstance(answer, bytes) else await answer()


class Sender:
    """Has nothing under way."""

    def connect(self, transfer: OutgoingTransfer) -> None: ...

    def fence(self, transfer: OutgoingTransfer, passed: Callable[[], None]) -> None:
        passed()


def prefill_service(
    peers: Any, *, engine: Any, prompts: Any, receiver: Any, clean_ups: CleanUps, telemetry: Any, lease_s: float
) -> Prefiller:
    """A prefill stage that sends nothing."""
    instance: Any = SimpleNamespace(
        peers=peers,
        telemetry=telemetry,
        refusals=Refusals("p0"),
        clean_ups=clean_ups,
        options=SimpleNamespace(peer_timeout_s=lease_s),
        processor=RequestProcessor(1, queue_timeout_s=60, spans=telemetry.spans),
    )
    weights: Any = SimpleNamespace(prompts=prompts, compiler=None, memory=Memory())
    sender: Any = Sender()
    return Prefiller(instance=instance, weights=weights, engine=engine, sender=sender, receiver=receiver)


def reserve(
    name: str = "r", num_prompt_tokens: int = 9, hashes: Sequence[bytes] = (), lease_s: float = 30
) -> wire.ReserveRequest:
    return wire.ReserveRequest(
        transfer_id=f"transfer {name}",
        request_id=name,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=3,
        num_sequences=1,
        block_hashes=list(hashes),
        layout=LAYOUT,
        lease_s=lease_s,
        region=REGION,
    )


def handoff(name: str = "r", num_prompt_tokens: int = 9) -> wire.Handoff:
    return wire.Handoff(
        transfer_id=f"transfer {name}",
        request_id=name,
        prompt_ids=[1] * num_prompt_tokens,
        position_delta=0,
        sampling=SamplingParams(seed=0),
        max_tokens=4,
        output=wire.OutputOptions(kind="chat", id=name, created=0, model="m"),
        first=[wire.FirstToken(token_id=1)],
    )
