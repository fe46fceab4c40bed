"""The gateway's section of the deployment file: server, keys, limits, media."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, model_validator

from epd_serve.config.sections import FilePath, Port, Seconds, Section, resolved_path
from epd_serve.config.sizes import Bytes
from epd_serve.protocol.addresses import is_loopback
from epd_serve.types import Routing

_DOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"

InstanceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
InstanceUrl = Annotated[
    str, Field(pattern=r"^https?://[^/?#\s@]+/?$"), AfterValidator(lambda url: url.rstrip("/"))
]
#: A host, or ``*.example.com`` for all below one.
Domain = Annotated[str, Field(pattern=rf"^(\*\.)?{_DOMAIN}(\.{_DOMAIN})*$")]
#: As browsers send it, without a path; ``*`` for all.
Origin = Annotated[str, Field(pattern=r"^(\*|https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$")]


class SecretSource(BaseModel):
    """The place of a secret that does not stand in the deployment file; blanks around the secret do not count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    file: FilePath | None = None

    @model_validator(mode="after")
    def _one_source(self) -> SecretSource:
        if (self.env is None) == (self.file is None):
            raise ValueError("write either {env: VARIABLE} or {file: PATH}")
        return self


#: A secret as it is, or where to read it.
Secret = Annotated[str, Field(min_length=1)] | SecretSource


def read_secret(secret: str | SecretSource | None, key: str) -> str | None:
    """The secret itself; ``key`` is where the deployment file has it, for errors.

    Raises ValueError where the variable or the file is not there, or holds nothing.
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


class KeyLimits(Section):
    """Limits of the holder of an API key."""

    max_concurrent: int | None = Field(
        default=None, ge=1, description="Choices of requests at once; null: no limit."
    )


class ApiKeyConfig(KeyLimits):
    """One API key, by its hash."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="For logs and metrics.")
    hash: str = Field(
        pattern=r"^sha256:[0-9a-f]{64}$",
        description="sha256: and 64 hex digits, as 'epd-serve key new NAME' prints them.",
    )


class AdminConfig(Section):
    """The admin plane: a server of its own, apart from what clients reach."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int | None = Field(default=None, ge=1, le=65535, description="null: there is none.")
    key: Secret | None = Field(
        default=None,
        repr=False,
        description="Bearer token of the admin plane alone: text, {env: VARIABLE} or {file: PATH}. Needed where "
        "host is not the loopback interface.",
    )

    @model_validator(mode="after")
    def _key_where_others_come(self) -> AdminConfig:
        if self.port is not None and self.key is None and not is_loopback(self.host):
            raise ValueError(
                f"an admin plane on {self.host} needs a key of its own; set admin.key, or listen on 127.0.0.1"
            )
        return self


def check_admin_key(admin: AdminConfig) -> None:
    """Check that a deployment with a cluster key has an admin key. Raises ValueError."""
    if admin.port is not None and admin.key is None:
        raise ValueError(
            "cluster_key keeps others away from the instances, and the admin plane commands them: "
            "set gateway.admin.key, too"
        )


class MediaConfig(Section):
    """The media that the gateway accepts and the places from which it may fetch them."""

    max_bytes: Bytes = Field(
        default=ByteSize(64 * 1024**2),
        validate_default=True,
        description="Largest file of an image, a video or a sound.",
    )
    max_pixels: int = Field(
        default=32 * 1024**2,
        gt=0,
        description="Largest image or video frame, in pixels; the images of a request have at most four times as "
        "many together.",
    )
    max_seconds: Seconds = Field(default=1800.0, description="Longest video or sound; a model may take less.")
    max_items: int = Field(default=64, ge=1, description="Most images, videos and sounds of a request.")
    allow_private: bool | None = Field(
        default=None,
        description="Whether media URLs may lead into private networks. "
        "null: only while the gateway listens on the loopback interface and has no API keys.",
    )
    allowed_domains: tuple[Domain, ...] | None = Field(
        default=None,
        description="Hosts that media URLs, redirects included, may name; '*.example.com' for all below one. "
        "null: any.",
    )
    trust_env: bool = Field(
        default=False,
        description="Whether media are fetched by the proxies of HTTP_PROXY, HTTPS_PROXY and NO_PROXY. A proxy "
        "resolves names by itself, so allow_private does not count there.",
    )


def _resolve_log(log: str, info: ValidationInfo) -> str:
    return log if log == "-" else str(resolved_path(Path(log), info))


class GatewayConfig(Section):
    """The OpenAI-compatible server that clients talk to."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 is every interface."
    )
    port: Port = Field(default=8000, description="0 chooses a free port.")
    max_body_bytes: Bytes = Field(
        default=ByteSize(64 * 1024**2), validate_default=True, description="Largest request body."
    )
    request_timeout_s: Seconds = Field(default=600.0, description="Longest time for one request.")
    max_in_flight: int = Field(
        default=1024,
        ge=1,
        description="Choices of requests that run on the instances at once; other requests wait in a queue.",
    )
    max_queue: int = Field(default=4096, ge=0, description="Requests that may wait; others get a 429.")
    queue_timeout_s: Seconds = Field(
        default=60.0, description="Longest wait in the queue; then the client gets a 429."
    )
    routing: Routing = Field(
        default="least_loaded",
        description="How P and D of a request are chosen. least_loaded: the pair that costs it the fewest seconds "
        "of waiting, computing and transfer. "
        "prefix_affinity: the cheapest, where a beginning of the prompt that P has computed before costs nothing. "
        "round_robin: in turn. Images always go where equal ones went, unless that encoder has too much to do.",
    )
    instances: dict[InstanceName, InstanceUrl] | None = Field(
        default=None,
        description="Control URLs of instances that were started elsewhere, by name; null: those of the topology.",
    )
    probe_timeout_s: Seconds = Field(
        default=6.0,
        description="An instance whose process answers nothing for so long is down: its requests go to others. A "
        "step may take as long as it takes.",
    )
    media: MediaConfig = MediaConfig()
    api_key: Secret | None = Field(
        default=None,
        repr=False,
        description="Clients must send it as a bearer token: text, {env: VARIABLE} or {file: PATH}.",
    )
    api_keys: tuple[ApiKeyConfig, ...] = Field(
        default=(), description="Keys by their hash, each with limits of its own."
    )
    admin: AdminConfig = AdminConfig()
    access_log: Annotated[str, Field(min_length=1), AfterValidator(_resolve_log)] | None = Field(
        default=None,
        description="File, relative to this one, that gets a line of JSON for each request; '-' is the standard "
        "output. It may be moved away at any time. null: there is none.",
    )
    cors: tuple[Origin, ...] = Field(
        default=(),
        description='Origins whose web pages may call the API from a browser, as in ["https://chat.example.com"]; '
        '["*"] for all. []: none.',
    )

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return self.api_key is not None or bool(self.api_keys)

    @model_validator(mode="after")
    def _keys_differ(self) -> GatewayConfig:
        for what in ("name", "hash"):
            values = [getattr(key, what) for key in self.api_keys]
            if twice := {value for value in values if values.count(value) > 1}:
                raise ValueError(f"api_keys: the {what} {min(twice)} occurs twice; each key has its own")
        return self
