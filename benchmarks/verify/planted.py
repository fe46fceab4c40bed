"""Faults × checks: each planted fault, and every check that finds it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestServer

from benchmarks.verify.misbehaving_server import FAULTS, Server
from epd_serve.verify.check import Result
from epd_serve.verify.client import Client
from epd_serve.verify.runner import chosen, run_checks

#: Parts of the server: it has but one, and the checks call it by these names.
_DEEDS = ("kill-E", "kill-P", "kill-D", "stop-P", "stop-D")


@asynccontextmanager
async def client_of(fault: str = "") -> AsyncIterator[Client]:
    async with TestServer(Server(fault).app()) as tested, TestServer(Server().app()) as right:
        command = f"curl -sS --fail -X POST {tested.make_url('/admin/kill')}"  # it must come while streams run
        client = Client(
            str(tested.make_url("")),
            reference=Client(str(right.make_url(""))),
            scale=0.2,
            slowness=1 / 15,  # it answers in milliseconds
            admin=dict.fromkeys(_DEEDS, command),
        )
        try:
            yield client
        finally:
            await client.close()


async def results_of(fault: str, names: Sequence[str] = ()) -> list[Result]:
    """Results of the checks of these names, all where there are none, against a server with the fault."""
    async with client_of(fault) as client:
        with tempfile.TemporaryDirectory() as directory:
            return (await run_checks(client, chosen((), names), Path(directory))).results


def table() -> dict[str, Any]:
    """Fault → its own check, and all checks that find it; "" is the right server."""
    found = {}
    for fault in ("", *FAULTS):
        results = asyncio.run(results_of(fault))
        failed = [one.check for one in results if one.outcome == "fail"]
        found[fault] = {"planted_for": FAULTS.get(fault, ""), "found_by": failed}
        print(f"{fault or 'none':45}{', '.join(failed)}", flush=True)
    return found
