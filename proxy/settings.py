"""The deployment file as one gateway process has it, now."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from epd_serve.config import DeploymentConfig, GatewayConfig
from epd_serve.config.gateway import check_admin_key, read_secret
from epd_serve.config.sections import HANG_TIMEOUT_S
from epd_serve.protocol.addresses import is_loopback
from epd_serve.rpc.tls import TlsFiles

#: Of the time until an instance that hangs is replaced: a part, and seconds.
_START_MARGIN, _PAUSE_S = 1.5, 10.0


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The options are those of ``config``; here is what follows from them and from the gateway's place.

    Attributes:
        host: on which the gateway listens.
        api_key, admin_key, cluster_key: the secrets themselves.
        tls: the files with which it calls instances and serves the admin plane; None: it does so in plain.
        poll_interval_s: how often each instance is asked for its state.
        startup_wait_s: how long after the gateway's start requests wait for instances that are still loading.
    """

    config: DeploymentConfig = field(default_factory=DeploymentConfig)
    host: str = "127.0.0.1"
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    cluster_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    poll_interval_s: float = 0.2
    startup_wait_s: float = 60.0

    @classmethod
    def of(cls, config: DeploymentConfig, host: str) -> GatewaySettings:
        """With its secrets. Raises ValueError where one cannot be read, or the admin plane needs a key."""
        cluster_key, tls = config.read_cluster_key(), config.read_tls()
        if cluster_key is not None:
            check_admin_key(config.gateway.admin)
        if tls is not None:
            tls.check(None if config.gateway.admin.port is None else config.gateway.admin.host)
        return cls(
            config=config,
            host=host,
            api_key=read_secret(config.gateway.api_key, "gateway.api_key"),
            admin_key=read_secret(config.gateway.admin.key, "gateway.admin.key"),
            cluster_key=cluster_key,
            tls=tls,
        )

    @cached_property
    def gateway(self) -> GatewayConfig:
        return self.config.gateway

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return is_loopback(self.host)

    @cached_property
    def allow_private(self) -> bool:
        """Whether media URLs may lead to addresses that are not public.

        Where nothing is said, only this machine's users may: not where there are keys, which are for others, who
        come through a reverse proxy.
        """
        chosen = self.gateway.media.allow_private
        return self.is_local and not self.gateway.needs_key if chosen is None else chosen

    @cached_property
    def encode_timeout_s(self) -> float:
        """The time for which an instance may encode an item before another is asked: P waits for twice that."""
        return self.config.settings_for("P").feature_timeout_s / 2

    def replacement_wait_s(self, start_s: float) -> float:
        """Return the seconds for which a request waits for an instance where none is left for a stage.

        They are those that it takes to replace an instance that hangs: a supervisor notices that within 4/3 of
        ``HANG_TIMEOUT_S``, pauses for a second or more, and a start beside load takes longer than the first one,
        which took ``start_s``. With ``restart: never`` none comes, but one that is silent may report again.
        """
        if self.config.restart == "never":
            return min(self.gateway.request_timeout_s, self.gateway.probe_timeout_s)
        replaced_s = _START_MARGIN * (HANG_TIMEOUT_S + start_s) + _PAUSE_S
        return min(self.gateway.request_timeout_s, replaced_s)
