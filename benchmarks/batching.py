"""Stage-level batching under a TPOT limit: time between tokens, and what the limit costs in throughput.

    python -m benchmarks.batching [--rounds 5]

Two deployments of one model, one thread each, take turns at the same load: many short chats that decode, and long
prompts that arrive among them. One has ``slo.tpot_ms`` set, the other no limit. Figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import argument_parser, machine, typed, write
from benchmarks.deployed import Timing, closed_loop, deployed
from benchmarks.models import make_model

PATH = "/v1/completions"
#: TPOT_max as a multiple of the time between tokens of chats alone.
TPOT_OF_DECODE_STEP = 3.0
#: Requests of a turn, clients that send them, tokens of a prompt and of the longest answer.
CHAT, DOCUMENT = (96, 12, 64, 96), (10, 2, 1600, 32)
MODEL = {"hidden": 384, "layers": 8, "heads": 12, "kv_heads": 4, "intermediate": 1152}
_INSTANCES = {"max_num_seqs": 32, "kv_cache_bytes": "1GiB"}


async def ask(url: str, seed: int, kind: tuple[int, int, int, int], share: float = 1.0) -> list[Timing]:
    count, clients, num_prompt, num_answer = kind
    rng = random.Random(f"{seed} {num_prompt}")
    bodies = [
        {
            "prompt": [rng.randrange(100, 700) for _ in range(num_prompt)],
            "max_tokens": rng.randint(num_answer // 2, num_answer),
            "ignore_eos": True,
            "temperature": 0,
        }
        for _ in range(max(clients, int(share * count)))
    ]
    return await closed_loop(url, PATH, bodies, clients)


def gaps_ms(timings: list[Timing]) -> list[float]:
    """The times between tokens, ascending."""
    pairs = (zip(one.tokens_s, one.tokens_s[1:], strict=False) for one in timings)
    return sorted(1000 * (after - before) for each in pairs for before, after in each)


async def turn(url: str, seed: int, tpot_ms: float, share: float) -> dict[str, float]:
    began = time.perf_counter()
    chats, documents = await asyncio.gather(ask(url, seed, CHAT, share), ask(url, seed, DOCUMENT, share))
    seconds = time.perf_counter() - began
    gaps = gaps_ms([*chats, *documents])
    return {
        "gap_p50_ms": statistics.median(gaps),
        "gap_p99_ms": gaps[int(0.99 * len(gaps))],
        "gaps_over_120_percent": sum(gap > 1.2 * tpot_ms for gap in gaps) / len(gaps),
        "tokens_per_s": (len(documents) * DOCUMENT[2] + len(chats) * CHAT[2] + len(gaps)) / seconds,
        "document_ttft_ms": 1000 * statistics.median(one.first_s for one in documents),
    }


async def compare(model: Path, rounds: int, share: float) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        free = await stack.enter_async_context(deployed("EPD", model, _INSTANCES))
        await ask(free.gateway_url, 0, CHAT, share)
        decode_ms = statistics.median(gaps_ms(await ask(free.gateway_url, 1, CHAT, share)))
        tpot_ms = round(TPOT_OF_DECODE_STEP * decode_ms, 1)
        limited = await stack.enter_async_context(deployed("EPD", model, _INSTANCES, slo={"tpot_ms": tpot_ms}))
        urls = {"stage-level": limited.gateway_url, "unlimited": free.gateway_url}
        rows = []
        for number in range(rounds + 1):
            for policy in sorted(urls, reverse=bool(number % 2)):  # other load on the machine falls on both alike
                row = await turn(urls[policy], 10 + number, tpot_ms, share)
                if number:  # the first one warms up
                    rows.append({"round": number, "policy": policy, **row})
    medians = {
        policy: {
            name: statistics.median(row[name] for row in rows if row["policy"] == policy)
            for name in rows[0]
            if name not in ("round", "policy")
        }
        for policy in urls
    }
    return {
        "command": typed("batching"),
        "machine": machine(),
        "model": MODEL,
        "requests, clients, prompt tokens, most answer tokens": {"chat": CHAT, "document": DOCUMENT},
        "decode_gap_ms": decode_ms,
        "tpot_ms": tpot_ms,
        "medians": medians,
        "rows": rows,
    }


def main() -> int:
    parser = argument_parser(__doc__, "batching-cpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the load's requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-serve-") as directory:
        model = make_model(Path(directory) / "model", **MODEL)
        report = asyncio.run(compare(model, arguments.rounds, arguments.share))
    write(arguments.output, report)
    print(f"TPOT limit {report['tpot_ms']} ms; medians of {arguments.rounds} rounds:")
    for policy, row in report["medians"].items():
        print(policy, {name: round(value, 4) for name, value in row.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
