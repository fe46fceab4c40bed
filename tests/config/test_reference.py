"""Every option is written once, with all that is said of it; the pages and the schema are made from that."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from epd_serve.config import DeploymentConfig, parse_config
from epd_serve.config.applied import Section, applied, changes

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load()
OPTIONS = {path: field for path, _, _, field in generate.options_of(DeploymentConfig)}


def test_every_option_says_what_it_is_and_how_a_change_is_applied() -> None:
    assert len(OPTIONS) > 100
    for path, field in OPTIONS.items():
        assert field.description and field.description.endswith((".", ")")), path
        assert "[]." in path or applied(field).how != "place", f"{path}: write Hot[...], Rebuild[...] or another"


@pytest.mark.parametrize("path", ["docs/reference/options.md", "docs/reference/cli.md", "deploy/schema.json"])
def test_what_is_made_from_them_is_current(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == generate.pages()[path], "run: python docs/generate.py"


def test_changes_are_named_by_their_paths() -> None:
    old = parse_config("topology: EPD")
    new = parse_config(
        f"""
        topology: PD
        slo: {{ttft_ms: 5}}
        gateway: {{probe_timeout_s: 2, api_keys: [{{name: a, hash: 'sha256:{"0" * 64}'}}]}}
        elastic: {{cooldown_s: 5}}
        instances: {{kv_transfer: {{mode: pull}}}}
        """
    )
    assert {path: how.how for path, how in changes(old, new)} == {
        "topology": "hot",
        "slo.ttft_ms": "restart",
        "gateway.probe_timeout_s": "hot",
        "gateway.api_keys": "hot",
        "elastic.cooldown_s": "anew",
        "instances.kv_transfer.mode": "rebuild",
    }
    assert list(changes(new, new)) == []


def test_a_section_is_no_option() -> None:
    assert all(
        generate.section_of(field.annotation) is None or "api_keys" in path or path == "model"
        for path, field in OPTIONS.items()
    )
    assert issubclass(generate.section_of(OPTIONS["gateway.api_keys"].annotation), Section)
