"""One request's way under arbitrary faults and orders of events: it ends, closes what it opened, and no token is
repeated or lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st
from instance_info import instance_info
from msgspec.structs import replace

from epd_serve.errors import (
    DECODE_DRAINING,
    DRAINING,
    NO_ROOM,
    PEER_UNREACHABLE,
    PREPARATION_FULL,
    REQUEST_ENDED,
    Conflict,
    InstanceFailed,
    InstanceLost,
    InstanceUnreachable,
    InvalidRequest,
    Overloaded,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.flow import actions as do
from epd_serve.flow import events as on
from epd_serve.flow.request import Asked, Fleet, RequestFlow, State
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.routes import Demand, Router
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage

T = TypeVar("T")
P, D = Stage.PREFILL, Stage.DECODE
INSTANCES = {"e0": "E", "e1": "E", "p0": "P", "p1": "P", "d0": "D", "d1": "D", "a0": "EPD"}
NUM_TOKENS = 6
PLANNED = [Unavailable("it leaves", code=code) for code in (DRAINING, DECODE_DRAINING)]
FAILURES = [
    InstanceLost("gone"),
    InstanceUnreachable("not there"),
    InstanceFailed("broken"),
    InstanceFailed("cut off", code=PEER_UNREACHABLE),
    StageTimeout("late"),
    Unavailable("no room", code=NO_ROOM),
    Unavailable("ended", code=REQUEST_ENDED),
    Overloaded("too many", code=PREPARATION_FULL),
    Conflict("changing"),
    InvalidRequest("wrong"),
    *PLANNED,
]
#: Draws for the events of so many steps; nothing but the first of what may happen comes after them.
NUM_DRAWN = 60


class World:
    """Instances, connections and the client of one request; whatever may happen next is drawn.

    Attributes:
        got: tokens that the client has, by choice; each is its place in the answer.
    """

    def __init__(self, data: st.DataObject, *, num_items: int, num_choices: int, streams: bool) -> None:
        self.data = data
        self.num_steps = 0
        self.num_choices = num_choices
        self.streams = streams
        self.table = InstanceTable([(name, f"http://{name}") for name in INSTANCES])
        for name, role in INSTANCES.items():
            self.table.update(name, instance_info(name, role, splits_videos=True), contains=0)
        self.wait_s = self.pick(0.0, 10.0)
        self.fleet = Fleet(
            table=self.table,
            router=Router(),
            max_attempts=self.pick(1, 2, 3, 4),
            encode_timeout_s=15.0,
        )
        # the last two items are the same picture
        self.refs = [MediaRef(mm_hash=f"{min(n, 2)}", width=10, height=10) for n in range(num_items)]
        if num_items and self.pick(True, False):  # a video for which more than one encoder pays
            self.refs[0] = MediaRef("0", 900, 900, "video", num_frames=self.pick(400, 5), fps=2.0)
        self.unsent: set[str] = set()
        self.got: list[list[int]] = [[] for _ in range(num_choices)]
        self.is_known = True
        self.complete = False
        self.now_s = 100.0
        self.expects = self.pick(True, False)
        self.calls: dict[Stage, str] = {}  # open ones: "sent", "answered", "refused"
        self.fresh: dict[Stage, int] = {}  # tokens that an answer begins behind
        self.encodes: set[int] = set()
        self.forwarding: Stage | None = None
        self.follows = False
        self.step: do.Action | None = None
        self.listens = False
        self.end: do.Action | None = None
        self.is_given_up = False
        self.failed_s = self.now_s
        self.num_tries = self.num_free = 0
        asked = Asked(
            id="r",
            model="m",
            demand=Demand(num_sequences=num_choices),
            has_media=bool(self.refs),
            num_choices=num_choices,
            splits=num_choices > 1,
        )
        self.flow = RequestFlow(self.fleet, asked, self)

    # what the flow asks of the answer

    @property
    def begun(self) -> bool:
        return self.streams and any(self.got)

    def tokens_of_each(self) -> list[list[int]] | None:
        return [list(tokens) for tokens in self.got] if self.streams and self.is_known else None

    # what the flow asks for

    def tell(self, event: on.Event) -> None:
        over = self.flow.state is State.OVER
        actions = self.flow.tell(event)
        assert not (over and actions), f"{event} has come too late"
        for action in actions:
            assert self.end is None, "nothing comes behind the end"
            self._do(action)
        assert not self.unsent, "each item, and each segment of a video, is encoded"

    def _do(self, action: do.Action) -> None:
        match action:
            case do.CallPrefill(request_id, route, refs, generated):
                assert not self.calls and not self.encodes, "one try at a time"
                assert generated == (self.got[0] if self.begun else []), "it goes on behind what the client has"
                assert self.begun is False or self.num_choices == 1
                assert [replace(ref, num_segments=1) for ref in refs] == self.refs
                self.unsent = {part.mm_hash for ref in refs for part in ref.segments}
                self.items = dict(enumerate(_places(refs)))
                self.num_tries += 1
                self._send(len(generated), request_id, fused=route.fused)
            case do.Encode(item):
                assert P in self.calls and item not in self.encodes
                assert action.place == self.items[item] and (action.again or action.ref.mm_hash in self.unsent)
                self.unsent.discard(action.ref.mm_hash)
                self.encodes.add(item)
            case do.CancelEncode(item):
                self.encodes.remove(item)
            case do.Release():
                del self.calls[D]
            case do.EndTry():
                self.unsent.clear()
                self._close_all()
            case do.Forward(stage):
                assert self.calls[stage] == "answered" and self.forwarding is None
                self.forwarding = stage
                self.is_known = self.is_known and self.pick(*range(10)) < 9
            case do.Listen():
                assert self.calls[D] == "sent"
                self.listens = True
            case do.Wait(until_s):
                if until_s is not None:
                    latest_s = self.failed_s + self.wait_s
                    assert self.now_s < until_s <= latest_s, "it waits no longer than it may"
                self.step = action
                if until_s is None:
                    self.failed_s = self.now_s
            case do.Name():
                self.step = action
            case do.ReportLost(name) | do.ReportLeaving(name):
                self.table.mark_lost(name)
            case do.Done() | do.Fail() | do.SplitUp():
                assert not self.is_given_up
                self.end = action
                if isinstance(action, do.Done):
                    self._close_all()

    def _send(self, num_generated: int, request_id: str, *, fused: bool) -> None:
        self.calls, self.fresh = {P: "sent"} if fused else {P: "sent", D: "sent"}, {P: num_generated}
        self.fused, self.request_id = fused, request_id

    def _close_all(self) -> None:
        self.calls.clear()
        self.encodes.clear()
        self.forwarding = None
        self.listens = False

    # what may happen

    def pick(self, *options: T) -> T:
        return options[0] if self.num_steps > NUM_DRAWN else self.data.draw(st.sampled_from(options))

    def happen(self) -> None:
        """One of the things that may happen now, the regular ones first."""
        self.num_steps += 1
        may: list[Callable[[], None]] = []
        if isinstance(self.step, do.Wait):
            may += [self._look] * 4
        elif isinstance(self.step, do.Name):
            may += [self._named] * 4
        if self.forwarding is not None:
            may += [self._forward] * 4
        may += [partial(self._encoded, item) for item in sorted(self.encodes)]
        may += [partial(self._answer, stage) for stage, how in self.calls.items() if how == "sent"]
        if self.listens:
            may.append(self._fall_silent)
        self.pick(*may, self._change_table)()

    def _failure(self) -> ServeError:
        failure = self.pick(*FAILURES)
        self._count(failure)
        return failure

    def _count(self, failure: ServeError) -> None:
        self.num_free += failure in PLANNED

    def _change_table(self) -> None:
        name = self.pick(*INSTANCES)
        what = self.pick("nothing", "back", "down", "lost", "lost call", "given up")
        if what == "lost":
            self.table.mark_lost(name)
        elif what == "back":
            info = instance_info(name, INSTANCES[name], pid=self.pick(1, 2), splits_videos=True)
            self.table.update(name, info, contains=self.table.num_calls)
        elif what == "down":
            self.table.mark_down(name)
        elif what == "lost call":
            self.tell(on.Lost(name))
        elif what == "given up" and self.pick(*range(8)) == 7:
            self.is_given_up = True
            self.tell(on.Abandoned())

    def _look(self) -> None:
        assert isinstance(self.step, do.Wait)
        if self.step.until_s is not None:
            self.now_s += self.pick(1.0, 0.05, 4.0)
        self.step = None
        self.tell(on.Look(self.now_s, self.wait_s, 100.0 if self.expects else None))

    def _named(self) -> None:
        self.step = None
        self.tell(on.Named(self.refs, ["param"] * len(self.refs)))

    def _answer(self, stage: Stage) -> None:
        if self.pick(True, False):
            self.calls[stage] = "answered"
            # P of a pair may answer all by itself; a single instance may say nonsense
            follows = stage is P and (self.pick(*range(6)) < 5) is not self.fused
            if stage is P:
                self.follows = follows
            self.tell(on.Opened(stage, follows))
        else:
            self.calls[stage] = "refused"
            self.tell(on.Refused(stage, self._failure()))

    def _encoded(self, item: int) -> None:
        kind = self.pick("encoded", "late", "failed")
        self.encodes.remove(item)
        before = self.flow.state
        if kind == "encoded":
            self.tell(on.Encoded(item))
        elif kind == "late":
            self.tell(on.EncodeLate(item))
        else:
            self.tell(on.EncodeFailed(item, self._failure()))
        assert before is self.flow.state or before is State.SENT, "P has answered: it needs no feature any more"

    def _forward(self) -> None:
        """Some tokens of what is left come, then the end or a failure, or nothing yet."""
        stage = self.forwarding
        assert stage is not None
        is_last = stage is D or not self.follows
        if self.streams:
            self._tokens(first_only=not is_last)
        kind = self.pick("end", "early end", "lost", "said", "unreadable", "nothing", "lost behind the end")
        if is_last and kind in ("end", "lost behind the end"):
            if self.streams:
                for tokens in self.got:
                    tokens += range(len(tokens), NUM_TOKENS)
            self.complete = self.streams or kind == "end"
        if kind in ("end", "early end"):
            self.forwarding = None
            self.tell(on.Ended(stage))
        elif kind != "nothing":
            self.forwarding = None
            said = kind in ("said", "unreadable")
            failure = self._failure() if said else InstanceLost("broke off")
            self.tell(on.Broke(stage, failure, kind if said else "lost"))

    def _tokens(self, *, first_only: bool) -> None:
        for tokens in self.got:
            left = NUM_TOKENS - len(tokens)
            most = min(left, 1) if first_only else left
            tokens += range(len(tokens), len(tokens) + self.pick(*range(most + 1)))

    def _fall_silent(self) -> None:
        self.listens = False
        self.tell(on.Silent())


def _places(refs: list[MediaRef]) -> list[int]:
    """The place of each segment's medium, for all segments in their order."""
    return [place for place, ref in enumerate(refs) for _ in ref.segments]


@settings(max_examples=150)
@given(data=st.data(), num_items=st.integers(0, 4), num_choices=st.integers(1, 2), streams=st.booleans())
def test_every_request_comes_to_one_end(
    data: st.DataObject, num_items: int, num_choices: int, streams: bool
) -> None:
    world = World(data, num_items=num_items, num_choices=num_choices, streams=streams)
    world.step = do.Wait()
    while world.flow.state is not State.OVER:
        world.happen()
        assert world.num_steps < 1000
    assert not world.calls and not world.encodes, "all that was opened is closed"
    assert (world.end is None) is world.is_given_up
    assert world.num_tries <= world.fleet.max_attempts + world.num_free
    for event in (on.Look(1e9), on.Opened(P), on.Ended(D), on.Refused(D, InstanceLost("late")), on.Lost("p0")):
        assert not world.flow.tell(event)
    if isinstance(world.end, do.Done):
        assert world.complete
    elif isinstance(world.end, do.SplitUp):
        assert world.end.tokens == world.got and world.begun and not world.complete
    elif isinstance(world.end, do.Fail):
        assert not world.complete
    for tokens in world.got:
        assert tokens == list(range(len(tokens)))
