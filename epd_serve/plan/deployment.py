"""Write the deployment file of a plan."""

from __future__ import annotations

from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from epd_serve.config import parse_config
from epd_serve.plan.evaluate import Evaluation, Evaluator


def deployment_yaml(evaluator: Evaluator, plan: Evaluation) -> str:
    """Return a file for ``epd-serve up``. Raises ValueError if the schema rejects it."""
    candidate, goal = plan.candidate, evaluator.goal
    placed = candidate.devices(evaluator.fleet)
    devices = [name for _, name in placed]
    threads = next(({"threads": pool.threads} for pool, _ in placed if pool.threads), {})
    slo: dict[str, float] = {}
    if goal.ttft_s is not None:
        slo["ttft_ms"] = 1e3 * goal.ttft_s
    if goal.tpot_s is not None:
        slo["tpot_ms"] = 1e3 * goal.tpot_s
    tree: dict[str, Any] = {
        "topology": candidate.line,
        "model": {"shape_of": evaluator.fleet.shape_of} if evaluator.fleet.shape_of else evaluator.fleet.model,
        "devices": ["cpu"] if set(devices) == {"cpu"} else devices,
        "dtype": "auto",
        "slo": slo,
        "instances": {
            "max_num_batched_tokens": candidate.step_tokens(evaluator.fleet),
            "max_num_seqs": candidate.max_num_seqs,
            **threads,
            "batching": {"order": candidate.order},
        },
    }
    stream = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.dump(tree, stream)
    text = (
        f"# {plan.goodput:.2f} requests/s with {goal.target:.0%} within the limits, in simulation; "
        f"bottleneck: {plan.bound.bottleneck.name.lower()}.\n{stream.getvalue()}"
    )
    parse_config(text, source="the plan's deployment")
    return text
