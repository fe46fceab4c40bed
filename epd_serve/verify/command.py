"""``epd-serve verify``, behind the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from epd_serve.verify.check import Result
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands
from epd_serve.verify.runner import chosen, run_checks


def list_checks(suites: Sequence[str]) -> None:
    """Print every check of the suites."""
    for one in chosen(suites):
        print(f"{one.name}\n  {one.proves}\n  from: {one.origin}")


def verify_server(
    url: str,
    *,
    model: str,
    suites: Sequence[str],
    names: Sequence[str],
    reference: str,
    record: Path | None,
    admin: Sequence[str],
    directory: Path,
    resume: bool,
    slowness: float,
    api_key: str | None,
) -> int:
    """Run the checks; return the exit status, 1 where one failed."""

    async def run() -> int:
        monolithic = Client(reference, api_key=api_key) if reference else None
        commands = admin_commands(admin)
        client = Client(
            url,
            model=model,
            api_key=api_key,
            reference=monolithic,
            record=record,
            admin=commands,
            slowness=slowness,
        )
        try:
            report = await run_checks(client, chosen(suites, names), directory, resume=resume, told=_tell)
        finally:
            await client.close()
        print(f"{report.counts()}; {directory / 'verify.html'}")
        return int(any(one.outcome == "fail" for one in report.results))

    return asyncio.run(run())


def _tell(result: Result) -> None:
    print(f"{result.outcome:9}{result.check:24}{result.seconds:7.2f} s  {result.reason}", flush=True)
    if result.curl:
        print(f"         {result.curl}", flush=True)
