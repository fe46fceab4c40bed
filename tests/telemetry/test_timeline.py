"""Stages follow one another without gaps, in whatever order engine and event loop tell of them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from epd_serve.telemetry.span import DECODE_QUEUE, FEATURE_WAIT, PREFILL_QUEUE, STAGES, Span, Timeline


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.timeline = Timeline(lambda: self.now, self.spans.append)

    def at(self, now: float) -> Timeline:
        self.now = now
        return self.timeline

    @property
    def stages(self) -> list[tuple[str, float, float]]:
        return [(span.name, span.start_s, span.end_s) for span in self.spans]


def test_a_prompt_that_waits_for_its_image_and_is_handed_over() -> None:
    bench = Bench()
    bench.at(1).record_arrival("r", FEATURE_WAIT, hand_off=True)
    bench.timeline.record_step([("r", False)], [], 2, 3)  # text before the image: hidden behind the encoding
    bench.at(4).record_features("r")
    bench.timeline.record_step([("r", False)], [], 5, 6)
    bench.timeline.record_step([("r", True)], [], 6, 7)
    bench.at(9).record_hand_over("r")
    assert bench.stages == [
        ("feature_wait", 1, 4),
        ("prefill_queue", 4, 5),
        ("prefill_execute", 5, 7),
        ("pd_migration", 7, 9),
    ]
    assert bench.timeline.num_requests == 0


def test_encodes() -> None:
    bench = Bench()
    for name, received_s, batch_s in (("new", 1, (2, 5)), ("joined", 3, (2, 5)), ("hit", 8, (8.5, 8.5))):
        bench.timeline.record_encode(name, "i", received_s, batch_s)
        bench.at(9).record_fetch(name, "i", batch_s[1])
    assert bench.stages == [
        ("encode_queue", 1, 2),
        ("encode_execute", 2, 5),
        ("ep_migration", 5, 9),
        ("encode_queue", 3, 3),
        ("encode_execute", 3, 5),
        ("ep_migration", 5, 9),
        ("encode_queue", 8, 8.5),
        ("ep_migration", 8.5, 9),
    ]
    assert {span.attributes["item"] for span in bench.spans} == {"i"}


_NAMES = st.sampled_from(["a", "b"])
_EVENTS = st.one_of(
    st.tuples(st.just("prefill_received"), _NAMES, st.booleans(), st.booleans()),
    st.tuples(
        st.sampled_from(["record_features", "record_hand_over", "decode_received", "record_end", "drop"]), _NAMES
    ),
    st.tuples(st.just("stepped"), st.lists(st.tuples(_NAMES, st.booleans())), st.lists(_NAMES)),
)


@given(st.lists(_EVENTS, max_size=30))
def test_any_order_of_events_leaves_spans_in_order_and_nothing_behind(events: list[tuple[object, ...]]) -> None:
    bench = Bench()
    timeline = bench.timeline
    for now, (event, *arguments) in enumerate(events):
        bench.now = float(now)
        if event == "prefill_received":
            name, hand_off, lacks = arguments
            stage = FEATURE_WAIT if lacks else PREFILL_QUEUE
            timeline.record_arrival(str(name), stage, hand_off=bool(hand_off))
        elif event == "decode_received":
            timeline.record_arrival(str(arguments[0]), DECODE_QUEUE)
        elif event == "stepped":
            prefills, decodes = arguments
            timeline.record_step(prefills, decodes, now - 0.5, now)  # type: ignore[arg-type]
        else:
            getattr(timeline, str(event))(arguments[0])
    for name in ("a", "b"):
        timeline.drop(name)
    assert timeline.num_requests == timeline._num_queued == 0
    assert all(span.start_s <= span.end_s and span.name in (*STAGES, FEATURE_WAIT) for span in bench.spans)
    for name in ("a", "b"):
        own = [span for span in bench.spans if span.request_id == name]
        assert all(one.end_s <= next_.start_s for one, next_ in pairwise(own))
