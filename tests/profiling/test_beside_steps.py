"""The cost of a decode step besides the model, from requests that came together."""

import msgspec
import pytest

from epd_serve.bench.types import Record
from epd_serve.cost.profile import Line, Profile
from epd_serve.profiling.overheads import beside_steps

PROFILE = Profile(
    kind="measured",
    device="cpu",
    model="m",
    step=(Line(base_s=0.004, token_s=0.0002, sequence_s=0.0001),),
    encode=(),
)


def answers(gap_s: float) -> list[Record]:
    """One, whose sixth token waited for somebody else's prompt."""
    times = [1.0 + gap_s * i + (0.1 if i > 4 else 0.0) for i in range(11)]
    return [
        Record(
            index=0,
            workload="",
            modality="text",
            scheduled_s=0.0,
            sent_s=0.5,
            first_token_s=1.0,
            token_times_s=times,
            finish_s=times[-1],
            num_prompt_tokens=10,
            num_output_tokens=11,
        )
    ]


def measured(loop_s: float, stream_s: float) -> list[tuple[int, list[Record]]]:
    return [(n, answers(PROFILE.step_s(n, n) + loop_s + stream_s * n)) for n in (1, 8, 16)]


def test_steps_and_their_sequences_are_told_apart() -> None:
    assert beside_steps(measured(0.0005, 0.0002), PROFILE) == pytest.approx((0.0005, 0.0002))


def test_a_step_alone_that_is_shorter_than_the_model_leaves_what_sequences_take() -> None:
    loop_s, stream_s = beside_steps(measured(-0.0005, 0.0002), PROFILE)
    assert loop_s == 0
    assert 0.0001 < stream_s < 0.0002
    slow = msgspec.structs.replace(PROFILE, step=(Line(base_s=0.1),))
    assert beside_steps(measured(0.0, 0.0), slow) == (0, 0), "less than none is none"
