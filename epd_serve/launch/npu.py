"""Checks and variables of instances on NPUs: room for streams and graphs, and HCCL ports of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence

from device.ascend_limits import InstanceUse, check_colocation, hccl_environment
from epd_serve.config import InstanceOptions, decode_graph_sizes
from epd_serve.topology import InstancePlacement


def npu_environments(
    instances: Sequence[tuple[InstancePlacement, InstanceOptions]],
) -> list[dict[str, str]]:
    """Variables for each instance's process; empty for those on other devices.

    Raises ValueError where the instances on one NPU need more streams or graph tasks than it has.
    """
    sharing: dict[str, dict[str, InstanceUse]] = {}
    environments: list[dict[str, str]] = []
    for index, (placed, options) in enumerate(instances):
        npus = [device for device in placed.devices if device.startswith("npu:")]
        environments.append(hccl_environment(index) if npus else {})
        for npu in npus:
            sharing.setdefault(npu, {})[placed.name] = _use(options)
    for uses in sharing.values():
        check_colocation(uses)
    return environments


def _use(options: InstanceOptions) -> InstanceUse:
    if not options.role.has_language_model:
        return InstanceUse(num_streams=1)
    config = json.loads((options.model / "config.json").read_text())
    text = config.get("text_config", config)
    return InstanceUse(
        num_streams=2,  # the default one, and the one on which graphs are updated
        num_graphs=len(decode_graph_sizes(options.max_num_seqs)) if options.role.decodes else 0,
        num_layers=text["num_hidden_layers"],
        num_groups=int(len(options.devices) > 1),
    )
