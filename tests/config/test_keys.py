"""Keys and secrets in a deployment file: by hash, by reference, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd_serve.cli.app import app
from epd_serve.config import ConfigError, load_config, parse_config
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import hash_key
from proxy.settings import GatewaySettings

HASH = "sha256:" + "0" * 64


def test_a_new_key_fits_into_a_deployment_file() -> None:
    text = CliRunner().invoke(app, ["key", "new", "alice"]).stdout
    secret, _, rest = text.partition("\n")
    [key] = parse_config(rest[rest.index("gateway:") :]).gateway.api_keys
    assert (key.name, key.hash) == ("alice", hash_key(secret))
    assert isinstance(CliRunner().invoke(app, ["key", "new", "a b"]).exception, ValueError)


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("gateway: {api_key: {env: A_KEY}, admin: {port: 8001, key: {file: admin.key}}}")
    gateway = load_config(file).gateway
    with pytest.raises(ValueError, match=r"gateway\.api_key: the environment variable A_KEY holds nothing"):
        read_secret(gateway.api_key, "gateway.api_key")
    monkeypatch.setenv("A_KEY", "one")
    assert read_secret(gateway.api_key, "gateway.api_key") == "one"
    with pytest.raises(ValueError, match=r"admin\.key cannot be read: No such file"):
        read_secret(gateway.admin.key, "gateway.admin.key")
    (tmp_path / "admin.key").write_text(" two\n")
    assert read_secret(gateway.admin.key, "gateway.admin.key") == "two"
    again = parse_config(load_config(file).model_dump_json(exclude_unset=True))  # as the gateway's process gets it
    assert again.gateway.admin.key == gateway.admin.key and again.gateway.api_key == gateway.api_key


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{api_key: 31337}", "gateway.api_key: write text in quotes, {env: VARIABLE} or {file: PATH}"),
        ("{api_key: {env: A, file: b}}", "gateway.api_key: write text in quotes"),
        ("{api_key: {env: 31337}}", "gateway.api_key: write text in quotes"),
        ("{api_keys: [{name: a, hash: 31337}]}", "gateway.api_keys.0.hash: "),
        ("{api_keys: [{name: a, hash: 'x31337'}]}", "'epd-serve key new NAME' makes one"),
        (f"{{api_keys: [{{name: a/b, hash: '{HASH}'}}]}}", "gateway.api_keys.0.name: "),
        (
            f"{{api_keys: [{{name: a, hash: '{HASH}'}}, {{name: b, hash: '{HASH}'}}]}}",
            "the hash sha256:0000",
        ),
        (
            f"{{api_keys: [{{name: a, hash: '{HASH}', rate: 2}}]}}",
            "gateway.api_keys.0.rate: Extra inputs are not permitted",
        ),
        ("{admin: {host: 0.0.0.0, port: 1}}", "needs a key of its own"),
        ("{media: {allowed_domains: ['http://x']}}", "'http://x' is no domain"),
        ("{cors: ['chat.example.com']}", "'chat.example.com' is no origin"),
        ("{cors: ['https://chat.example.com/']}", "is no origin; write what browsers send"),
        ("{cors: ['https://Chat.example.com']}", "is no origin; write what browsers send"),
    ],
)
def test_what_is_wrong_is_said_without_the_secret(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(f"gateway: {text}")
    assert problem in str(refusal.value)
    assert "31337" not in str(refusal.value)


def test_no_secret_in_the_text_of_a_deployment() -> None:
    config = parse_config("gateway: {api_key: s3cret-a, admin: {port: 8001, key: s3cret-b}}")
    assert "s3cret" not in repr(config)


def test_the_cluster_key_is_a_secret_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, key = tmp_path / "deployment.yaml", "a-secret-of-this-cluster"
    file.write_text("cluster_key: {file: cluster.key}")
    (tmp_path / "cluster.key").write_text(f"{key}\n")
    config = load_config(file)
    assert config.read_cluster_key() == key and key not in repr(config)
    (tmp_path / "cluster.key").write_text("too short")
    with pytest.raises(ValueError, match="16 printable ASCII characters") as refused:
        config.read_cluster_key()
    assert "too short" not in str(refused.value)
    for text, words in (
        ("cluster_key: 7", "write text in quotes"),
        ("{engine: vllm, cluster_key: x}", "set tls, too"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config(text)
    monkeypatch.setenv("EPD_SERVE_CLUSTER_KEY", key)
    assert parse_config("").read_cluster_key() == key
    monkeypatch.delenv("EPD_SERVE_CLUSTER_KEY")
    assert parse_config("").read_cluster_key() is None


def test_a_cluster_key_asks_for_an_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = "gateway: {admin: {port: 8001%s}}"
    with pytest.raises(ValueError, match=r"set gateway\.admin\.key, too"):
        parse_config("cluster_key: only-this-cluster-knows\n" + admin % "")
    parse_config("cluster_key: only-this-cluster-knows\n" + admin % ", key: another-secret")
    alone = parse_config(admin % "")
    GatewaySettings.of(alone, "127.0.0.1")
    monkeypatch.setenv("EPD_SERVE_CLUSTER_KEY", "only-this-cluster-knows")
    with pytest.raises(ValueError, match=r"set gateway\.admin\.key, too"):
        GatewaySettings.of(alone, "127.0.0.1")
