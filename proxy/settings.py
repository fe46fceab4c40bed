"""What the gateway is told once, at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from epd_serve.backends.vllm_target import VllmTarget
from epd_serve.config import DeploymentConfig
from epd_serve.config.gateway import AdminConfig, ApiKeyConfig, check_admin_key, read_secret
from epd_serve.media.picture import MediaLimits
from epd_serve.protocol.addresses import is_loopback
from epd_serve.routing.stealing import DEFAULT_RULE, StealRule
from epd_serve.topology.notation import Topology
from epd_serve.types import Routing
from proxy.arrival import ArrivalLimits
from proxy.breaker import BreakerLimits
from proxy.elastic import ElasticSettings
from proxy.engines import vllm_targets
from proxy.failover import Failover
from proxy.health import HealthSettings
from proxy.redeploy import RedeploySettings


@dataclass(frozen=True, kw_only=True)
class AdminSettings:
    """Where the admin plane listens; ``key`` None lets in whoever reaches it."""

    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The gateway's part of a deployment, with every default resolved.

    Attributes:
        admin: where the admin plane listens; None: there is none.
        is_local: whether only this machine can reach the gateway.
        arrival: how long a request may take to arrive.
        allow_private: whether media URLs may lead to addresses that are not public.
        max_items: most media items of a request.
        allowed_domains, allowed_ports: what media URLs may name; None: any.
        allowed_file_dirs: directories, resolved, whose files a ``file://`` URL may name.
        api_key: a key in plain text; api_keys: others by their hash. Both may be there.
        workers: processes of this gateway, as the deployment has it.
        max_in_flight, max_queue, queue_timeout_s: of the admission queue, of this worker.
        shed_ttft_s: refuse what cannot have its first token within so long; None: refuse nothing for that.
        guard_health, guard_metrics: show instances, and metrics, to holders of an API key only.
        poll_interval_s: how often each instance is asked for its state.
        encode_timeout_s: how long an instance may take to encode an item before another is asked. P must still
            be waiting for the feature then.
        failover: what a request may try that lost its instance.
        health: how instances are watched.
        trace: directory for the file that says what the gateway did when; None: none is written.
        access_log: file that gets a line for each request, "-" for the standard output; None: none is written.
        dashboard: whether there is a live page.
        cors: origins whose pages may read answers.
        elastic, redeploy: the controller that this gateway runs, and how it answers drifts; None: not at all.
        topology: that the instances make up, where it is known.
        routing: how P and D are chosen. parallel_encode: whether a request's items go to several encoders.
        stealing: how instances that steal take requests from the others.
        cluster_key: that the instances ask for.
        startup_wait_s: how long after the gateway's start requests wait for instances that are still loading.
    """

    is_local: bool = False
    max_body_bytes: int = 64 * 1024 * 1024
    request_timeout_s: float = 600.0
    arrival: ArrivalLimits = field(default_factory=ArrivalLimits)
    api_key: str | None = field(default=None, repr=False)
    api_keys: tuple[ApiKeyConfig, ...] = ()
    workers: int = 1
    max_in_flight: int = 1024
    max_queue: int = 4096
    queue_timeout_s: float = 60.0
    shed_ttft_s: float | None = None
    guard_health: bool = False
    guard_metrics: bool = False
    media: MediaLimits = field(default_factory=MediaLimits)
    fetch_timeout_s: float = 10.0
    max_items: int = 64
    allow_private: bool = False
    allowed_domains: tuple[str, ...] | None = None
    allowed_ports: tuple[int, ...] | None = None
    allowed_file_dirs: tuple[Path, ...] = ()
    poll_interval_s: float = 0.5
    startup_wait_s: float = 60.0
    encode_timeout_s: float = 15.0
    failover: Failover = field(default_factory=Failover)
    health: HealthSettings = field(default_factory=HealthSettings)
    trace: Path | None = None
    access_log: str | None = None
    dashboard: bool = True
    cors: tuple[str, ...] = ()
    topology: Topology | None = None
    admin: AdminSettings | None = None
    routing: Routing = "least_loaded"
    parallel_encode: bool = True
    stealing: StealRule = DEFAULT_RULE
    vllm: Mapping[str, VllmTarget] | None = None
    elastic: ElasticSettings | None = None
    redeploy: RedeploySettings | None = None
    cluster_key: str | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, config: DeploymentConfig, host: str, *, controls: bool = False, part: tuple[int, int] = (0, 1)
    ) -> GatewaySettings:
        """The settings of a deployment whose gateway listens on ``host``.

        ``controls``: it is the one gateway of the deployment that runs the controller, where that is enabled.
        ``part``: (index, number) of the worker, among which requests at once are divided.
        """
        gateway, media = config.gateway, config.gateway.media
        cluster_key = config.read_cluster_key()
        if cluster_key is not None:
            check_admin_key(gateway.admin)
        return cls(
            is_local=is_loopback(host),
            max_body_bytes=gateway.max_body_bytes,
            request_timeout_s=gateway.request_timeout_s,
            arrival=ArrivalLimits(
                header_s=gateway.header_timeout_s,
                body_s=gateway.body_timeout_s,
                min_body_rate=gateway.min_body_rate,
            ),
            api_key=read_secret(gateway.api_key, "gateway.api_key"),
            api_keys=gateway.api_keys,
            workers=gateway.workers,
            max_in_flight=max(1, share_of(gateway.max_in_flight, *part)),
            max_queue=share_of(gateway.max_queue, *part),
            queue_timeout_s=gateway.queue_timeout_s,
            shed_ttft_s=config.slo.ttft_ms / 1e3 if gateway.shed and config.slo.ttft_ms else None,
            guard_health=gateway.guard_health,
            guard_metrics=gateway.guard_metrics,
            media=MediaLimits(max_pixels=media.max_pixels, max_bytes=media.max_bytes),
            fetch_timeout_s=media.fetch_timeout_s,
            max_items=media.max_items,
            allowed_domains=media.allowed_domains,
            allowed_ports=media.allowed_ports,
            allow_private=_is_private(config, host) if media.allow_private is None else media.allow_private,
            encode_timeout_s=config.settings_for("P").feature_timeout_s / 2,
            failover=Failover(
                max_attempts=gateway.failover.max_attempts, wait_s=gateway.failover.wait_s_of(config.engine)
            ),
            health=HealthSettings(
                probe_interval_s=gateway.health.probe_interval_s,
                probe_timeout_s=gateway.health.probe_timeout_s,
                breaker=BreakerLimits(
                    num_consecutive=gateway.health.max_failures,
                    failure_rate=gateway.health.max_failure_rate,
                    slow_start_s=gateway.health.slow_start_s,
                ),
            ),
            trace=config.trace,
            access_log=gateway.access_log,
            dashboard=gateway.dashboard,
            cors=gateway.cors,
            topology=config.topology,
            admin=_admin(gateway.admin),
            routing=gateway.routing,
            elastic=ElasticSettings.of(config) if controls else None,
            redeploy=RedeploySettings.of(config) if controls else None,
            cluster_key=cluster_key,
            parallel_encode=gateway.parallel_encode,
            stealing=StealRule(
                threshold=gateway.stealing.threshold,
                batch=gateway.stealing.batch,
                collect_s=gateway.stealing.collect_ms / 1000,
            ),
            vllm=vllm_targets(config) if config.engine == "vllm" else None,
            allowed_file_dirs=tuple(Path(folder).expanduser().resolve() for folder in media.allowed_file_dirs),
        )


def _is_private(config: DeploymentConfig, host: str) -> bool:
    """Whether only this machine's users ask the gateway: not where there are keys, which are for others, who come
    through a reverse proxy."""
    gateway = config.gateway
    return is_loopback(host) and gateway.api_key is None and not gateway.api_keys


def share_of(total: int, index: int, number: int) -> int:
    """The part of a limit that worker ``index`` of ``number`` keeps to; the parts add up to ``total``."""
    return total // number + (index < total % number)


def _admin(config: AdminConfig) -> AdminSettings | None:
    if config.port is None:
        return None
    key = read_secret(config.key, "gateway.admin.key")
    return AdminSettings(host=config.host, port=config.port, key=key)
