"""A paper's table with the real gateway, schedulers and transfers over emulated devices that compute nothing.

    python -m benchmarks.papers table5 [--rate 10] [--duration 60]      # EPD-Serve (003): deployments under load

Nothing is tuned: an emulated Ascend 910B3 takes the times of its data sheet (:mod:`device.datasheets`), and the
shape is that of Qwen2.5-VL-7B, whose features are those of the paper's table 3; openPangu-7B-VL's is not
published. All but the chips is real and runs on this machine's cores. A run in which they are busy tells
nothing, so the part of their time that was idle stands beside the figures.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, argument_parser, machine, write
from benchmarks.planner import TABLE_5
from epd_serve.config import parse_config
from epd_serve.launch import LocalDeployment
from epd_serve.topology import parse_topology

DEVICE, SHAPE = "ascend-910b3", "qwen2.5-vl-7b"


async def measure(line: str, rate: float, duration_s: float, workload: str) -> dict[str, Any]:
    """Figures of one deployment under Poisson arrivals of ``rate`` requests a second."""
    num_devices = parse_topology(line).num_devices
    config = parse_config(
        f"topology: {line}\ndevices: ['emulated:{DEVICE} x {num_devices}']\nmodel: {{shape_of: {SHAPE}}}\n"
        "gateway: {port: 0}\ninstances: {base_port: 0, max_num_seqs: 256, max_num_batched_tokens: 8192}\n"
    )
    async with LocalDeployment(config, ready_timeout_s=300) as deployment:
        psutil.cpu_percent()
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "epd_serve.cli", "bench", "--base-url", deployment.gateway_url]
            command += ["--workload", workload, "--rate", str(rate), "--duration", str(duration_s), "--ignore-eos"]
            command += ["--slo-ttft-ms", "2000", "--slo-tpot-ms", "50", "--devices", str(num_devices)]
            command += ["--json", "--no-report", "--work-dir", directory]
            bench = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            said, _ = await bench.communicate()
        idle = 1 - psutil.cpu_percent() / 100
    [run] = json.loads(said)
    total = run["summary"]["total"]
    figures = total["figures"]
    return {
        "npus": num_devices,
        "rate": rate,
        "requests": total["num_requests"],
        "failed": total["num_failed"],
        "ttft_ms": 1e3 * figures["ttft_scheduled"]["mean"],
        "tpot_ms": 1e3 * figures["tpot"]["mean"],
        "attainment": total["attainment"]["value"],
        "effective_per_npu": total["effective_throughput_per_device"],
        "host_idle": idle,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: each deployment's figures beside the paper's."""
    lines = [
        "| deployment | TTFT ms | paper | TPOT ms | paper | attained | paper | good tokens/s | paper | idle |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in rows.items():
        ttft, tpot, attainment, effective = TABLE_5[name]
        lines.append(
            f"| `{name}` | {row['ttft_ms']:.0f} | {ttft:.0f} | {row['tpot_ms']:.1f} | {tpot:.1f} "
            f"| {row['attainment']:.1%} | {attainment:.1%} | {row['effective_per_npu']:.1f} | {effective:.1f} "
            f"| {row['host_idle']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("table", choices=["table5"])
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of a whole deployment")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of requests")
    parser.add_argument("--workload", default="sharegpt4o-like")
    parser.add_argument("--only", nargs="+", default=list(TABLE_5), help="these deployments")
    parser.add_argument("--out", type=Path, default=RESULTS / "papers-table5.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for line in options.only:
        rows[line] = asyncio.run(measure(line, options.rate, options.duration, options.workload))
        print(line, json.dumps(rows[line]), flush=True)
    print(table(rows))
    write(options.out, {"machine": machine(), "device": f"emulated {DEVICE}", "shape": SHAPE, "rows": rows})


if __name__ == "__main__":
    main()
