"""``--compare``: bring deployments up in turn on the same devices, and measure each under the same schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from epd_serve.bench.deployed import Candidate, deployed
from epd_serve.bench.result_files import file_name
from epd_serve.bench.run import Run
from epd_serve.bench.session import Session
from epd_serve.bench.sweep import Sweep
from epd_serve.bench.types import RunSettings


def compare(
    session: Session,
    path: Path,
    candidates: Sequence[Candidate],
    settings: RunSettings,
    *,
    rates: Sequence[float | None],
    duration_s: float | None,
) -> tuple[list[Run], list[str]]:
    """Measure each deployment at each rate.

    Returns the runs, and the labels of the deployments that could not be measured; the next one follows those.
    An interrupted run is the last one.
    """
    runs: list[Run] = []
    failed: list[str] = []
    for number, candidate in enumerate(candidates, start=1):
        name = f"{candidate.label} ({number} of {len(candidates)}): {candidate.file}"
        session.console.print(name, style="bold", highlight=False, markup=False, soft_wrap=True)
        folder = path / file_name(candidate.label)
        folder.mkdir()
        try:
            with deployed(candidate, folder / "up.log") as url:
                wanted = msgspec.structs.replace(
                    settings,
                    base_url=url,
                    label=candidate.label,
                    model=candidate.config.model_name,
                    num_devices=candidate.num_devices,
                )
                keyed = replace(session, api_key=candidate.api_key or session.api_key)
                found = Sweep(session=keyed, path=folder, settings=wanted, duration_s=duration_s).over(rates)
        except ValueError as error:
            session.console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
            failed.append(candidate.label)
            continue
        runs += found
        if len(found) < len(rates) or not found[-1].is_complete:
            break
    return runs, failed
