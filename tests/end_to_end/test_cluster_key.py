"""A deployment whose instances ask for a key, as 'epd-serve up' runs it."""

from __future__ import annotations

from chat import chat
from http_client import http_client
from pictures import noise

from epd_serve.config import DeploymentConfig
from epd_serve.launch.deployment import LocalDeployment

KEY = "only-this-cluster-knows"


async def test_instances_serve_their_deployment_alone() -> None:
    config = DeploymentConfig(
        topology="E-P-D",
        gateway={"port": 0},
        instances={"base_port": 0, "threads": 1},
        cluster_key=KEY,
    )
    body = chat("What is this?", noise(1), max_tokens=6, ignore_eos=True, temperature=0)
    async with (
        LocalDeployment(config, ready_timeout_s=300) as deployment,
        http_client() as client,
    ):
        answers = []
        for _ in range(4):
            answer = await client.post(
                f"{deployment.gateway_url}/v1/chat/completions", json=body, headers={"connection": "close"}
            )
            answers.append(answer.json()["choices"][0]["message"]["content"])
        assert len(answers) == 4 and len(set(answers)) == 1
        for instance in deployment.instances.values():
            assert (await client.get(f"{instance.url}/info")).status_code == 401
            assert (await client.get(f"{instance.url}/health")).status_code == 200
        assert not any(KEY.encode() in log.read_bytes() for log in deployment.log_dir.glob("*.log"))
