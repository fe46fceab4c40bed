"""KV and features over Mooncake: the answers are those of shared memory, whatever happens to its master."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import tiny_models
from fleet import Books, deployed, figures
from http_client import http_client
from identity import Question, ask, generated
from pictures import noise
from reference import Reference
from transports import HAS_MOONCAKE

from epd_serve.launch.deployment import LocalDeployment

if not HAS_MOONCAKE:
    pytest.skip("mooncake is not installed", allow_module_level=True)


class Service:
    """A deployment whose answers are compared with what transformers generates."""

    def __init__(self, deployment: LocalDeployment, reference: Reference) -> None:
        self.deployment = deployment
        self._reference = reference

    async def check(self, *seeds: int) -> None:
        question = Question("What is this?", tuple(noise(seed, (60 + seed, 90)) for seed in seeds))
        async with http_client(self.deployment.gateway_url) as client:
            assert await ask(client, question) == generated(self._reference, question)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("mooncake") / "model")


async def test_a_deployment_starts_its_own_master_and_answers_as_ever(model: Path) -> None:
    async with deployed(
        "2E-P-D",
        model,
        instances={
            "max_num_batched_tokens": 20,
            "feature_cache_bytes": "16MiB",
            "kv_transfer": {"transport": "mooncake", "group_layers": 2},
        },
        feature_store="mooncake",
    ) as deployment:
        assert deployment.processes[0].spec.name == "master"
        service = Service(deployment, Reference(model))
        for _ in range(10):  # P has the prompt's KV and may answer before an encoder has looked into the store
            await service.check(1, 2)
            told = {name: await figures(handle.url) for name, handle in deployment.instances.items()}
            both = {name: told["e0"][name] + told["e1"][name] for name in told["e0"] if name.startswith("store_")}
            if both["store_hits_total"] >= 2:
                break
        assert both["store_misses_total"] == both["store_puts_total"] == 2 <= both["store_hits_total"]
        assert both["store_put_bytes_total"] > 0
        assert both["store_put_seconds_count"] == 2
        assert told["p0"]["store_fetches_total"] == told["p0"]["store_fetch_seconds_count"] == 2
        assert told["p0"]["feature_arrivals_total"] == 2
        os.kill(deployment.processes[0].pid, signal.SIGSTOP)
        await service.check(2, 3)
        os.kill(deployment.processes[0].pid, signal.SIGCONT)
        await service.check(3, 4)
        await Books.of(deployment).check()
