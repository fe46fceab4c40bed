"""``epd-serve up FILE --on ray``: a deployment as actors of a Ray cluster.

A placement group has one bundle for each device group of the topology. In each bundle an actor runs ``epd-serve
instance --unit``, whose instances join the gateway; another actor runs the gateway. Ray chooses the hosts, shows
the devices and starts again what is lost; requests, features and KV do not pass through it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from device.datasheets import emulated_kind
from device.present import num_cores
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import ADMIN_KEY
from epd_serve.launch.commands import PROGRAM
from epd_serve.launch.deployment_record import resolved
from epd_serve.launch.remote.unit import check_portable
from epd_serve.protocol.addresses import is_loopback, is_wildcard, url_of
from epd_serve.rpc.admin import AdminClient, AdminRefused, AdminUnreachable
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology.placement import CPU, place_units

Spread = Literal["pack", "host"]

#: Of all actors of epd-serve.
NAMESPACE = "epd-serve"
_STRATEGIES = {"pack": "PACK", "host": "SPREAD"}
#: Resources that actors ask for by an option of their own.
_OWN_OPTION = {"CPU": "num_cpus", "GPU": "num_gpus"}
_GATEWAY, _ADMIN_PORT, _API_KEY = "gateway", 8001, "EPD_SERVE_API_KEY"
_FILE = ("--config", "FILE")
#: The resource of the head alone; a gateway takes a little of that of its node, and no CPU.
_HEAD, _A_LITTLE = "node:__internal_head__", 0.001
#: Ray may have to add nodes first; an actor may be starting; a command that ends by itself is started again.
_PLACEMENT_TIMEOUT_S, _ANSWER_TIMEOUT_S, _AGAIN_S = 300.0, 5.0, 2.0
#: Beyond what a process needs by itself to end.
_GRACE_S = 15.0


class Group(NamedTuple):
    """The instances of one bundle, which takes ``amount`` of a resource, as in 1 NPU."""

    name: str
    unit: int
    replica: int
    resource: str
    amount: int


def groups(config: DeploymentConfig) -> tuple[Group, ...]:
    """Return the device groups in placement order. Raises ValueError for a deployment that cannot run on Ray."""
    check_portable(config)
    if config.starts_master:
        raise ValueError("feature_store: mooncake needs the address of its master; set mooncake.master")
    if config.gateway.port == 0:
        raise ValueError("gateway.port 0 would be a port that nobody knows; write one, as in 8000")
    found: list[Group] = []
    for unit, replicas in enumerate(place_units(config.topology, config.devices)):
        for replica, here in enumerate(replicas):
            devices = {device for one in here for device in one.devices}
            resource, amount = "GPU", len(devices)
            if devices == {CPU}:
                resource, amount = "CPU", sum(config.settings_for(str(one.role)).threads or 1 for one in here)
            elif emulated_kind(here[0].devices[0]).startswith(
                ("npu", "ascend")
            ):  # an emulated one as its original
                resource = "NPU"
            found.append(Group("-".join(one.name for one in here), unit, replica, resource, amount))
    return tuple(found)


class Agent:
    """An actor that runs a command of ``epd-serve`` on its host. Each ends with the other; Ray starts both again.

    Args:
        name: under which Ray shows its output.
        file: content of the deployment file.
        command: arguments, with FILE for the file's path and HOST for the address of the actor's host.
        variables: of the environment, besides Ray's.
        group: whose part of the host's cores it is to use; None: one.
    """

    def __init__(
        self, name: str, file: str, command: Sequence[str], variables: Mapping[str, str], group: Group | None
    ) -> None:
        import ray

        self._name = name
        self._directory = tempfile.TemporaryDirectory(prefix="epd-serve-ray-")
        path = Path(self._directory.name) / "deployment.yaml"
        path.write_text(file, encoding="utf-8")  # JSON is YAML
        words = {"FILE": str(path), "HOST": ray.util.get_node_ip_address()}
        self._command = [*PROGRAM, *(words.get(word, word) for word in command)]
        self._environment = {**os.environ, **variables}
        if group is not None:  # Ray allows one thread to an actor that takes no CPU
            node_id = ray.get_runtime_context().get_node_id()
            (has,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id]
            cores = num_cores() * group.amount / has[group.resource] / len(group.name.split("-"))
            self._environment["OMP_NUM_THREADS"] = str(max(1, int(cores)))
        self._started, self._stops = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()

    def __repr__(self) -> str:
        return self._name

    def _run(self) -> None:
        # The kernel ends the process with this thread, which ends with the actor.
        tied = [sys.executable, "-P", "-m", "epd_serve.lifeline", str(os.getpid()), *self._command]
        self._process = subprocess.Popen(tied, env=self._environment)
        self._started.set()
        self._process.wait()
        if not self._stops.wait(_AGAIN_S):
            os._exit(1)

    def was_restarted(self) -> bool:
        """Return whether its command has ended by itself."""
        import ray

        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def stop(self) -> None:
        """Let the command finish what it has, and return when it has ended."""
        self._stops.set()
        self._process.terminate()
        self._thread.join()
        self._directory.cleanup()


def up(config: DeploymentConfig, name: str, address: str, spread: Spread) -> str:
    """Start a deployment on a Ray cluster and wait until it is ready; return what to tell the user.

    Args:
        name: of the placement group, and prefix of its actors' names.
        address: of the cluster's head; "": the cluster of this machine, or of RAY_ADDRESS.

    Raises ValueError where Ray, the cluster, a key or resources are missing, or where a process dies before the
    deployment is ready; then nothing of it is left.
    """
    config = resolved(config)
    found, keys = groups(config), _keys(config)
    proof = CLUSTER_KEY if CLUSTER_KEY in keys else ADMIN_KEY  # with which instances join
    with _connected(address, logs=True) as ray:
        if _names(ray, name):
            raise ValueError(f"{name} is on this cluster; 'epd-serve down --deployment FILE --on ray' ends it")
        nodes = [(str(one["NodeManagerAddress"]), one["Resources"]) for one in ray.nodes() if one["Alive"]]
        ip, node = config.gateway.host, f"node:{config.gateway.host}"
        if is_wildcard(ip) or is_loopback(ip):
            ip, node = next(ip for ip, resources in nodes if _HEAD in resources), _HEAD
        elif ip not in (addresses := sorted(address for address, _ in nodes)):
            raise ValueError(f"gateway.host {ip} is no node of the cluster; there are {', '.join(addresses)}")
        port = config.gateway.admin.port or _ADMIN_PORT
        admin, file, actors = url_of(ip, port), _file(config, ip, port), dict[str, Any]()

        def start(one: str, group: Group | None, command: Sequence[str], **options: Any) -> None:
            options |= {"name": f"{name}/{one}", "lifetime": "detached", "max_restarts": -1}
            known = keys if group is None else {proof: keys[proof]}
            actors[one] = ray.remote(Agent).options(**options).remote(one, file, command, known, group)

        try:
            bundles = [{group.resource: group.amount} for group in found]
            placed = ray.util.placement_group(bundles, _STRATEGIES[spread], name=name, lifetime="detached")
            if not placed.wait(_PLACEMENT_TIMEOUT_S):
                raise ValueError(f"the cluster has no room for {bundles}; free are {ray.available_resources()}")
            start(_GATEWAY, None, ("proxy", *_FILE), num_cpus=0, resources={node: _A_LITTLE})
            for index, group in enumerate(found):
                takes: dict[str, Any] = {"num_cpus": 0, "resources": {group.resource: group.amount}}
                if group.resource in _OWN_OPTION:
                    takes = {"num_cpus": 0, _OWN_OPTION[group.resource]: group.amount}
                takes["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placed, index
                )
                part = ("--unit", str(group.unit), "--replica", str(group.replica))
                start(group.name, group, ("instance", *_FILE, *part, "--host", "HOST", "--join", admin), **takes)
            client = AdminClient(admin, {"authorization": f"Bearer {keys[ADMIN_KEY]}"})
            _wait_ready(ray, actors, client, {one.name for one in config.placement()})
        except BaseException:
            _end(ray, name, config)
            raise
    host = ip if is_wildcard(config.gateway.host) else config.gateway.host
    return (
        f"Ready: {config.topology} as placement group {name}. OpenAI API: {url_of(host, config.gateway.port)}/v1\n"
        f"epd-serve status --admin {admin}"
    )


def down(config: DeploymentConfig, name: str, address: str) -> None:
    """End a deployment: the gateway finishes its requests, then the instances leave.

    Raises ValueError where there is none of that name.
    """
    with _connected(address, logs=False) as ray:
        if not _end(ray, name, config):
            raise ValueError(f"there is no {name} on this cluster")


def _keys(config: DeploymentConfig) -> dict[str, str]:
    """Return the gateway's keys by variable; the cluster's is made where there is none. Raises ValueError."""
    admin = read_secret(config.gateway.admin.key, "gateway.admin.key") or os.environ.get(ADMIN_KEY, "").strip()
    if not admin:
        raise ValueError(f"instances of other hosts join through the admin plane: put a key into {ADMIN_KEY}")
    keys = {ADMIN_KEY: admin}
    if config.engine != "vllm":
        keys[CLUSTER_KEY] = config.read_cluster_key() or secrets.token_urlsafe(32)
    if (api := read_secret(config.gateway.api_key, "gateway.api_key")) is not None:
        keys[_API_KEY] = api
    return keys


@contextmanager
def _connected(address: str, *, logs: bool) -> Iterator[Any]:
    """Connect to a cluster; yield Ray."""
    try:
        import ray
        import ray.util.scheduling_strategies

        ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=logs, logging_level=logging.ERROR)
    except ModuleNotFoundError as error:
        raise ValueError(f"--on ray: {error.name} is not installed; run: pip install '.[ray]'") from error
    except (OSError, RuntimeError) as error:  # the latter where versions differ
        raise ValueError(f"--on ray: {error}; start a cluster with 'ray start --head'") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _names(ray: Any, name: str) -> list[str]:
    """Return the actors of a deployment, the gateway first."""
    own = [one for one in ray.util.list_named_actors() if one.startswith(f"{name}/")]
    return sorted(own, key=lambda one: not one.endswith(f"/{_GATEWAY}"))


def _file(config: DeploymentConfig, ip: str, admin_port: int) -> str:
    """Return the deployment file in the cluster, without its secrets."""
    emptied = {"instances": None, "admin": {"port": None, "key": None}, "api_key": None}
    whole = change_config(config, {"gateway": emptied, "cluster_key": None})
    admin = {"host": ip, "port": admin_port, "key": {"env": ADMIN_KEY}}
    gateway: dict[str, Any] = {"instances": {}, "admin": admin}
    if config.gateway.api_key is not None:
        gateway["api_key"] = {"env": _API_KEY}
    return change_config(whole, {"gateway": gateway}).model_dump_json(exclude_unset=True)


def _wait_ready(ray: Any, actors: Mapping[str, Any], admin: AdminClient, names: set[str]) -> None:
    """Wait until a gateway has all instances. Raises ValueError where a process has died before."""
    while True:
        for name, actor in actors.items():
            with suppress(ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):  # it is starting
                if ray.get(actor.was_restarted.remote(), timeout=_ANSWER_TIMEOUT_S):
                    raise ValueError(f"{name} died before it was ready; its last lines are above")
        with suppress(AdminRefused, AdminUnreachable, TimeoutError):
            shown = asyncio.run(admin.ask("GET", "/instances", timeout_s=_ANSWER_TIMEOUT_S))
            if names <= {one["name"] for one in shown["instances"] if one["ready"]}:
                return
        time.sleep(0.3)


def _end(ray: Any, name: str, config: DeploymentConfig) -> bool:
    """End what there is of a deployment, the gateway first; return whether there was anything."""
    drain_s = max(config.settings_for(str(one.role)).drain_s for one in config.placement())
    names = _names(ray, name)
    for some in (names[:1], names[1:]):
        actors = [ray.get_actor(one) for one in some]
        if stops := [actor.stop.remote() for actor in actors]:
            ray.wait(stops, num_returns=len(stops), timeout=drain_s + _GRACE_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
    with suppress(ValueError):  # there is none of that name
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
        return True
    return bool(names)
