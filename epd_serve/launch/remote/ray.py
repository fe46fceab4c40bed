"""``epd-serve up FILE --on ray``: a deployment as actors of a Ray cluster.

A placement group has one bundle for each device group of the topology. In each bundle an actor runs ``epd-serve
instance --unit``, whose instances join the gateway; another actor runs the gateway. Ray chooses the hosts, shows
the devices and restarts lost actors; requests, features and KV do not pass through it.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from device.datasheets import emulated_kind
from device.present import num_cores
from epd_serve.config import DeploymentConfig, change_config
from epd_serve.config.gateway import read_secret
from epd_serve.config.keys import ADMIN_KEY
from epd_serve.launch.choices import resolve
from epd_serve.launch.native import PROGRAM
from epd_serve.launch.remote.unit import check_portable
from epd_serve.protocol.addresses import is_loopback, is_wildcard, url_of
from epd_serve.rpc.admin import AdminClient, AdminError
from epd_serve.rpc.cluster import CLUSTER_KEY
from epd_serve.topology.placement import CPU, place_units

Spread = Literal["pack", "host"]

_GATEWAY, _ADMIN_PORT = "gateway", 8001
#: Resource of the head node. A gateway takes a little of its node's resource, and no CPU.
_HEAD, _A_LITTLE = "node:__internal_head__", 0.001
#: Ray may add nodes first; an actor may be starting; delay before Ray restarts an actor whose command has ended.
_PLACEMENT_TIMEOUT_S, _ANSWER_TIMEOUT_S, _RESTART_S = 300.0, 5.0, 2.0
#: Time for a process to end after its last request.
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
        raise ValueError("gateway.port: 0 would choose an unknown port on the cluster; write one, as in 8000")
    found: list[Group] = []
    for unit, replicas in enumerate(place_units(config.topology, config.devices)):
        for replica, here in enumerate(replicas):
            devices = {device for one in here for device in one.devices}
            resource, amount = "GPU", len(devices)
            if devices == {CPU}:
                resource, amount = "CPU", sum(config.settings_for(str(one.role)).threads or 1 for one in here)
            elif emulated_kind(here[0].devices[0]).startswith(("npu", "ascend")):
                resource = "NPU"
            found.append(Group("-".join(one.name for one in here), unit, replica, resource, amount))
    return tuple(found)


class Agent:
    """An actor that runs the gateway, or ``epd-serve instance --unit`` for one group, on its host.

    Each ends with the other; Ray restarts both.

    Args:
        name: under which Ray shows its output.
        file: content of the deployment file.
        group: its instances; None: the gateway.
        admin: URL of the gateway's admin plane, which instances join.
        keys: further environment variables.
    """

    def __init__(self, name: str, file: str, group: Group | None, admin: str, keys: Mapping[str, str]) -> None:
        import ray

        self._name = name
        self._directory = tempfile.TemporaryDirectory(prefix="epd-serve-ray-")
        path = Path(self._directory.name) / "deployment.yaml"
        path.write_text(file, encoding="utf-8")  # JSON is YAML
        tied = (sys.executable, "-P", "-m", "epd_serve.lifeline", str(os.getpid()), *PROGRAM)
        command = [*tied, "proxy" if group is None else "instance", "--config", str(path)]
        environment = {**os.environ, **keys}
        if group is not None:
            command += ["--unit", str(group.unit), "--replica", str(group.replica)]
            command += ["--host", ray.util.get_node_ip_address(), "--join", admin]
            node_id = ray.get_runtime_context().get_node_id()
            [has] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id]
            cores = num_cores() * group.amount / has[group.resource] / len(group.name.split("-"))
            environment["OMP_NUM_THREADS"] = str(max(1, int(cores)))
        self._stops = threading.Event()
        # The kernel ends the process with the thread that starts it, which lasts as long as the actor.
        thread = ThreadPoolExecutor(1)
        self._process = thread.submit(subprocess.Popen, command, env=environment).result()
        self._end = thread.submit(self._wait_end)

    def __repr__(self) -> str:
        return self._name

    def _wait_end(self) -> None:
        self._process.wait()
        if not self._stops.wait(_RESTART_S):
            os._exit(1)

    def was_restarted(self) -> bool:
        """Return whether its command ended without being stopped."""
        import ray

        return bool(ray.get_runtime_context().was_current_actor_reconstructed)

    def stop(self) -> None:
        """Stop the command, which finishes its requests first, and return after its end."""
        self._stops.set()
        self._process.terminate()
        self._end.result()
        self._directory.cleanup()


def up(config: DeploymentConfig, name: str, address: str, spread: Spread) -> str:
    """Start a deployment on a Ray cluster and wait until it is ready; return the text for the user.

    Args:
        name: name of the placement group, and prefix of its actors' names.
        address: address of the cluster's head; "": RAY_ADDRESS, or this machine's cluster.

    Raises ValueError if Ray, the cluster, a key or resources are missing, or if a process dies before the
    deployment is ready; then everything is removed again.
    """
    config, _ = resolve(config)
    found = groups(config)
    admin_key = read_secret(config.gateway.admin.key, "gateway.admin.key") or os.environ.get(ADMIN_KEY, "").strip()
    if not admin_key:
        raise ValueError(f"instances of other hosts join through the admin plane: put a key into {ADMIN_KEY}")
    joining = {ADMIN_KEY: admin_key}
    if config.engine != "vllm":
        joining = {CLUSTER_KEY: config.read_cluster_key() or secrets.token_urlsafe(32)}
    with _connected(address, logs=True) as ray:
        if _actor_names(ray, name):
            raise ValueError(f"{name} runs on this cluster; 'epd-serve down --deployment FILE --on ray' stops it")
        nodes = [(str(one["NodeManagerAddress"]), one["Resources"]) for one in ray.nodes() if one["Alive"]]
        ip, node = config.gateway.host, f"node:{config.gateway.host}"
        if is_wildcard(ip) or is_loopback(ip):
            ip, node = next(ip for ip, resources in nodes if _HEAD in resources), _HEAD
        elif ip not in (addresses := sorted(address for address, _ in nodes)):
            raise ValueError(f"gateway.host {ip} is not a node of the cluster; its nodes: {', '.join(addresses)}")
        admin_port = config.gateway.admin.port or _ADMIN_PORT
        admin, file, actors = url_of(ip, admin_port), cluster_file(config, ip, admin_port), dict[str, Any]()
        always = {"num_cpus": 0, "lifetime": "detached", "max_restarts": -1}
        try:
            bundles = [{group.resource: group.amount} for group in found]
            strategy = {"pack": "PACK", "host": "SPREAD"}[spread]
            placed = ray.util.placement_group(bundles, strategy, name=name, lifetime="detached")
            if not placed.wait(_PLACEMENT_TIMEOUT_S):
                raise ValueError(f"the cluster has no room for {bundles}; free are {ray.available_resources()}")
            agent = ray.remote(Agent)
            options = always | {"name": f"{name}/{_GATEWAY}", "resources": {node: _A_LITTLE}}
            keys = joining | {ADMIN_KEY: admin_key}
            actors[_GATEWAY] = agent.options(**options).remote(_GATEWAY, file, None, admin, keys)
            for index, group in enumerate(found):
                takes = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(group.resource)
                options = always | {"name": f"{name}/{group.name}"}
                options |= {"resources": bundles[index]} if takes is None else {takes: group.amount}
                bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(placed, index)
                made = agent.options(**options, scheduling_strategy=bundle)
                actors[group.name] = made.remote(group.name, file, group, admin, joining)
            _wait_ready(ray, actors, AdminClient(admin, {"authorization": f"Bearer {admin_key}"}), config)
        except BaseException:
            _end(ray, name, config)
            raise
    host = ip if is_wildcard(config.gateway.host) else config.gateway.host
    return (
        f"Ready: {config.topology} as placement group {name}. OpenAI API: {url_of(host, config.gateway.port)}/v1\n"
        f"epd-serve status --admin {admin}"
    )


def down(config: DeploymentConfig, name: str, address: str) -> None:
    """Stop a deployment, after its requests are finished. Raises ValueError if it does not exist."""
    with _connected(address, logs=False) as ray:
        if not _end(ray, name, config):
            raise ValueError(f"this cluster runs no deployment {name}")


@contextmanager
def _connected(address: str, *, logs: bool) -> Iterator[Any]:
    """Connect to a cluster; yield Ray."""
    try:
        import ray
        import ray.util.scheduling_strategies

        ray.init(address or "auto", namespace="epd-serve", log_to_driver=logs, logging_level=logging.ERROR)
    except ModuleNotFoundError as error:
        raise ValueError(f"--on ray: {error.name} is not installed; run: pip install '.[ray]'") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: other versions of Ray or Python
        raise ValueError(f"--on ray: {error}; start a cluster with 'ray start --head'") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_file(config: DeploymentConfig, ip: str, admin_port: int) -> str:
    """Return the deployment file in the cluster, without its secrets."""
    emptied = {"instances": None, "admin": {"port": None, "key": None}}
    whole = change_config(config, {"gateway": emptied, "cluster_key": None})
    gateway = {"instances": {}, "admin": {"host": ip, "port": admin_port, "key": {"env": ADMIN_KEY}}}
    return change_config(whole, {"gateway": gateway}).model_dump_json(exclude_unset=True)


def _wait_ready(ray: Any, actors: Mapping[str, Any], admin: AdminClient, config: DeploymentConfig) -> None:
    """Wait until the gateway has all instances. Raises ValueError if a process died before."""
    names = {one.name for one in config.placement()}
    while True:
        for name, actor in actors.items():
            with suppress(ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):  # it is starting
                if ray.get(actor.was_restarted.remote(), timeout=_ANSWER_TIMEOUT_S):
                    raise ValueError(f"{name} died before it was ready; its last lines are above")
        with suppress(AdminError, TimeoutError):
            shown = asyncio.run(admin.ask("GET", "/instances", timeout_s=_ANSWER_TIMEOUT_S))
            if names <= {one["name"] for one in shown["instances"] if one["ready"]}:
                return
        time.sleep(0.3)


def _actor_names(ray: Any, name: str) -> list[str]:
    """Return the actors of a deployment, the gateway first."""
    own = [one for one in ray.util.list_named_actors() if one.startswith(f"{name}/")]
    return sorted(own, key=lambda one: not one.endswith(f"/{_GATEWAY}"))


def _end(ray: Any, name: str, config: DeploymentConfig) -> bool:
    """Stop a deployment, the gateway first; return whether there was one."""
    drain_s = max(config.settings_for(str(one.role)).drain_s for one in config.placement())
    names = _actor_names(ray, name)
    for some in (names[:1], names[1:]):
        actors = [ray.get_actor(one) for one in some]
        if stops := [actor.stop.remote() for actor in actors]:
            ray.wait(stops, num_returns=len(stops), timeout=drain_s + _GRACE_S)
        for actor in actors:
            ray.kill(actor, no_restart=True)
    with suppress(ValueError):  # no placement group of that name
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
        return True
    return bool(names)
