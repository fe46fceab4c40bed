"""EPD's Table 4: time to first token with all images of a request on one encoder, and shared out over encoders.

    python -m benchmarks.parallel_encode            # both of the following
    python -m benchmarks.parallel_encode simulator  # Table 4
    python -m benchmarks.parallel_encode processes  # four encoders and one instance on the CPU

Devices run side by side in the simulator alone. On a CPU the encoders share cores: there the answers are compared,
token by token, and which encoder had which image is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import httpx

from benchmarks.common import CHAT_PATH, RESULTS, argument_parser, data_url, greedy_chat, machine, noise, write
from benchmarks.deployed import figures, growth
from device.datasheets import spec_of
from epd_serve.config import DeploymentConfig
from epd_serve.cost.profile import EncodeLine, Line, Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import ModelShape, VisionShape, shape_of
from epd_serve.launch import LocalDeployment
from epd_serve.sim.simulator import build, check_books, simulate
from epd_serve.sim.spec import Batching
from epd_serve.sim.workloads import SimRequest
from epd_serve.topology import parse_topology

RESULT = RESULTS / "parallel-encode.json"
NUM_IMAGES = (2, 4, 6, 8)
#: EPD, Table 4: seconds with 2, 4, 6 and 8 images in a request. MiniCPM-V 2.6, 0.25 requests a second, images of
#: 4032x3024 pixels, prompts of 22 tokens (sections 4 and 4.2).
TABLE_4 = {"parallel": (0.92, 1.02, 1.14, 1.74), "together": (1.46, 2.47, 3.37, 4.27)}
RATE, WIDTH, HEIGHT, NUM_TEXT_TOKENS, NUM_OUTPUT_TOKENS = 0.25, 4032, 3024, 22, 10

#: Ten slices of 448 pixels square of each image of that size, 64 tokens each; a slice attends to itself alone.
MINICPM_V = ModelShape(
    name="minicpm-v-2.6",
    language=shape_of("qwen2-vl-7b").language,
    vision=VisionShape(
        num_layers=27,
        hidden=1152,
        intermediate=4304,
        patch_size=14,
        merge=4,
        tokens_per_image=640,
        window_patches=1024,
    ),
)


def paper_profile() -> Profile:
    """Times that Table 4 implies. From 2 to 6 images, one for each encoder, its first row grows by what prefill
    takes for an image; its second by encode and prefill. What is left at 2 images takes no part in either."""
    first, second = TABLE_4["parallel"], TABLE_4["together"]
    prefill_s = (first[2] - first[0]) / 4
    encode_s = (second[3] - second[0]) / 6 - prefill_s
    shape = analytic_profile(MINICPM_V, spec_of("a100"))
    return Profile(
        kind="measured",
        device="a100",
        model=MINICPM_V.name,
        description="EPD, Table 4",
        step=(Line(token_s=prefill_s / 640),),
        encode=(EncodeLine(image_s=encode_s),),
        memory_bytes=shape.memory_bytes,
        language_bytes=shape.language_bytes,
        kv_token_bytes=shape.kv_token_bytes,
        feature_token_bytes=shape.feature_token_bytes,
        num_layers=shape.num_layers,
        tokens_per_image=640,
        link_bytes_per_s=shape.link_bytes_per_s,
        request_s=first[0] - encode_s - 2 * prefill_s,
    )


def requests_of(num_images: int, num_requests: int, seed: int, size: tuple[int, int]) -> list[SimRequest]:
    draw, at_s = random.Random(seed), 0.0
    requests: list[SimRequest] = []
    for number in range(num_requests):
        at_s += draw.expovariate(RATE)
        images = tuple((f"{number}.{index}", size[0] * size[1]) for index in range(num_images))
        requests.append(
            SimRequest(
                at_s=at_s,
                images=images,
                num_text_tokens=NUM_TEXT_TOKENS,
                num_output_tokens=NUM_OUTPUT_TOKENS,
            )
        )
    return requests


def ttft_s(
    profile: Profile,
    line: str,
    num_images: int,
    *,
    parallel: bool,
    num_requests: int = 100,
    seeds: Sequence[int] = (0, 1, 2),
    size: tuple[int, int] = (WIDTH, HEIGHT),
) -> float:
    """Mean over all requests of all seeds."""
    topology = parse_topology(line)
    deployment = build(
        topology,
        [f"cuda:{index}" for index in range(topology.num_devices)],
        lambda device, width: profile,
        batching=Batching(policy="unlimited", max_num_tokens=8192),
        parallel_encode=parallel,
    )
    seconds: list[float] = []
    for seed in seeds:
        outcome = simulate(deployment, requests_of(num_images, num_requests, seed, size))
        check_books(outcome)
        seconds += [one.first_token_s - one.sent_s for one in outcome.jobs if one.first_token_s is not None]
    assert len(seconds) == num_requests * len(seeds), "every request has a first token"
    return fmean(seconds)


def simulated() -> list[dict[str, Any]]:
    a100 = spec_of("a100")
    cases = [
        ("times of the paper's Table 4", paper_profile(), "4E-P-D", (WIDTH, HEIGHT)),
        ("times of the paper's Table 4", paper_profile(), "6E-P-D", (WIDTH, HEIGHT)),
        ("data sheet, MiniCPM-V 2.6", analytic_profile(MINICPM_V, a100), "4E-P-D", (WIDTH, HEIGHT)),
        ("data sheet, Qwen2-VL-7B", analytic_profile(shape_of("qwen2-vl-7b"), a100), "4E-P-D", (2016, 1512)),
        ("data sheet, Qwen2.5-VL-7B", analytic_profile(shape_of("qwen2.5-vl-7b"), a100), "4E-P-D", (2016, 1512)),
    ]
    rows: list[dict[str, Any]] = []
    for name, profile, line, size in cases:
        row: dict[str, Any] = {"profile": name, "topology": line, "size": list(size), "num_images": NUM_IMAGES}
        for key, parallel in (("parallel_s", True), ("together_s", False)):
            row[key] = [ttft_s(profile, line, count, parallel=parallel, size=size) for count in NUM_IMAGES]
        row["ratio"] = [off / on for on, off in zip(row["parallel_s"], row["together_s"], strict=True)]
        rows.append(row)
    return rows


def question(num_images: int, seed: int) -> dict[str, Any]:
    urls = [data_url(noise(seed * 100 + index, 112, 112)) for index in range(num_images)]
    return greedy_chat("What is in the pictures?", urls, max_tokens=12, model="demo", logprobs=True)


async def answers(topology: str, *, parallel: bool) -> tuple[list[list[str]], list[dict[str, int]]]:
    """Per question, the tokens, and the images that each encoder encoded for it."""
    config = DeploymentConfig(
        topology=topology,
        gateway={"port": 0, "parallel_encode": parallel},
        instances={"base_port": 0, "threads": 1},
    )
    tokens: list[list[str]] = []
    encoded: list[dict[str, int]] = []
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        names = [name for name in deployment.instances if name.startswith("e")]
        async with httpx.AsyncClient(base_url=deployment.gateway_url, timeout=120) as client:
            for number, num_images in enumerate(NUM_IMAGES):
                before = {name: await figures(deployment, name) for name in names}
                answer = await client.post(CHAT_PATH, json=question(num_images, number + 1))
                answer.raise_for_status()
                content = answer.json()["choices"][0]["logprobs"]["content"]
                tokens.append([one["token"] for one in content])
                grown = {name: growth(before[name], await figures(deployment, name)) for name in names}
                encoded.append({name: round(one.get("tower_images_total", 0)) for name, one in grown.items()})
    return tokens, encoded


async def processes() -> dict[str, Any]:
    alone, _ = await answers("EPD", parallel=True)
    parallel, parts = await answers("4E-P-D", parallel=True)
    together, wholes = await answers("4E-P-D", parallel=False)
    return {
        "machine": machine(),
        "num_images": NUM_IMAGES,
        "identical_to_one_instance": {"parallel": parallel == alone, "together": together == alone},
        "encoded_by": {"parallel": parts, "together": wholes},
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("part", nargs="?", choices=["simulator", "processes"], help="both where it is left out")
    part = parser.parse_args().part
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result["command"] = "python -m benchmarks.parallel_encode"
    result["table_4_s"] = {**TABLE_4, "ratio": [b / a for a, b in zip(*TABLE_4.values(), strict=True)]}
    if part != "processes":
        result["simulator"] = simulated()
        for row in result["simulator"]:
            print(f"{row['topology']}  {row['profile']}, images of {row['size'][0]}x{row['size'][1]}")
            for key in ("parallel_s", "together_s", "ratio"):
                print(f"  {key:11}", "  ".join(f"{value:6.2f}" for value in row[key]), flush=True)
    if part != "simulator":
        result["processes"] = asyncio.run(processes())
        print(json.dumps(result["processes"], indent=1))
    write(RESULT, result)


if __name__ == "__main__":
    main()
