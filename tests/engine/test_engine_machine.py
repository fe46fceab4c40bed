"""The engine over a pool that is always too small, as a state machine: no token is lost, repeated or another one.

Model and cache are replaced by bookkeeping: a block remembers which token was computed into each of its places, a
step finds all tokens before its own there or fails, and the next token is a function of all tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

from engine_cells import BLOCK_SIZE, Cells, Runner, contents, next_token, stream_of_a_cpu
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epd_serve.cache.block_pool import BlockPool, RequestBlocks, hash_blocks
from epd_serve.engine.engine import BlockRequest, Engine, EngineEvent, FailureEvent, PromptEvent, TokenEvent
from epd_serve.engine.step_loop import StepLoop
from epd_serve.errors import InvalidRequest
from epd_serve.sched.schedule import Budget, ScheduleOutput
from epd_serve.sched.sequence import Sequence, SequenceState
from epd_serve.types import MediaSpan, SamplingParams

EOS = 0
IMAGE = 50


def _priority(name: str) -> int:
    """Requests of three priorities."""
    return int(name[1:]) % 3


@dataclass
class Request:
    """A request as its client sees it."""

    prompt: list[int]
    max_tokens: int
    num_sequences: int
    image: str | None
    hand_off: bool = False
    root: Sequence | None = None
    asked: BlockRequest | None = None
    tokens: list[list[int]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    over: bool = False

    @property
    def reserved(self) -> RequestBlocks | None:
        return self.asked.granted.result() if self.asked is not None and self.asked.granted.done() else None

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        """Two runs of the image's tokens, with another token between them."""
        return (MediaSpan(0, 2, self.image), MediaSpan(3, 1, self.image, 2)) if self.image else ()

    def alone(self, index: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.max_tokens and tokens[-1:] != [EOS]:
            tokens.append(next_token(self.prompt + tokens, index))
        return tokens


PROMPTS = st.integers(1, 12).flatmap(lambda n: st.lists(st.integers(1, 2), min_size=n, max_size=n))


SUBMISSIONS = st.tuples(
    PROMPTS,
    st.sampled_from([1, 6, 9, 12, 16]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([None, None, "a", "b"]),
    st.sampled_from([False, False, False, True]),
)


class EngineMachine(RuleBasedStateMachine):
    runs_ahead = False
    state_blocks = 0
    may_hold = frozenset({SequenceState.TRANSFERRING})

    def __init__(self) -> None:
        super().__init__()
        num_blocks = 13 + 3 * self.state_blocks
        self.cells = Cells(num_blocks)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, state_blocks=self.state_blocks)
        self.requests: dict[str, Request] = {}
        self.spans: dict[str, AbstractSequence[MediaSpan]] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.features: dict[str, Any] = {}
        self.num_preemptions = 0
        self.clock = itertools.count()
        own: Any = self
        self.engine = Engine(
            self.pool,
            self.cells,
            Budget(max_num_tokens=9, max_num_seqs=6),
            own,
            eos_token_ids=frozenset({EOS}),
            clock=lambda: float(next(self.clock)),
        )
        runner: Any = Runner(self.cells, self.spans)
        self.loop = StepLoop(self.engine, runner, own, stream_of_a_cpu(), own, runs_ahead=self.runs_ahead)

    # ------------------------------------------------------------------ for the engine

    def has(self, mm_hash: str) -> bool:
        return mm_hash in self.features

    def starved(self, mm_hash: str) -> None: ...

    def use(self, mm_hash: str) -> Any:
        return self.features.get(mm_hash)

    def add_step(self, output: ScheduleOutput, seconds: float) -> None:
        self.num_preemptions += len(output.preempted)

    def emit(self, events: list[EngineEvent]) -> None:
        for told in events:
            request_id = told.request_id if isinstance(told, FailureEvent) else told.sequence.request_id
            request = self.requests[request_id]
            assert not request.over, "an event after the end"
            if isinstance(told, FailureEvent):
                assert "no room for it" in told.error.message
                request.over = True
            elif isinstance(told, PromptEvent):
                request.tokens = [[token.token_id] for token, _ in told.tokens]
            else:
                self.take_token(request, told)
            self.forget_feature(request)

    def take_token(self, request: Request, told: TokenEvent) -> None:
        index = told.sequence.index
        self.sequences[told.sequence.request_id, index] = told.sequence
        assert index not in request.finished | request.stopped
        request.tokens[index].append(told.token.token_id)
        assert request.tokens[index] == request.alone(index)[: len(request.tokens[index])]
        if told.finish_reason is not None:
            request.finished.add(index)
            assert request.tokens[index] == request.alone(index)

    def forget_feature(self, request: Request) -> None:
        """Held until the first token, by each request that needs it."""
        if not any(r.image == request.image and not r.over and not any(r.tokens) for r in self.requests.values()):
            self.features.pop(request.image or "", None)

    def live(self) -> list[str]:
        return [
            name
            for name, request in self.requests.items()
            if not request.over and len(request.finished | request.stopped) < request.num_sequences
        ]

    # ------------------------------------------------------------------ prompts computed here

    @rule(burst=st.lists(SUBMISSIONS, min_size=1, max_size=5), encode=st.booleans())
    def submit(self, burst: list[tuple[list[int], int, int, str | None, bool]], encode: bool) -> None:
        for submission in burst:
            self.submit_one(*submission)
        if encode:
            self.encode("a")
            self.encode("b")

    def submit_one(self, prompt: list[int], max_tokens: int, n: int, image: str | None, hand_off: bool) -> None:
        name = f"r{len(self.requests)}"
        request = Request([IMAGE, IMAGE, 1, IMAGE] * (image is not None) + prompt, max_tokens, n, image, hand_off)
        try:
            self.engine.check_fits(len(request.prompt), 0 if hand_off else max_tokens, 1 if hand_off else n)
        except InvalidRequest:
            return
        request.tokens = [[] for _ in range(n)]
        request.root = self.sequence(name, request, prompt_is_here=True)
        self.requests[name] = request
        self.engine.submit(request.root)

    def sequence(self, name: str, request: Request, *, prompt_is_here: bool) -> Sequence:
        self.spans[name] = request.spans
        return Sequence(
            request_id=name,
            prompt_ids=request.prompt,
            sampling=SamplingParams(seed=0, n=request.num_sequences, priority=_priority(name)),
            max_tokens=request.max_tokens,
            positions=range(len(request.prompt)) if prompt_is_here else None,
            spans=request.spans if prompt_is_here else (),
            block_hashes=hash_blocks(request.prompt, BLOCK_SIZE, request.spans),
            num_sequences=request.num_sequences,
            hand_off=request.hand_off,
        )

    @rule(image=st.sampled_from(["a", "b"]))
    def encode(self, image: str) -> None:
        if any(r.image == image and not r.over and not any(r.tokens) for r in self.requests.values()):
            self.features[image] = object()
            self.engine.wake()

    # ------------------------------------------------------------------ prompts computed elsewhere

    @precondition(lambda self: len(self.asking()) < 3)
    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(2, 16),
        n=st.integers(1, 3),
        image=st.sampled_from([None, "a"]),
    )
    def ask_for_blocks(self, prompt: list[int], max_tokens: int, n: int, image: str | None) -> None:
        name = f"r{len(self.requests)}"
        request = Request([IMAGE, IMAGE, 1, IMAGE] * (image is not None) + prompt, max_tokens, n, image)
        request.tokens = [request.alone(index)[:1] for index in range(n)]
        if all(request.alone(index) == request.tokens[index] for index in range(n)):
            return
        try:
            self.engine.check_fits(len(request.prompt), max_tokens, n)
        except InvalidRequest:
            return
        self.requests[name] = request
        request.root = self.sequence(name, request, prompt_is_here=False)
        request.asked = self.engine.reserve(
            name, len(request.prompt), request.num_sequences, request.root.block_hashes, _priority(name)
        )

    def roots(self) -> list[Sequence]:
        return [r.root for r in self.requests.values() if r.root is not None]

    def asking(self) -> list[str]:
        """Those that wait for blocks."""
        return [name for name, one in self.requests.items() if one.asked and not one.asked.granted.done()]

    def reserved(self) -> list[str]:
        return [name for name, request in self.requests.items() if request.reserved is not None]

    @precondition(lambda self: self.reserved())
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        self.take_over(data.draw(st.sampled_from(self.reserved())))

    def take_over(self, name: str) -> None:
        request = self.requests[name]
        assert request.root is not None and request.reserved is not None
        known = contents(request.prompt, request.spans)
        for position in range(request.reserved.num_cached * BLOCK_SIZE, len(known)):
            self.cells.write(request.reserved.root, position, known[position])
        self.cells.check(request.reserved.root, known)
        for state in request.reserved.states[:1]:
            self.cells.advance(state, known, 0, len(known))
        tokens = [(ids[0], ids == request.alone(i)) for i, ids in enumerate(request.tokens)]
        request.finished = {index for index, (_, last) in enumerate(tokens) if last}
        self.engine.resume(request.root, request.reserved, tokens)
        request.asked = None

    # ------------------------------------------------------------------ ends

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.live())))

    def end(self, name: str) -> None:
        request = self.requests[name]
        request.over = True
        if request.reserved is not None:
            self.engine.unreserve(request.reserved)
        asked, request.asked = request.asked, None
        self.engine.abort(name)
        assert asked is None or asked.granted.done(), "whoever waits for its blocks hears it"
        self.forget_feature(request)

    @precondition(lambda self: any(name in self.live() for name, _ in self.sequences))
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        name, index = data.draw(st.sampled_from([key for key in self.sequences if key[0] in self.live()]))
        if index not in self.requests[name].finished:
            self.requests[name].stopped.add(index)
            self.engine.stop_sequence(self.sequences[name, index])

    def confirm_transfers(self) -> None:
        for request in self.requests.values():
            if request.root is not None and request.root.state is SequenceState.TRANSFERRING:
                assert request.tokens == [request.alone(i)[:1] for i in range(request.num_sequences)]
                self.engine.transferred(request.root)
                request.over = True

    @rule()
    def transferred(self) -> None:
        self.confirm_transfers()

    @rule()
    def break_host_memory(self) -> None:
        self.cells.broken = True

    # ------------------------------------------------------------------ steps

    @rule(count=st.sampled_from([1, 2, 5, 20]))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()
            self.engine.check_integrity()

    @invariant()
    def books_balance(self) -> None:
        self.engine.check_integrity()
        load = self.engine.load()
        assert (
            load.num_running
            or load.num_waiting
            or not any(s.blocks for s in self.roots() if s.state not in self.may_hold)
        )

    def teardown(self) -> None:
        self.cells.broken = False
        for _ in range(4000):
            for image in ("a", "b"):
                self.encode(image)
            for name in self.reserved():
                self.take_over(name)
            self.loop.step()
            self.confirm_transfers()
            self.books_balance()
            if not self.live():
                break
        assert not self.live(), "somebody waits for ever"
        while self.loop.step():  # what was given up may still be computed
            pass
        assert not self.asking()
        assert self.pool.num_free == self.pool.capacity, "blocks leaked"
        event(f"preempted: {min(self.num_preemptions, 5)}")


class AheadMachine(EngineMachine):
    """Each step is launched before the tokens of the one before are known."""

    runs_ahead = True
    may_hold = frozenset({SequenceState.TRANSFERRING, SequenceState.ABORTED})  # a launched step may use its blocks


class StatesMachine(AheadMachine):
    """Each sequence has a recurrent state, which must be that of its tokens."""

    state_blocks = 2

    @invariant()
    def free_blocks_hold_no_state(self) -> None:
        for block, content in enumerate(self.cells.blocks):
            assert not isinstance(content[1], list) or self.pool.num_owned([block]), (
                "what is no K and no V is left"
            )


SETTINGS = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEngine = EngineMachine.TestCase
TestEngine.settings = SETTINGS
TestAhead = AheadMachine.TestCase
TestAhead.settings = SETTINGS
TestStates = StatesMachine.TestCase
TestStates.settings = settings(SETTINGS, max_examples=30)


def test_a_lost_sequence_in_flight_keeps_its_blocks_from_the_others_for_a_step() -> None:
    machine = AheadMachine()
    machine.break_host_memory()
    machine.ask_for_blocks(prompt=[1], max_tokens=5, n=3, image=None)
    machine.ask_for_blocks(prompt=[1] * 7, max_tokens=4, n=1, image=None)
    machine.take_over("r0")
    machine.take_over("r1")
    machine.steps(count=20)
    assert machine.requests["r1"].over and machine.requests["r0"].finished == {0, 1, 2}
    assert machine.pool.num_free == machine.pool.capacity
