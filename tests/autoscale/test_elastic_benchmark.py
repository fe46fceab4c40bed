"""The figures of the benchmark of role switches on emulated devices."""

from __future__ import annotations

from benchmarks.elastic.emulated import PHASES, ChangingMix, figures, num_wrong
from epd_serve.bench.types import Record


def test_a_changing_mix_counts_answers_that_differ_and_requests_without_one() -> None:
    mix = ChangingMix(3.0, seed=1)
    assert list(dict.fromkeys(phase for _, phase in mix.arrivals)) == list(PHASES)
    assert [item.max_tokens for item in mix.items(1)] == [phase.num_output_tokens for _, phase in mix.arrivals]

    def answered(text: str) -> list[Record]:
        return [
            Record(
                index=index,
                workload="",
                modality="",
                scheduled_s=0.0,
                first_token_s=0.1,
                finish_s=0.2,
                num_output_tokens=phase.num_output_tokens,
                text=text if index == 2 else "same",
            )
            for index, (_, phase) in enumerate(mix.arrivals)
        ]

    assert num_wrong(mix, answered("same"), answered("same")) == 0
    assert num_wrong(mix, answered("same"), answered("other")) == 1
    found = figures(answered("same")[1:], mix, 3.0)
    assert found["lost"] == 1 and found["goodput"] == (len(mix.arrivals) - 1) / 3.0
