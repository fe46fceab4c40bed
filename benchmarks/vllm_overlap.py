"""KV from P to D between vLLM processes on a CPU: epd-serve's groups of layers, and vLLM's MooncakeConnector.

The latter sends a prompt's KV when all of it is computed. Both have the same slow link; requests take turns.
A request's transfer is what the link needs for its bytes. What of it is exposed is told by D's first token: by how
much it comes later than P, asked for a prompt without a hand-over, needs to compute that, and D to decode.
Overlap = 1 - exposed / transfer.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import transformers

from benchmarks.ablations.processes import environment
from benchmarks.common import RESULTS, argument_parser, machine, write
from benchmarks.deployed import ask, deployed
from benchmarks.models import HEAD_DIM, make_model
from epd_serve.launch.deployment import LocalDeployment

PATH = "/v1/completions"
LAYERS, KV_HEADS, HIDDEN = 12, 2, 256
TOKENS = 768
#: float32 keys and values.
PROMPT_BYTES = TOKENS * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
LINK = {"bandwidth": "20MB/s", "latency_ms": 2.0}
TRANSFER_S = PROMPT_BYTES / 20e6 + 0.002
METHODS = ("grouped", "mooncake")


def settings(python: str, kv: str, trace: Path) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "vllm": {"python": python, "kv": kv, "environment": environment(**LINK), "kv_load_failure": "fail"},
        "trace": str(trace),
    }


def prompt(chooser: random.Random) -> dict[str, Any]:
    tokens = [chooser.randrange(10, 700) for _ in range(TOKENS)]
    return {"prompt": tokens, "max_tokens": 2, "temperature": 0, "ignore_eos": True}


async def alone_s(
    client: httpx.AsyncClient, deployment: LocalDeployment, name: str, body: dict[str, Any]
) -> float:
    """Seconds of an instance for a prompt's first token, without a hand-over."""
    start = time.perf_counter()
    url = f"{deployment.instances[name].url}{PATH}"
    answer = await client.post(url, json={**body, "model": "benchmark", "max_tokens": 1})
    answer.raise_for_status()
    return time.perf_counter() - start


async def run(python: str, num_requests: int, folder: Path) -> dict[str, Any]:
    model = make_model(
        folder / "model", hidden=HIDDEN, layers=LAYERS, heads=8, kv_heads=KV_HEADS, intermediate=2 * HIDDEN
    )
    instances = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "engine_args": {"enforce_eager": True, "enable_prefix_caching": False},
    }
    chooser = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {
        kv: {"first_s": [], "alone_s": [], "decode_s": []} for kv in METHODS
    }
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=600, trust_env=False))
        running = {}
        for kv in METHODS:
            print(f"starting {kv}", flush=True)
            context = deployed("EP-D", model, instances, **settings(python, kv, folder / kv))
            running[kv] = await stack.enter_async_context(context)
        for number in range(-2, num_requests):  # the first two warm up
            for kv, deployment in running.items():
                body = prompt(chooser)
                seen = {
                    "alone_s": await alone_s(client, deployment, "ep0", body),
                    "decode_s": await alone_s(client, deployment, "d0", {**body, "prompt": body["prompt"][:1]}),
                    "first_s": (await ask(client, f"{deployment.gateway_url}{PATH}", prompt(chooser))).first_s,
                }
                for name, seconds in seen.items():
                    if number >= 0:
                        times[kv][name].append(seconds)
    rows = []
    for kv, one in times.items():
        medians = {name: statistics.median(values) for name, values in one.items()}
        exposed_s = medians["first_s"] - medians["alone_s"] - medians["decode_s"]
        overlap = 1 - min(1.0, max(0.0, exposed_s) / TRANSFER_S)
        rows.append({"kv": kv, **medians, "transfer_s": TRANSFER_S, "exposed_s": exposed_s, "overlap": overlap})
    traced = [json.loads(line) for file in (folder / "grouped").glob("vllm-kv-*") for line in file.open()]
    told = {key: statistics.median(one[key] for one in traced[2:]) for key in ("writes", "transfer_s", "overlap")}
    return {"rows": rows, "grouped_as_p_records_it": told}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of the environment that has vLLM for CPUs")
    parser.add_argument("--requests", type=int, default=20, help="for each connector; medians are taken")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epd-serve-") as directory:
        data = asyncio.run(run(arguments.vllm_python, arguments.requests, Path(directory)))
    report = {
        "command": f"python -m benchmarks.vllm_overlap --vllm-python PYTHON --requests {arguments.requests}",
        "machine": machine(),
        "took_s": round(time.monotonic() - start),
        "link": LINK,
        "tokens": TOKENS,
        "bytes": PROMPT_BYTES,
        **data,
    }
    write(RESULTS / "vllm-overlap-cpu.json", report)
    for row in data["rows"]:
        print(
            f"{row['kv']:9} P alone {row['alone_s'] * 1e3:6.1f} ms, first token {row['first_s'] * 1e3:6.1f} ms, "
            f"transfer {row['transfer_s'] * 1e3:6.1f} ms, exposed {row['exposed_s'] * 1e3:6.1f} ms, "
            f"overlap {row['overlap']:.2f}"
        )


if __name__ == "__main__":
    main()
