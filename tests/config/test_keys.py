"""Keys and secrets in a deployment file: by hash, by reference, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd_serve.cli.app import app
from epd_serve.config import load_config, parse_config
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import hash_key
from proxy.settings import GatewaySettings


def test_a_new_key_fits_into_a_deployment_file() -> None:
    text = CliRunner().invoke(app, ["key", "new", "alice"]).stdout
    secret, _, rest = text.partition("\n")
    [key] = parse_config(rest[rest.index("gateway:") :]).gateway.api_keys
    assert (key.name, key.hash) == ("alice", hash_key(secret))
    assert isinstance(CliRunner().invoke(app, ["key", "new", "a b"]).exception, ValueError)


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("{cluster_key: {env: A_KEY}, gateway: {admin: {port: 8001, key: {file: admin.key}}}}")
    config = load_config(file)
    gateway = config.gateway
    with pytest.raises(ValueError, match="cluster_key: the environment variable A_KEY holds nothing"):
        read_secret(config.cluster_key, "cluster_key")
    monkeypatch.setenv("A_KEY", "one")
    assert read_secret(config.cluster_key, "cluster_key") == "one"
    with pytest.raises(ValueError, match=r"admin\.key cannot be read: No such file"):
        read_secret(gateway.admin.key, "gateway.admin.key")
    (tmp_path / "admin.key").write_text(" two\n")
    assert read_secret(gateway.admin.key, "gateway.admin.key") == "two"
    again = parse_config(load_config(file).model_dump_json(exclude_unset=True))  # as the gateway's process gets it
    assert again.gateway.admin.key == gateway.admin.key and again.cluster_key == config.cluster_key


def test_the_cluster_key_is_long_enough_and_comes_from_file_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-secret-of-this-cluster"
    config = parse_config(f"cluster_key: {{file: {tmp_path / 'cluster.key'}}}")
    (tmp_path / "cluster.key").write_text(key)
    assert config.read_cluster_key() == key and key not in repr(config)
    (tmp_path / "cluster.key").write_text("too short")
    with pytest.raises(ValueError, match="16 printable ASCII characters") as refused:
        config.read_cluster_key()
    assert "too short" not in str(refused.value)
    monkeypatch.setenv("EPD_SERVE_CLUSTER_KEY", key)
    assert parse_config("").read_cluster_key() == key


def test_a_cluster_key_asks_for_an_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = "gateway: {admin: {port: 8001%s}}"
    with pytest.raises(ValueError, match=r"also set gateway\.admin\.key"):
        parse_config("cluster_key: only-this-cluster-knows\n" + admin % "")
    parse_config("cluster_key: only-this-cluster-knows\n" + admin % ", key: another-secret")
    alone = parse_config(admin % "")
    GatewaySettings.of(alone, "127.0.0.1")
    monkeypatch.setenv("EPD_SERVE_CLUSTER_KEY", "only-this-cluster-knows")
    with pytest.raises(ValueError, match=r"also set gateway\.admin\.key"):
        GatewaySettings.of(alone, "127.0.0.1")
