"""HeteroServe (004), tables 4 and 5: consumer GPUs that encode beside data-center GPUs that prefill and decode.

Tokens a second of requests that are all there at once: one image of COCO's size and 128 tokens of answer each.
GPUs that share out the layers of a language model are one device with the times of all of them. What the paper's
engine gains over vLLM's by its kernels (table 7) is not in data sheets: the rows for vLLM have tower and language
model take turns. Work stealing (section 6.5) is measured on requests at random times of which half are texts: an
encoder takes only texts.
"""

from __future__ import annotations

from benchmarks.papers.measure import Deployment, Load, Rows, markdown, sheet
from device.datasheets import spec_of
from epd_serve.cost.profile import Profile

LLAVA, QWEN, SLOWNESS = "llava-1.5-7b", "qwen2.5-vl-7b", 8.0
CONSUMER, DATA_CENTER = "rtx-4090", "a100"
NUM_REQUESTS = 128
LOAD = Load(
    name="all at once",
    workload="synthetic,image_share=1,image_size=640x480,text_tokens=8,output_tokens=128",
    num_requests=NUM_REQUESTS,
    clients=NUM_REQUESTS,
)
MIXED = Load(
    name="half texts",
    workload="synthetic,image_share=0.5,image_size=640x480,text_tokens=64,output_tokens=128",
    num_requests=256,
    rate=60.0,
)
#: The paper's name, its tokens/s, the topology, (kind, width) of each device, whether stages take turns.
TABLE_4 = (
    ("vLLM, 4 A100", 3886, "4EPD", ((DATA_CENTER, 1),) * 4, True),
    ("Homo, 4 A100", 5986, "4EPD", ((DATA_CENTER, 1),) * 4, False),
    ("Hetero, without stealing", 2793, "2E-2PD", ((CONSUMER, 1),) * 2 + ((DATA_CENTER, 1),) * 2, False),
)
TABLE_5 = (
    ("vLLM, TP2", 2768, "EPD", ((DATA_CENTER, 2),), True),
    ("vLLM, TP4", 3619, "EPD", ((DATA_CENTER, 4),), True),
    ("Cfg1: 4090 + A100 x 2", 3252, "E-PD", ((CONSUMER, 1), (DATA_CENTER, 2)), False),
    ("Cfg2: 4090 x 2 + A100 x 2", 3269, "2E-PD", ((CONSUMER, 1),) * 2 + ((DATA_CENTER, 2),), False),
    ("Cfg3: A100 x 2", 3351, "EPD", ((DATA_CENTER, 2),), False),
    ("Cfg4: A100 x 4", 4633, "EPD", ((DATA_CENTER, 4),), False),
)
TABLES = (("table 4", LLAVA, TABLE_4), ("table 5", QWEN, TABLE_5))
#: The paper's name, its tokens/s, the topology, options of the deployment.
STEALING = (
    ("without stealing", 2793, "2E-2PD", {}),
    ("with stealing", 3156, "2EPD-2PD", {"roles": {"EPD": {"assist": True}}}),
)


def _cost(devices: tuple[tuple[str, int], ...]) -> float:
    """Thousands of dollars, at the paper's prices."""
    return sum(width * (spec_of(kind).price or 0.0) for kind, width in devices) / 1e3


def deployments() -> list[Deployment]:
    found = []
    for table, shape, entries in TABLES:
        for name, _, topology, devices, turns in entries:
            profiles: tuple[Profile, ...] = tuple(
                sheet(shape, kind, width, turns=turns) for kind, width in devices
            )
            found.append(
                Deployment(
                    name=f"{table}: {name}",
                    topology=topology,
                    devices=profiles,
                    shape=shape,
                    slowness=SLOWNESS,
                    loads=(LOAD,),
                )
            )
    mixed = tuple(sheet(LLAVA, kind) for kind in (CONSUMER, CONSUMER, DATA_CENTER, DATA_CENTER))
    for name, _, topology, options in STEALING:
        found.append(
            Deployment(
                name=name,
                topology=topology,
                devices=mixed,
                shape=LLAVA,
                slowness=SLOWNESS,
                loads=(MIXED,),
                options=options,
            )
        )
    return found


def report(rows: Rows) -> str:
    parts = []
    for table, shape, entries in TABLES:
        first = entries[0]
        lines = []
        for name, paper, topology, devices, _ in entries:
            if (row := rows.get((f"{table}: {name}", LOAD.name))) is None:
                continue
            tokens, cost = row["throughput"] * sum(width for _, width in devices), _cost(devices)
            base = rows.get((f"{table}: {first[0]}", LOAD.name))
            gain = "-"
            if base is not None:
                before = base["throughput"] * sum(width for _, width in first[3]) / _cost(first[3])
                gain = f"{tokens / cost / before - 1:+.0%}"
            lines.append(
                [
                    name,
                    f"`{topology}`",
                    f"{cost:.0f}",
                    *(f"{tokens:.0f}", f"{paper}"),
                    *(f"{tokens / cost:.1f}", f"{paper / cost:.1f}"),
                    *(gain, f"{paper / cost / (first[1] / _cost(first[3])) - 1:+.0%}"),
                    f"{row['host_idle']:.0%}",
                ]
            )
        head = [f"{table}, {shape}", "topology", "k$", "tokens/s", "paper", "tokens/s per k$", "paper"]
        parts.append(markdown([*head, "against the first", "paper", "host idle"], lines))
    lines = []
    for name, paper, topology, _ in STEALING:
        if (row := rows.get((name, MIXED.name))) is not None:
            ttft = f"{row['ttft_ms']:.0f}"
            lines.append(
                [
                    name,
                    f"`{topology}`",
                    f"{4 * row['throughput']:.0f}",
                    f"{paper}",
                    ttft,
                    f"{row['host_idle']:.0%}",
                ]
            )
    if lines:
        parts.append(markdown(["section 6.5", "topology", "tokens/s", "paper", "TTFT ms", "host idle"], lines))
    return "\n".join(parts)
