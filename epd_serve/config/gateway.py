"""The gateway's section of the deployment file: server, keys, limits, media."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from epd_serve.config.sections import FilePath, Port, Positive, Section, resolved_path
from epd_serve.config.sizes import Bytes
from epd_serve.protocol.addresses import is_loopback
from epd_serve.types import Routing

_DOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"

InstanceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
InstanceUrl = Annotated[
    str, Field(pattern=r"^https?://[^/?#\s@]+/?$"), AfterValidator(lambda url: url.rstrip("/"))
]
#: A host, or ``*.example.com`` for all its subdomains.
Domain = Annotated[str, Field(pattern=rf"^(\*\.)?{_DOMAIN}(\.{_DOMAIN})*$")]
#: An origin as browsers send it, without a path; ``*`` for all.
Origin = Annotated[str, Field(pattern=r"^(\*|https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$")]


class SecretSource(BaseModel):
    """Location of a secret outside the deployment file; surrounding whitespace is stripped."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    file: FilePath | None = None

    @model_validator(mode="after")
    def _one_source(self) -> SecretSource:
        if (self.env is None) == (self.file is None):
            raise ValueError("write either {env: VARIABLE} or {file: PATH}")
        return self


#: A literal secret, or its location.
Secret = Annotated[str, Field(min_length=1)] | SecretSource


def read_secret(secret: str | SecretSource | None, key: str) -> str | None:
    """Return the secret; ``key`` is its key in the deployment file, for errors.

    Raises ValueError if the variable or file is missing or empty.
    """
    if secret is None or isinstance(secret, str):
        return secret
    if secret.env is not None:
        place = f"the environment variable {secret.env}"
        text = os.environ.get(secret.env, "").strip()
    else:
        assert secret.file is not None
        place = f"the file {secret.file}"
        try:
            text = secret.file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
            raise ValueError(f"{key}: {place} cannot be read: {reason}") from error
    if not text:
        raise ValueError(f"{key}: {place} holds nothing; put the secret there")
    return text


class ApiKeyConfig(Section):
    """One API key, identified by its hash."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Name in logs and metrics.")
    hash: str = Field(
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="sha256: and 64 hex digits, as printed by 'epd-serve key new NAME'.",
    )
    max_concurrent: int | None = Field(default=None, ge=1, description="Concurrent choices of all its requests.")


class AdminConfig(Section):
    """The admin plane: a server separate from the clients' API."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int | None = Field(default=None, ge=1, le=65535, description="null: no admin plane.")
    key: Secret | None = Field(
        default=None,
        repr=False,
        description="Bearer token of the admin plane: text, {env: VARIABLE} or {file: PATH}. Required unless host "
        "is the loopback interface.",
    )

    @model_validator(mode="after")
    def _key_where_others_come(self) -> AdminConfig:
        if self.port is not None and self.key is None and not is_loopback(self.host):
            raise ValueError(
                f"an admin plane on {self.host} needs its own key; set admin.key, or listen on 127.0.0.1"
            )
        return self

    def check_key(self) -> None:
        """Check that a deployment with a cluster key has an admin key. Raises ValueError."""
        if self.port is not None and self.key is None:
            raise ValueError(
                "cluster_key protects the instances, but the admin plane controls them too: also set "
                "gateway.admin.key"
            )


class MediaConfig(Section):
    """Media accepted by the gateway, and the hosts to fetch them from."""

    max_pixels: int = Field(
        default=32 << 20,
        gt=0,
        description="Largest image or video frame; all images of a request together may have four times as many.",
    )
    max_seconds: Positive = Field(default=1800.0, description="Longest video or audio; a model may accept less.")
    max_items: int = Field(default=64, ge=1, description="Most images, videos and audio clips in a request.")
    allow_private: bool | None = Field(
        default=None,
        description="Whether media URLs may point into private networks. null: only if the gateway listens on "
        "the loopback interface without API keys.",
    )
    allowed_domains: tuple[Domain, ...] | None = Field(
        default=None,
        description="Allowed hosts of media URLs and redirects; '*.example.com' allows all its subdomains.",
    )
    trust_env: bool = Field(
        default=False,
        description="Whether to fetch media through the proxies of HTTP_PROXY, HTTPS_PROXY and NO_PROXY, where "
        "allow_private has no effect.",
    )


class GatewayConfig(Section):
    """The OpenAI-compatible server for clients."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every interface."
    )
    port: Port = Field(default=8000, description="0 chooses a free port.")
    max_body_bytes: Bytes = Field(
        default=ByteSize(64 << 20),
        validate_default=True,
        description="Largest request body, and most bytes of a request's media together.",
    )
    request_timeout_s: Positive = Field(default=600.0, description="Time limit of a request.")
    max_in_flight: int = Field(
        default=1024,
        ge=1,
        description="Concurrent choices on the instances; further requests wait in a queue.",
    )
    max_queue: int = Field(default=4096, ge=0, description="Longest queue; further requests get a 429.")
    queue_timeout_s: Positive = Field(
        default=60.0, description="Longest wait in the queue before the client gets a 429."
    )
    routing: Routing = Field(
        default="least_loaded",
        description="Choice of P and D. least_loaded: the pair with the least waiting, computing and transfer "
        "time. prefix_affinity: the same, but a prefix cached by P costs nothing. round_robin: in turn.",
    )
    instances: dict[InstanceName, InstanceUrl] | None = Field(
        default=None,
        description="Control URLs, by name, of instances started elsewhere; null: those of the topology.",
    )
    probe_timeout_s: Positive = Field(
        default=6.0,
        description="Time after which an unresponsive instance counts as down and its requests move to others.",
    )
    media: MediaConfig = MediaConfig()
    api_keys: tuple[ApiKeyConfig, ...] = Field(
        default=(), description="Hashes of API keys; clients send a key as bearer token. []: no authentication."
    )
    admin: AdminConfig = AdminConfig()
    access_log: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File for a line of JSON per request; '-' is the standard output.",
    )
    cors: tuple[Origin, ...] = Field(
        default=(),
        description='Origins whose web pages may call the API from a browser, as in ["https://chat.example.com"]; '
        '["*"] for all.',
    )

    @field_validator("access_log")
    @classmethod
    def _resolve_log(cls, log: str | None, info: ValidationInfo) -> str | None:
        return log if log in ("-", None) else str(resolved_path(Path(log), info))

    @model_validator(mode="after")
    def _keys_differ(self) -> GatewayConfig:
        for what in ("name", "hash"):
            values = [getattr(key, what) for key in self.api_keys]
            if twice := {value for value in values if values.count(value) > 1}:
                raise ValueError(f"api_keys: the {what} {min(twice)} occurs twice; it must be unique")
        return self
