"""Settings of one gateway process, derived from the deployment file."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from epd_serve.config import DeploymentConfig, GatewayConfig
from epd_serve.config.gateway import read_secret
from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.protocol.addresses import is_loopback
from epd_serve.rpc.tls import TlsFiles

#: Time to replace a hanging instance: factor on detection and start, and the supervisor's pause.
_START_MARGIN, _PAUSE_S = 1.5, 10.0


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The deployment's ``config``, and values derived from it and the gateway's address.

    Attributes:
        host: listening address.
        admin_key, cluster_key: secrets in plain text.
        tls: files for calling instances and serving the admin API; None: no TLS.
        poll_interval_s: interval between questions to an instance without reports.
        startup_wait_s: time after the start in which requests wait for loading instances.
    """

    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    host: str = "127.0.0.1"
    admin_key: str | None = field(default=None, repr=False)
    cluster_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    poll_interval_s: float = 0.2
    startup_wait_s: float = 60.0

    @classmethod
    def of(cls, config: DeploymentConfig, host: str) -> GatewaySettings:
        """Read the secrets. Raises ValueError if one is unreadable, or the admin API lacks a key."""
        cluster_key, tls = config.read_cluster_key(), config.read_tls()
        if cluster_key is not None:
            config.gateway.admin.check_key()
        if tls is not None:
            tls.check(None if config.gateway.admin.port is None else config.gateway.admin.host)
        return cls(
            config=config,
            host=host,
            admin_key=read_secret(config.gateway.admin.key, "gateway.admin.key"),
            cluster_key=cluster_key,
            tls=tls,
        )

    @cached_property
    def gateway(self) -> GatewayConfig:
        return self.config.gateway

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the gateway."""
        return is_loopback(self.host)

    @cached_property
    def allow_private(self) -> bool:
        """True if media URLs may lead to private addresses.

        The default allows it only for this machine's users; with API keys, others come through a reverse proxy.
        """
        chosen = self.gateway.media.allow_private
        return self.is_local and not self.gateway.api_keys if chosen is None else chosen

    def replacement_wait_s(self, start_s: float) -> float:
        """Return how long a request waits for an instance of a missing stage, in seconds.

        It is the time to replace a hanging instance: a supervisor notices within 4/3 of ``HANG_TIMEOUT_S``, pauses
        for a second or more, and a start under load takes longer than the first one's ``start_s``. With
        ``restart: never`` only a silent instance can return.
        """
        if self.config.restart == "never":
            return min(self.gateway.request_timeout_s, self.gateway.probe_timeout_s)
        replaced_s = _START_MARGIN * (HANG_TIMEOUT_S + start_s) + _PAUSE_S
        return min(self.gateway.request_timeout_s, replaced_s)
