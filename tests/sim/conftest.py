from collections.abc import Callable

import pytest

from device.datasheets import spec_of
from epd_serve.cost.profile import Profile
from epd_serve.cost.roofline import analytic_profile
from epd_serve.cost.shape import shape_of
from epd_serve.sim.spec import Batching, SimDeployment, build
from epd_serve.topology import parse_topology


@pytest.fixture(scope="session")
def ascend() -> Profile:
    return analytic_profile(shape_of("qwen2.5-vl-7b"), spec_of("ascend-910b3"))


@pytest.fixture
def deployed(ascend: Profile) -> Callable[..., SimDeployment]:
    def deploy(line: str, **options: object) -> SimDeployment:
        topology = parse_topology(line)
        devices = [f"npu:{i}" for i in range(topology.num_devices)]
        options.setdefault("batching", Batching(ttft_s=2.0, tpot_s=0.05))
        return build(topology, devices, lambda device, width: ascend, **options)  # type: ignore[arg-type]

    return deploy
