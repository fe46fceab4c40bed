"""One request's way: its tries one after the other, each over P, D and the encoders of its items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec import field as struct_field

from epd_serve.errors import (
    PEER_UNREACHABLE,
    REQUEST_ENDED,
    InstanceFailed,
    InstanceLost,
    ServeError,
    StageTimeout,
    Unavailable,
)
from epd_serve.flow import actions as do
from epd_serve.flow import events as on
from epd_serve.flow.events import Progress
from epd_serve.flow.failures import ItemEncode, TryHistory, blamed, is_planned, leaver, may_help
from epd_serve.routing.encoders import in_segments
from epd_serve.routing.routes import Demand, Route, Router
from epd_serve.routing.table import InstanceTable
from epd_serve.types import Stage

_P, _D = Stage.PREFILL, Stage.DECODE
#: Attempts that ended because an instance left its role, and do not count.
_MAX_PLANNED = 50
#: How long D, when P has broken off, may take to say why.
_LAST_WORDS_S = 0.5


class State(StrEnum):
    """The thing for which a request waits."""

    ROUTING = "instances for its stages"
    NAMING = "names of its media items"
    SENT = "P's answer, which begins with the first token"
    FIRST = "the end of P's answer"
    BETWEEN = "D's answer"
    REST = "the end of D's answer"
    FAILING = "what D has to say on a failure of P"
    OVER = "nothing"


_S = State
#: Any state may be followed by OVER, and by ROUTING once the request was sent.
_NEXT: Mapping[State, frozenset[State]] = {
    _S.ROUTING: frozenset({_S.NAMING, _S.SENT, _S.OVER}),
    _S.NAMING: frozenset({_S.SENT, _S.OVER}),
    _S.SENT: frozenset({_S.NAMING, _S.SENT, _S.FIRST, _S.FAILING, _S.ROUTING, _S.OVER}),
    _S.FIRST: frozenset({_S.BETWEEN, _S.REST, _S.FAILING, _S.ROUTING, _S.OVER}),
    _S.BETWEEN: frozenset({_S.REST, _S.ROUTING, _S.OVER}),
    _S.REST: frozenset({_S.ROUTING, _S.OVER}),
    _S.FAILING: frozenset({_S.ROUTING, _S.OVER}),
    _S.OVER: frozenset(),
}
_UNSENT = (State.ROUTING, State.NAMING, State.OVER)


class Fleet(Struct, frozen=True, kw_only=True):
    """The instances as a request sees them, and how long it bears with them.

    Attributes:
        max_attempts: of a request, or of each of its choices, the first included.
        encode_timeout_s: how long an encoder has for an item; P waits for the feature for twice that.
    """

    table: InstanceTable
    router: Router
    max_attempts: int
    encode_timeout_s: float


class Asked(Struct, frozen=True, kw_only=True):
    """The properties of a request on which its way depends.

    Attributes:
        has_media: whether it has items that have to be named and encoded.
        named: their names under a fingerprint, where these are known already.
        num_choices: of its answer.
        splits: whether its choices can go on each by itself.
        generated: tokens that its client has already, of a single choice.
    """

    id: str
    model: str
    demand: Demand
    has_media: bool = False
    named: tuple[str, on.Named] | None = None
    num_choices: int = 1
    splits: bool = False
    generated: list[int] = []


class _Attempt(Struct, eq=False):
    """One try: its calls, and what has become of them.

    Attributes:
        suspects: instances to which the request should not be sent again.
        follows: the rest of P's answer comes from D.
        decode: whether D's answer has begun, or why it will not.
        explained: the failure of P that D may explain.
        encodes: those under way, by the items' numbers.
        is_expected: whether another instance than P is to expect it.
    """

    request_id: str
    suspects: set[str] = struct_field(default_factory=set)
    follows: bool = False
    decode: ServeError | bool = False
    explained: on.Refused | on.Broke | None = None
    encodes: dict[int, ItemEncode] = {}
    is_expected: bool = False


class RequestFlow:
    """Told of events by :meth:`tell`, which returns what is to be done.

    Attributes:
        state: what it waits for.
        route: that of the try under way.
    """

    __slots__ = (
        "_actions",
        "_attempt",
        "_generated",
        "_history",
        "_is_awaited",
        "_num_planned",
        "_number",
        "_until_s",
        "_waits_for",
        "_was_split",
        "asked",
        "fleet",
        "progress",
        "route",
        "state",
    )

    def __init__(self, fleet: Fleet, asked: Asked, progress: Progress, history: TryHistory | None = None) -> None:
        """``progress``: how far its answer has come; ``history``: the tries that were made together with its other
        choices, before each went on by itself."""
        self.fleet = fleet
        self.asked = asked
        self.progress = progress
        self.state = State.ROUTING
        self._was_split = history is not None
        self._history = history or TryHistory(fleet.table)
        self._generated = asked.generated
        self.route: Route
        self._attempt: _Attempt
        self._actions: list[do.Action] = []
        self._number = 0
        self._num_planned = 0
        self._waits_for: ServeError | None = None  # what is raised where no instance comes
        self._until_s = 0.0
        self._is_awaited = False

    def tell(self, event: on.Event) -> list[do.Action]:
        """The actions that follow from an event. One that comes too late has none."""
        actions = self._actions = []
        kind = type(event)
        if kind in _BEFORE or self.state not in _UNSENT:
            _EVENTS[kind](self, event)
        return actions

    def _on_abandoned(self, event: on.Abandoned) -> None:
        if self.state not in _UNSENT:
            self._end_try()
        self._enter(State.OVER)

    def _on_encoded(self, event: on.Encoded) -> None:
        self._attempt.encodes.pop(event.item, None)

    def _on_silent(self, event: on.Silent) -> None:
        if self.state is State.FAILING:
            self._unexplained()

    def _enter(self, state: State) -> None:
        assert state in _NEXT[self.state] or state is self.state, f"{self.state} -> {state}"
        self.state = state

    # ------------------------------------------------------------------ where it goes

    def _on_look(self, event: on.Look) -> None:
        if self.state is not State.ROUTING or (route := self._choose(event)) is None:
            return
        if self._number > 0:
            self._actions.append(do.Try("continued" if self._generated else "again"))
        self._begin_try(route)

    def _choose(self, event: on.Look) -> Route | None:
        """Instances that have not failed; None where it waits for them, or has ended."""
        fleet, model, demand, history = self.fleet, self.asked.model, self.asked.demand, self._history
        table, choose = fleet.table, fleet.router.routes.choose_route
        if self._waits_for is None:
            expected_s = 0.0
            if event.complete_at_s is not None:
                expected_s = event.complete_at_s + event.wait_s - event.now_s
            self._is_awaited = expected_s > 0
            if history.failure is None:
                try:
                    return choose(table, model, demand=demand)
                except Unavailable as failure:
                    self._waits_for, self._until_s = failure, event.now_s + expected_s
            else:
                self._waits_for, self._until_s = history.failure, event.now_s + event.wait_s
        avoided = history.avoided()
        for exclude in (avoided | history.lost, avoided):
            with suppress(Unavailable):
                route = choose(table, model, exclude=exclude, demand=demand)
                self._waits_for = None
                return route
        is_worth_waiting = _may_come(table, model, avoided, is_awaited=self._is_awaited)
        if is_worth_waiting and event.now_s < self._until_s:
            self._actions.append(do.Wait(self._until_s))
        else:
            why = self._waits_for
            assert why is not None
            if is_worth_waiting and why is history.failure and event.wait_s:
                why = why.with_more(f"nothing could take over within {event.wait_s:.3g} s")
            self._end_request(do.Fail(why))
        return None

    def _begin_try(self, route: Route) -> None:
        self._number += 1
        self.route = route
        self._attempt = _Attempt(f"{self.asked.id}-{self._number}")
        if not self.asked.has_media:
            self._send(_NO_MEDIA)
            return
        assert route.prefill.info is not None, "a ready instance has said what it is"
        fingerprint, named = route.prefill.info.media_fingerprint, self.asked.named
        if named is not None and named[0] == fingerprint:
            self._send(named[1])
        else:
            self._enter(State.NAMING)
            self._actions.append(do.Name(fingerprint))

    def _on_named(self, event: on.Named) -> None:
        if self.state is State.NAMING:
            self._send(event)

    def _send(self, media: on.Named) -> None:
        """Everything at once: nobody waits for encoders before calling P."""
        attempt, act, fleet = self._attempt, self._actions.append, self.fleet
        route, request_id, router = self.route, attempt.request_id, fleet.router
        refs = media.refs
        if any(ref.modality == "video" for ref in refs):
            refs = in_segments(fleet.table, route.prefill, refs)
        self._enter(State.SENT)
        attempt.is_expected = not route.fused
        act(do.CallPrefill(request_id, route, refs, self._generated, self._number > 1 or self._was_split))
        if not refs:
            return
        parts = [(place, part) for place, ref in enumerate(refs) for part in ref.segments]
        distinct = {part.mm_hash: item for item, (_, part) in enumerate(parts)}
        items = [parts[item][1] for item in distinct.values()]
        encoders = router.encoders.choose_encoders(fleet.table, route.prefill, items)
        for item, encoder in zip(distinct.values(), encoders, strict=True):
            place, part = parts[item]
            encode = ItemEncode(part, place, media.params[place], encoder, fleet.encode_timeout_s)
            self._encode(item, encode, again=False)

    # ------------------------------------------------------------------ P and D

    def _on_opened(self, event: on.Opened) -> None:
        attempt = self._attempt
        if event.stage is _D:
            attempt.decode = True
            if self.state is State.FAILING:
                self._unexplained()
            elif self.state is State.BETWEEN:
                self._enter(State.REST)
                self._actions.append(do.Forward(_D))
        elif self.state is State.SENT:
            self._enter(State.FIRST)
            attempt.follows = event.follows
            if attempt.is_expected and not event.follows:
                attempt.is_expected = False
                self._actions.append(do.Release())
            self._actions.append(do.Forward(_P))

    def _on_ended(self, event: on.Ended) -> None:
        """Take note that the forwarded answer has come to its end."""
        attempt, route = self._attempt, self.route
        if self.state is State.REST or (self.state is State.FIRST and not attempt.follows):
            if self.progress.complete:
                self._end_request(do.Done())
            else:
                name = (route.decode if self.state is State.REST else route.prefill).name
                attempt.suspects.add(name)
                self._fail_try(InstanceFailed(f"instance {name} ended its answer before it was complete"))
        elif self.state is State.FIRST and route.fused:
            name = route.prefill.name
            self._fail_try(InstanceFailed(f"instance {name} left the answer to a decode instance; it has none"))
        elif self.state is State.FIRST:
            self._actions.append(do.HandOver(route))
            self._enter(State.BETWEEN)
            if isinstance(attempt.decode, ServeError):
                self._call_failed(_D, attempt.decode)
            elif attempt.decode:
                self._enter(State.REST)
                self._actions.append(do.Forward(_D))

    def _on_refused(self, event: on.Refused) -> None:
        attempt, stage, failure = self._attempt, event.stage, event.failure
        if stage is _P:
            if self.state is not State.SENT:
                return
            if failure.code == REQUEST_ENDED and not self.route.fused and not attempt.decode:
                self._ask_decode(event)  # which says why
            else:
                self._call_failed(_P, failure)
        elif not attempt.is_expected:
            return
        elif self.state is State.FIRST:
            attempt.decode = failure  # it counts once P's answer is over
        elif self.state is State.FAILING:
            self._explain(failure)
        elif self.state is not State.REST:
            self._call_failed(_D, failure)

    def _on_broke(self, event: on.Broke) -> None:
        attempt, stage, failure = self._attempt, event.stage, event.failure
        if self.state is not (State.FIRST if stage is _P else State.REST):
            return
        if event.kind == "unreadable":
            self._fail_try(failure)
        elif event.kind == "said":
            self._fail_at(leaver(self.route, stage, failure), failure)
        elif stage is _P and attempt.is_expected and attempt.decode is not True:
            self._ask_decode(event)  # P is lost, or alive and its hand-over to D has failed
        else:
            self._call_failed(stage, failure)

    def _ask_decode(self, event: on.Refused | on.Broke) -> None:
        """Wait for what D has to say, which counts in place of P's failure."""
        self._attempt.explained = event
        self._enter(State.FAILING)
        if isinstance(self._attempt.decode, ServeError):
            self._explain(self._attempt.decode)
        else:
            self._actions.append(do.Listen(_LAST_WORDS_S))

    def _explain(self, failure: ServeError) -> None:
        """D has said why P has failed, unless the connection to P broke and D only waits for it."""
        was_refused = isinstance(self._attempt.explained, on.Refused)
        if was_refused or isinstance(failure, InstanceFailed) or is_planned(failure):
            self._call_failed(_D, failure)
        else:
            self._unexplained()

    def _unexplained(self) -> None:
        assert self._attempt.explained is not None
        self._call_failed(_P, self._attempt.explained.failure)

    def _call_failed(self, stage: Stage, failure: ServeError) -> None:
        """The call to P or D has failed."""
        if isinstance(failure, InstanceLost):
            self._report_lost((self.route.prefill if stage is _P else self.route.decode).name)
            self._fail_try(failure)
        else:
            self._fail_at(blamed(self.route, stage, failure), failure)

    def _report_lost(self, name: str) -> None:
        self._actions.append(do.ReportLost(name))
        self._attempt.suspects.add(name)

    def _fail_at(self, name: str, failure: ServeError) -> None:
        """A try has failed at an instance; where P and D do not reach each other, the next one takes another D."""
        self._attempt.suspects.add(self.route.decode.name if failure.code == PEER_UNREACHABLE else name)
        self._fail_try(failure)

    def _on_lost(self, event: on.Lost) -> None:
        attempt, route, name = self._attempt, self.route, event.name
        failure = InstanceLost(f"instance {name} has stopped answering")
        for item in [item for item, encode in attempt.encodes.items() if encode.encoder.name == name]:
            if item in attempt.encodes:  # else the try has failed
                self._actions.append(do.CancelEncode(item))
                self._on_encode_failed(on.EncodeFailed(item, failure))
        needed = {route.decode.name}
        if self.state is not State.REST:  # where P has nothing of it any more
            needed.add(route.prefill.name)
        if self.state not in _UNSENT and name in needed:
            attempt.suspects.add(name)
            self._fail_try(failure)

    # ------------------------------------------------------------------ encoders

    def _encode(self, item: int, encode: ItemEncode, *, again: bool) -> None:
        attempt, prefill = self._attempt, self.route.prefill
        attempt.encodes[item] = encode
        patience_s = None if encode.encoder is prefill else encode.patience_s
        self._actions.append(
            do.Encode(
                item, encode.ref, attempt.request_id, encode.encoder, prefill, patience_s, encode.place, again
            )
        )

    def _on_encode_late(self, event: on.EncodeLate) -> None:
        if (encode := self._attempt.encodes.get(event.item)) is not None:
            late = f"instance {encode.encoder.name} gave no answer in {encode.patience_s:g} s"
            encode.stalled()
            self._on_encode_failed(on.EncodeFailed(event.item, StageTimeout(late)))

    def _on_encode_failed(self, event: on.EncodeFailed) -> None:
        item, failure = event.item, event.failure
        encode = self._attempt.encodes.pop(item, None)
        if encode is None:
            return
        encoder, prefill = encode.encoder, self.route.prefill
        if isinstance(failure, InstanceLost):
            self._report_lost(encoder.name)
        try:
            encode.next_encoder(self.fleet.router, self.fleet.table, prefill, failure)
        except ServeError as nobody:
            if is_planned(nobody):  # P leaves its role; else it would encode the item itself
                self._attempt.suspects.add(prefill.name)
            if self.state is State.SENT:  # else P has answered, and needs no feature any more
                self._fail_try(nobody)
        else:
            self._encode(item, encode, again=True)

    # ------------------------------------------------------------------ the end of a try

    def _fail_try(self, failure: ServeError) -> None:
        """The try has failed: the next one, or the end."""
        attempt, history, progress = self._attempt, self._history, self.progress
        planned = is_planned(failure)
        self._end_try()
        if progress.complete:
            self._end_request(do.Done())
            return
        if not may_help(failure) or attempt.suspects.isdisjoint({self.route.prefill.name, self.route.decode.name}):
            self._end_request(do.Fail(failure))
            return
        self._num_planned += planned
        history.num_attempts += not planned or self._num_planned > _MAX_PLANNED
        history.failure = failure
        if planned:  # for as long as it says so itself
            self._actions += [do.ReportLeaving(name) for name in attempt.suspects]
        elif failure.code == PEER_UNREACHABLE or isinstance(failure, InstanceLost):
            history.lost |= attempt.suspects
        else:
            history.avoid(attempt.suspects)
        tokens, begun, is_one = progress.tokens_of_each(), progress.begun, self.asked.num_choices == 1
        if history.num_attempts >= self.fleet.max_attempts:
            self._end_request(do.Fail(failure))
        elif not begun or (tokens is not None and is_one):
            if tokens is not None and is_one:
                self._generated = tokens[0]
            self._enter(State.ROUTING)
            self._actions.append(do.Wait())
        elif tokens is not None and self.asked.splits:
            self._end_request(do.SplitUp(tokens, history))
        else:
            self._end_request(do.Fail(failure))

    def _end_request(self, last: do.End) -> None:
        self._enter(State.OVER)
        self._actions.append(last)

    def _end_try(self) -> None:
        self._attempt.encodes.clear()
        self._actions.append(do.EndTry())


_NO_MEDIA = on.Named([], [])
#: Events that come to a request before it is sent.
_BEFORE = frozenset({on.Look, on.Named, on.Abandoned})
_EVENTS: dict[type, Callable[[RequestFlow, Any], None]] = {
    on.Look: RequestFlow._on_look,
    on.Named: RequestFlow._on_named,
    on.Opened: RequestFlow._on_opened,
    on.Refused: RequestFlow._on_refused,
    on.Ended: RequestFlow._on_ended,
    on.Broke: RequestFlow._on_broke,
    on.Encoded: RequestFlow._on_encoded,
    on.EncodeFailed: RequestFlow._on_encode_failed,
    on.EncodeLate: RequestFlow._on_encode_late,
    on.Lost: RequestFlow._on_lost,
    on.Silent: RequestFlow._on_silent,
    on.Abandoned: RequestFlow._on_abandoned,
}


def _may_come(table: InstanceTable, model: str, avoided: Collection[str], *, is_awaited: bool) -> bool:
    """Return whether each stage has an instance, or may get one: it is not up, or left a while ago."""
    for stage in (_P, _D):
        known = [record for record in table if stage in record.stages]
        up = {record.name for record in table.ready(stage, model)}
        if not (up - set(avoided) or any(record.name not in up for record in known) or (is_awaited and not known)):
            return False
    return True
