"""From a topology and devices to simulated instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd_serve.cost.interference import InterferenceMatrix
from epd_serve.cost.profile import Profile
from epd_serve.sim.device import MeasuredSharing, Sharing
from epd_serve.sim.simulator import SimDeployment
from epd_serve.sim.spec import Batching, SimInstanceSpec, with_memory
from epd_serve.topology import Topology, place
from epd_serve.topology.placement import CPU
from epd_serve.types import Role, Routing

DEFAULT = Batching()

#: Profiles by device name and tensor-parallel width.
ProfileOf = Callable[[str, int], Profile]


def build(
    topology: Topology,
    devices: Sequence[str],
    profile_of: ProfileOf,
    *,
    batching: Batching | Callable[[Role], Batching] = DEFAULT,
    routing: Routing = "least_loaded",
    parallel_encode: bool = True,
    steals: bool = False,
    host_of: Callable[[str], str] = lambda device: "host0",
    matrix: InterferenceMatrix | None = None,
    cores: float | None = None,
    threads: int | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    dual_stream: bool = True,
    is_grouped: bool = True,
) -> SimDeployment:
    """Instances on their devices as ``epd-serve up`` would place them.

    Memory of a device is shared by the language models on it, in equal parts. On CPUs (``cores`` given) all
    instances of a host share its cores, each with ``threads``, or with an equal part of the cores, as ``epd-serve
    up`` gives them out.
    ``steals``: EPD instances do.
    """
    placed = place(topology, devices)
    specs: list[SimInstanceSpec] = []
    for one in placed:
        device = one.devices[0]
        profile = profile_of(device, one.tensor_parallel)
        neighbours = [other for other in placed if other.name in (one.name, *one.shares_device_with)]
        num_models = max(sum(other.role.has_language_model for other in neighbours), 1)
        size = block_size or (128 if profile.device.startswith(("npu", "ascend")) else 16)
        spec = SimInstanceSpec(
            name=one.name,
            role=one.role,
            profile=profile,
            device=device,
            host=host_of(device),
            num_blocks=num_blocks or 2,
            block_size=size,
            batching=batching(one.role) if callable(batching) else batching,
            cores=float(threads or max(cores / len(placed), 1.0)) if device == CPU and cores is not None else 1.0,
            dual_stream=dual_stream,
            steals=steals and str(one.role) == "EPD",
            is_grouped=is_grouped,
        )
        if num_blocks is None:
            spec = with_memory(spec, share=1 / num_models)
        specs.append(spec)
    sharing: dict[str, Sharing] = {}
    for spec in specs:
        limit = cores if cores is not None and spec.on_cpu else float("inf")
        if matrix is not None:
            sharing[spec.device] = MeasuredSharing.of(matrix, limit)
        elif limit < float("inf") or spec.profile.interference:
            sharing[spec.device] = MeasuredSharing.of_profile(spec.profile, limit)
    return SimDeployment(
        instances=tuple(specs),
        routing=routing,
        parallel_encode=parallel_encode,
        sharing=sharing,
        label=str(topology),
    )
