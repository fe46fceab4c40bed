"""HeteroServe's section 6.5: tokens a second with and without work stealing, in the simulator.

    python -m benchmarks.work_stealing

Two RTX 4090 encode, two A100 prefill and decode LLaVA-1.5-7B; one image, 40 words of prompt and 128 of answer in
each request (section 6.1). The paper: 2,793 tokens/s without stealing, 3,156 with it, 1.13 times as many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from benchmarks.common import RESULTS, write
from device.datasheets import spec_of
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.flow.stealing import DEFAULT_RULE, StealRule
from epd_serve.sim.simulator import build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology

RESULT = RESULTS / "work-stealing.json"
PAPER = {"tokens_per_s": (2793, 3156), "ratio": 1.13}
SHAPE = shape_of("llava-1.5-7b")
NUM_TEXT_TOKENS, NUM_OUTPUT_TOKENS = 40, 128
#: Section 6.4, Table 6: seconds of a batch of 128 requests.
ENCODE_S, TRANSFER_S, PREFILL_S, DECODE_S, BATCH = 6.82, 0.45, 1.24, 9.35, 128
#: Section 5.3.4: seconds in language mode, and tokens of each sequence in them.
EPISODE_S, EPISODE_TOKENS = 0.1, 7
NUM_REQUESTS = 2048
NEVER = replace(DEFAULT_RULE, threshold=1 << 30)


def data_sheet() -> dict[str, Profile]:
    return {name: analytic_profile(SHAPE, spec_of(name)) for name in ("rtx-4090", "a100")}


def paper() -> dict[str, Profile]:
    """The same with the paper's times wherever it has them; they add up, as they do in its Table 6.

    Table 6: encodes of the RTX 4090, both language stages of the A100, and the transfer just before the prefill
    (section 5.2). Section 5.3.4: in the 100 ms of an episode, which has half a batch of 8 sequences at most, the
    RTX 4090 makes about 7 tokens of each. What a decode step of another size takes against these is the data
    sheet's. Of prefills on the RTX 4090 the paper says nothing: the A100's, by the data sheets' arithmetic.
    """
    profiles = data_sheet()
    prompt = SHAPE.vision.tokens_per_image + NUM_TEXT_TOKENS  # type: ignore[union-attr, operator]
    context = prompt + NUM_OUTPUT_TOKENS / 2

    def slower(name: str, batch: int, step_s: float) -> Line:
        """Decode steps of ``batch`` sequences take ``step_s``."""
        compute, memory = profiles[name].step
        token_s = PREFILL_S / BATCH / prompt * compute.token_s / profiles["a100"].step[0].token_s
        token_s += TRANSFER_S / BATCH / prompt
        factor = (step_s - batch * token_s) / (memory.base_s + batch * context * memory.context_s)
        return Line(base_s=factor * memory.base_s, token_s=token_s, context_s=factor * memory.context_s)

    return {
        "rtx-4090": msgspec.structs.replace(
            profiles["rtx-4090"],
            kind="measured",
            step=(slower("rtx-4090", DEFAULT_RULE.half, EPISODE_S / EPISODE_TOKENS),),
            encode=(EncodeLine(image_s=ENCODE_S / BATCH),),
        ),
        "a100": msgspec.structs.replace(
            profiles["a100"], kind="measured", step=(slower("a100", BATCH, DECODE_S / NUM_OUTPUT_TOKENS),)
        ),
    }


def requests_of(num_requests: int) -> list[SimRequest]:
    return [
        SimRequest(
            at_s=0.0,
            images=((f"image {number}", 640 * 480),),
            num_text_tokens=NUM_TEXT_TOKENS,
            num_output_tokens=NUM_OUTPUT_TOKENS,
        )
        for number in range(num_requests)
    ]


def run(
    profiles: dict[str, Profile], rule: StealRule, *, batch: int, concurrency: int | None = None
) -> dict[str, Any]:
    """``batch``: of a language instance; ``concurrency``: of clients, None: all requests at once."""
    deployment = build(
        parse_topology("2EPD-2PD"),
        ["rtx-4090:0", "rtx-4090:1", "a100:0", "a100:1"],
        lambda device, width: profiles[device.split(":")[0]],
        batching=lambda role: Batching(policy="unlimited", max_num_seqs=16 if role.encodes else batch),
        steals=True,
    )
    requests = requests_of(NUM_REQUESTS)
    outcome = simulate(replace(deployment, steal=rule), requests, concurrency=concurrency)
    check_books(outcome)
    stealing = outcome.gateways[0].stealing
    assert stealing is not None and not any(job.failure for job in outcome.jobs)
    waits = [job.first_token_s - job.sent_s for job in outcome.jobs if job.first_token_s is not None]
    return {
        "tokens_per_s": sum(job.num_output for job in outcome.jobs) / outcome.seconds,
        "mean_ttft_s": sum(waits) / len(waits),
        "busy": outcome.busy,
        "num_taken": dict(stealing.num_taken),
        "switches": sum(sum(stealing.thieves[name].num_switches.values()) for name in stealing.num_taken),
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, profiles, batch in (("data sheets", data_sheet(), 64), ("times of Table 6", paper(), BATCH)):
        for concurrency in (None, 2 * batch + 64, 4 * batch, 8 * batch):
            without, stealing = (
                run(profiles, rule, batch=batch, concurrency=concurrency) for rule in (NEVER, DEFAULT_RULE)
            )
            ratio = stealing["tokens_per_s"] / without["tokens_per_s"]
            rows.append(
                {
                    "times": name,
                    "language_batch": batch,
                    "clients": concurrency,
                    "without": without,
                    "with": stealing,
                    "ratio": ratio,
                }
            )
            print(
                f"{name:17} {'at once' if concurrency is None else f'{concurrency} clients':12}"
                f" {without['tokens_per_s']:6.0f} {stealing['tokens_per_s']:6.0f} tokens/s, {ratio:.3f};"
                f" mean TTFT {without['mean_ttft_s']:.2f} s, {stealing['mean_ttft_s']:.2f} s;"
                f" taken {sum(stealing['num_taken'].values())} of {NUM_REQUESTS}",
                flush=True,
            )
    result = {"command": "python -m benchmarks.work_stealing", "paper": PAPER, "rows": rows}
    write(RESULT, result)


if __name__ == "__main__":
    main()
