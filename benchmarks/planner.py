"""CPU seconds of the simulator: ``python -m benchmarks.planner``, 100,000 requests on 64 instances."""

from __future__ import annotations

import time

from benchmarks.common import argument_parser, machine, typed, write
from device.datasheets import spec_of
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.sim.simulator import simulate
from epd_serve.sim.spec import Batching, build
from epd_serve.sim.workloads import read_load
from epd_serve.topology import parse_topology

TOPOLOGY, RATE = "8E-16P-40D", 400.0


def main() -> None:
    parser = argument_parser(__doc__, "planner-speed.json")
    parser.add_argument("--requests", type=int, default=100_000)
    wanted = parser.parse_args()
    profile = analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("ascend-910b3"))
    topology = parse_topology(TOPOLOGY)
    names = [f"npu:{i}" for i in range(topology.num_devices)]
    deployment = build(topology, names, lambda *_: profile, batching=Batching(ttft_s=2, tpot_s=0.05))
    workload = f"sharegpt4o-like,requests={wanted.requests}"
    load = read_load(workload, rate=RATE, count=wanted.requests, seed=0)
    began = time.process_time()
    outcome = simulate(deployment, load.requests)
    cpu_s = time.process_time() - began
    found = {
        "command": typed("planner"),
        "machine": machine(),
        "topology": TOPOLOGY,
        "requests": wanted.requests,
        "cpu_s": cpu_s,
        "virtual_s": outcome.seconds,
        "steps": outcome.num_steps,
        "events": outcome.clock.num_events,
    }
    print(write(wanted.output, found))


if __name__ == "__main__":
    main()
