"""Tokens are the same whatever the engine does for speed: each feature is on in one case and off in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
from fleet import figures
from http_client import http_client
from identity import start_fleet

from benchmarks.ablations.processes import environment

pytestmark = pytest.mark.slow

#: So little is to be measured where budgets are searched for.
SMALL_BUDGETS = {"image_budget_pixels": 10 * 140 * 140, "max_num_seqs": 16}
#: Eleven blocks, in which the eight questions cannot all run at once: sequences are preempted and go on.
SMALL_POOL = 11 * 40960

CASES: dict[str, dict[str, Any]] = {
    "budgets, slack, small pool, trace": {
        "slo": {"ttft_ms": 4000, "tpot_ms": 400},
        "instances": {"batching": {"order": "slack"}, "kv_cache_bytes": SMALL_POOL, **SMALL_BUDGETS},
        "trace": True,
    },
    "no budgets, shortest first, small pool, late features": {
        "instances": {"batching": {"order": "sjf"}, "kv_cache_bytes": SMALL_POOL},
        "baselines": {"prefetch": "sync"},
    },
    "budgets, encodes beside decodes, layer by layer": {
        "slo": {"tpot_ms": 400},
        "instances": {**SMALL_BUDGETS},
        "baselines": {"kv": "layerwise"},
    },
}
TOPOLOGIES = {"EPD": ("epd0",), "E-P-D": ("e0", "p0", "d0"), "ED-P": ("ed0", "p0")}


@pytest.mark.parametrize("case", CASES)
async def test_tokens_equal_generate(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    settings = dict(CASES[case])
    if settings.pop("trace", False):
        settings["trace"] = tmp_path / "trace"
    model = tiny_models.make_tiny_model("qwen3_vl", tmp_path / "model")
    for name, value in environment(**settings.pop("baselines", {})).items():
        monkeypatch.setenv(name, value)
    small = "kv_cache_bytes" in settings["instances"]
    async with start_fleet(model, "E-P-ED-EPD-D", **settings) as fleet:
        for _ in range(3):  # whether sequences meet in the small pool is a matter of timing
            for names in TOPOLOGIES.values():
                await fleet.check_tokens(names)
            preempted = [(await figures(url))["preemptions_total"] for url in fleet.urls.values()]
            if not small or sum(preempted):
                return
    raise AssertionError("the pool was large enough for all")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *tiny_models.STATE_KINDS])
async def test_tokens_are_the_same_under_shares_and_the_guard(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor under shares, parted threads and a guard that always holds encodes back."""
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    path = tiny_models.make_tiny_model(kind, tmp_path / "model")
    settings = {
        "roles": {
            "E": {"share": 0.5},
            "P": {"threads": 1},  # it has the same cores as the others, in truth
        },
        "slo": {"tpot_ms": 0.01},  # no step keeps it: encodes get their least share while anything decodes
    }
    async with start_fleet(path, "(E-D)-ED-P", instances={"threads": 2}, **settings) as fleet:
        async with http_client() as client:
            info = {name: (await client.get(f"{url}/info")).json() for name, url in fleet.urls.items()}
        assert {name for name, said in info.items() if "share" in said} == {"e0", "d0"}
        for name in ("e0", "d0"):
            share = info[name]["share"]
            assert (share["part"], share["strength"]) == (0.5, "cooperative")
            assert any("affinity to cores" in mechanism for mechanism in share["mechanisms"])
        await fleet.check_tokens(("e0", "d0", "p0"))
        await fleet.check_tokens(("ed0", "p0"))
