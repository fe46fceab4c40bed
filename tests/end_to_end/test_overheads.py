"""The overheads of requests, measured on real deployments of the demo model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from epd_serve.bench.deployed import Candidate
from epd_serve.config import change_config
from epd_serve.cost.profile import Profile
from epd_serve.launch.deployment import LocalDeployment
from epd_serve.profiling import overheads
from epd_serve.profiling.overheads import OverheadOptions, with_overheads

DEMO = Path(__file__).parents[2] / "benchmarks" / "results" / "profile-demo-cpu.json"


@contextmanager
def deployed(candidate: Candidate, log: Path) -> Iterator[str]:
    """As a user's would be, but that its processes start at once."""
    config = change_config(candidate.config, {"gateway": {"port": 0}, "instances": {"base_port": 0}})
    running = LocalDeployment(config, log_dir=log.parent / candidate.label, ready_timeout_s=300)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running):
        yield running.gateway_url


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "synthetic,text_tokens=10,image_share=0,output_tokens="
    image = "synthetic,text_tokens=10,image_share=1,output_tokens=1,image_size=64x64"
    for name, value in {
        "deployed": deployed,
        "SIDES": (32, 128),
        "TOGETHER": (2,),
        "_LOADS": {"P": (f"{text}1", 300), "E": (image, 60)},
        "_STREAMS": (f"{text}256", 20),
    }.items():
        monkeypatch.setattr(overheads, name, value)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """URL and seed of each measurement."""
    found: list[tuple[str, int]] = []
    settings = overheads.RunSettings

    def noted(**fields: Any) -> Any:
        found.append((fields["base_url"], fields["seed"]))
        return settings(**fields)

    monkeypatch.setattr(overheads, "RunSettings", noted)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("little")
@pytest.mark.timeout(900)
def test_deployments_are_measured_and_nothing_of_the_stages_is_changed(seeds: list[tuple[str, int]]) -> None:
    told: list[str] = []
    stages = Profile.read(DEMO)
    options = OverheadOptions(model="demo", device="cpu", dtype="float32", threads=1, num_requests=1)
    found = with_overheads(stages, options, told.append)
    assert (found.step, found.encode, found.samples) == (stages.step, stages.encode, stages.samples)
    seconds = (
        *(found.request_s, found.image_s, found.image_pixel_s, found.split_s, found.split_token_s),
        *(found.feature_s, found.hand_over_s, found.loop_s, found.stream_s),
    )
    assert all(0 <= one < 10 for one in seconds) and any(seconds)
    assert set(found.interference) == {"D/P", "D/E", "P/D", "E/D"}
    assert min(found.interference.values()) >= 0
    assert found.interference_within == stages.interference_within and not found.transports
    assert {text.partition(":")[0] for text in told} == {"EPD", "E-P-D"}
    assert msgspec.json.decode(found.to_json(), type=Profile) == found
    assert len(seeds) == len(set(seeds)) > 10, "a picture that is there already tells nothing of an encode"
