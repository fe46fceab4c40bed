"""Shares, parted threads and a guard that always holds encodes back change when things happen, and no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_client import http_client
from identity import start_fleet
from tiny_models import STATE_KINDS, make_tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", *STATE_KINDS])
async def test_tokens_are_the_same_under_shares_and_the_guard(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_SERVE_CACHE", str(tmp_path / "cache"))
    path = make_tiny_model(kind, tmp_path / "model")
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
