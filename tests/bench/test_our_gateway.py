"""Against a deployment of ours: pictures and text, and what the gateway tells of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet import deployed
from load_tester import session, settings

from epd_serve.bench.workloads import load_workload

WORKLOAD = "synthetic,image_share=0.5,image_size=56x56,text_tokens=6,output_tokens=8,requests=12"


async def test_runs_record_our_gateways_topology_and_version(tmp_path: Path) -> None:
    async with deployed("E-PD") as deployment:
        wanted = settings(deployment.gateway_url, "closed:1", None, num_warmups=1, num_requests=12)
        run = await asyncio.to_thread(session().run, tmp_path / "run", wanted, load_workload(WORKLOAD))
    assert run.total.num_failed == 0
    assert run.settings.topology == "E-PD"
    assert run.settings.versions["server"].startswith("epd-serve ")
    assert {record.modality: record.num_output_tokens for record in run.records} == {"image": 8, "text": 8}
