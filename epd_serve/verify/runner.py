"""Run checks one after another, each within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from epd_serve.verify import answers, api, faults, media
from epd_serve.verify.check import CHECKS, SUITES, Check, Failed, Outcome, Report, Result, Skipped, Unjudged
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands

#: The modules that enter their checks.
ENTERED = (api, answers, media, faults)


def chosen(suites: Sequence[str], names: Sequence[str] = ()) -> list[Check]:
    """The checks of suites and those of these names, all where neither is given, in SUITES' order."""
    if wrong := [one for one in suites if one not in SUITES]:
        raise ValueError(f"no suite {', '.join(wrong)}; there are {', '.join(SUITES)}")
    if wrong := [one for one in names if one not in CHECKS]:
        if meant := " ".join(f"--suite {one}" for one in wrong if one in SUITES):
            raise ValueError(f"no check {', '.join(wrong)}, but {meant}")
        raise ValueError(f"no check {', '.join(wrong)}; --list shows them")
    wanted = suites or (() if names else SUITES)
    found = [one for one in CHECKS.values() if one.name in names or one.suite in wanted]
    return sorted(found, key=lambda one: SUITES.index(one.suite))


async def run_checks(
    client: Client, checks: Sequence[Check], directory: Path, *, told: Callable[[Result], None] = lambda _: None
) -> Report:
    """Run the checks one after another, and write the report after each.

    Raises ValueError where no server answers.
    """
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - before anything runs
    await client.meet()
    report = Report(url=client.url, model=client.model, results=[])
    for check in checks:
        result = await _one(client, check, directory)
        report.results.append(result)
        told(result)
        report.write(directory)
    return report


async def _one(client: Client, check: Check, directory: Path) -> Result:
    outcome: Outcome = "pass"
    began_s, reason = time.monotonic(), ""
    limit_s = check.limit_s * max(1.0, client.slowness)
    try:
        async with asyncio.timeout(limit_s):
            reason = await check.run(client) or ""
    except Failed as error:
        outcome, reason = "fail", str(error)
    except Unjudged as error:
        outcome, reason = "unjudged", str(error)
    except Skipped as error:
        outcome, reason = "skipped", str(error)
    except TimeoutError:
        outcome, reason = "fail", f"not over within {limit_s:g} s"
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # an answer of another shape than OpenAI's
        outcome, reason = "fail", f"an answer of the wrong shape: {type(error).__name__} {error}"
    curl = client.curl(directory, check.name) if outcome == "fail" else ""
    seconds = round(time.monotonic() - began_s, 3)
    return Result(check=check.name, suite=check.suite, outcome=outcome, reason=reason, seconds=seconds, curl=curl)


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
    slowness: float,
    api_key: str | None,
) -> int:
    """Run the checks; return the exit status, 1 where one failed."""

    async def run() -> int:
        client = Client(
            url,
            model=model,
            api_key=api_key,
            reference=Client(reference, api_key=api_key) if reference else None,
            record=record,
            admin=admin_commands(admin),
            slowness=slowness,
        )
        try:
            report = await run_checks(client, chosen(suites, names), directory, told=_tell)
        finally:
            await client.close()
        print(f"{report.counts()}; {directory / 'verify.json'}")
        return int(any(one.outcome == "fail" for one in report.results))

    return asyncio.run(run())


def _tell(result: Result) -> None:
    print(f"{result.outcome:9}{result.check:24}{result.seconds:7.2f} s  {result.reason}", flush=True)
    if result.curl:
        print(f"         {result.curl}", flush=True)
