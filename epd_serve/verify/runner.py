"""Select and run checks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from epd_serve.verify import answers, api, faults, media
from epd_serve.verify.check import CHECKS, SUITES, Check, Outcome, Report, Result, Verdict
from epd_serve.verify.client import Client
from epd_serve.verify.faults import admin_commands

#: The modules that register checks.
_REGISTERED = (api, answers, media, faults)


def chosen(suites: Sequence[str], names: Sequence[str] = ()) -> list[Check]:
    """Return the checks of the suites and the named ones, by default all. Raises ValueError."""
    if wrong := [one for one in suites if one not in SUITES]:
        raise ValueError(f"no suite {', '.join(wrong)}; known: {', '.join(SUITES)}")
    if wrong := [one for one in names if one not in CHECKS]:
        if meant := " ".join(f"--suite {one}" for one in wrong if one in SUITES):
            raise ValueError(f"no check {', '.join(wrong)}; did you mean {meant}?")
        raise ValueError(f"no check {', '.join(wrong)}; see --list")
    wanted = suites or (() if names else SUITES)
    found = [one for one in CHECKS.values() if one.name in names or one.suite in wanted]
    return sorted(found, key=lambda one: SUITES.index(one.suite))


async def run_checks(client: Client, checks: Sequence[Check], directory: Path) -> Report:
    """Run the checks in order; print each result and write the report. Raises ValueError if no server answers."""
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - before anything runs
    await client.meet()
    report = Report(url=client.url, model=client.model, results=[])
    for check in checks:
        result = await _run_check(client, check, directory)
        report.results.append(result)
        print(f"{result.outcome:9}{result.check:24}{result.seconds:7.2f} s  {result.reason}", flush=True)
        if result.curl:
            print(f"         {result.curl}", flush=True)
        (directory / "verify.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


async def _run_check(client: Client, check: Check, directory: Path) -> Result:
    outcome: Outcome = "pass"
    began_s, reason = time.monotonic(), ""
    limit_s = check.limit_s * max(1.0, client.slowness)
    try:
        async with asyncio.timeout(limit_s):
            reason = await check.run(client) or ""
    except Verdict as verdict:
        outcome, reason = verdict.outcome, str(verdict)
    except TimeoutError:
        outcome, reason = "fail", f"not finished within {limit_s:g} s"
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # the answer's structure is not OpenAI's
        outcome, reason = "fail", f"the answer has the wrong structure: {type(error).__name__} {error}"
    curl = client.curl(directory, check.name) if outcome == "fail" else ""
    seconds = round(time.monotonic() - began_s, 3)
    return Result(check=check.name, suite=check.suite, outcome=outcome, reason=reason, seconds=seconds, curl=curl)


def list_checks(suites: Sequence[str]) -> None:
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
    """Run the checks; return the exit code, 1 if one failed."""

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
            report = await run_checks(client, chosen(suites, names), directory)
        finally:
            await client.close()
        counts = Counter(one.outcome for one in report.results)
        text = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        print(f"{text}; {directory / 'verify.json'}")
        return int(any(one.outcome == "fail" for one in report.results))

    return asyncio.run(run())
