"""Instances that come and go while the gateway runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from epd_serve.backends.base import StageCalls
from epd_serve.backends.native import NativeConnections, NativeInstance
from epd_serve.backends.vllm import VllmInstances
from epd_serve.backends.vllm_server import VllmTarget
from epd_serve.config import DeploymentConfig
from epd_serve.config.vllm import connectors, pulls
from epd_serve.errors import Conflict, InvalidRequest
from epd_serve.routing.table import InstanceTable
from epd_serve.topology import Topology
from proxy.fleet.monitor import Monitor

logger = logging.getLogger(__name__)


class NoSuchInstance(InvalidRequest):
    status = 404
    default_code = "instance_not_found"


class Connect(Protocol):
    """Makes the calls to an instance of a name at a URL; ``role`` is for one that the topology does not name."""

    def __call__(self, name: str, url: str, role: str | None = None) -> StageCalls: ...


class Member(msgspec.Struct, frozen=True):
    """An instance of the deployment; vLLM's does not say its role by itself."""

    url: str
    role: str


@dataclass(eq=False)
class Members:
    """Adds instances to a running gateway and takes them out; requests that are there go on to their end.

    Attributes:
        topology: of the deployment, for people.
    """

    _table: InstanceTable
    _calls: MutableMapping[str, StageCalls]
    _monitor: Monitor
    _connect: Connect
    topology: Topology | None
    _joined: dict[str, str] = field(default_factory=dict)  # those that joined by themselves: URLs by name

    def replace(self, instances: Mapping[str, Member], topology: Topology | None) -> None:
        """Replace the instances that did not join by themselves. One with another URL is another instance.

        Raises ValueError for a name under which another has joined, and changes nothing then.
        """
        wanted = {name: one.url for name, one in instances.items()}
        if both := sorted(set(wanted) & set(self._joined)):
            raise ValueError(f"instance {both[0]} has joined by itself; give another name")
        wanted |= self._joined
        here = {record.name: record.url for record in self._table}
        for name in [name for name, url in here.items() if wanted.get(name) != url]:
            self._remove(name)
        for name, url in wanted.items():
            if here.get(name) != url:
                self._add(name, url, instances[name].role)
        self.topology = topology

    def join(self, name: str, url: str, role: str | None = None) -> None:
        """One more, which :meth:`replace` leaves where it is.

        Raises Conflict for a name that is taken, InvalidRequest for an instance that cannot be called.
        """
        if self._table.get(name) is not None:
            raise Conflict(f"the deployment has an instance {name} of its own; take another name")
        try:
            self._add(name, url, role)
        except ValueError as error:
            raise InvalidRequest(f"instance {name} cannot join: {error}", param="url") from error
        self._joined[name] = url

    def answers(self, name: str) -> bool:
        """Whether an instance that is here is heard of."""
        return self._table[name].ready

    def leave(self, name: str, *, said_so: bool = True) -> None:
        """Remove an instance that has joined.

        Args:
            said_so: it left by its own word, and ends the requests that it has; else these go elsewhere.
        """
        del self._joined[name]
        self._remove(name)
        if not said_so:
            self._monitor.report_down(name)

    def _add(self, name: str, url: str, role: str | None = None) -> None:
        self._calls[name] = self._connect(name, url, role)
        logger.info("instance %s at %s is part of the deployment now", name, url)
        self._table.add(name, url)
        self._monitor.add(name)

    def _remove(self, name: str) -> None:
        logger.info("instance %s at %s is no longer part of the deployment", name, self._table[name].url)
        self._monitor.remove(name)
        self._table.remove(name)
        del self._calls[name]


#: Flags of vLLM with which the rest of an answer is not to be told from its tokens: text is parsed as a whole,
#: or an event has several tokens, whose text may end before the last.
_WHOLE_ONLY = frozenset({"reasoning_parser", "speculative_config", "stream_interval"})


def vllm_targets(config: DeploymentConfig) -> dict[str, VllmTarget]:
    """Return what the gateway has to know of each vLLM instance of a deployment, by name."""
    placement = config.placement()
    features, kv = connectors(placement, config.vllm)
    return {
        one.name: VllmTarget(
            role=one.role,
            device=",".join(one.devices),
            dtype=config.dtype,
            model_path=str(Path(config.checkpoint).expanduser()),
            features=features,
            kv=kv,
            pulls=pulls(placement, kv),
            continues=_WHOLE_ONLY.isdisjoint(config.settings_for(str(one.role)).engine_args),
        )
        for one in placement
    }


def connector(
    connections: NativeConnections, vllm: Mapping[str, VllmTarget] | None, switch_dir: Path | None = None
) -> Connect:
    if vllm is not None:
        return VllmInstances(connections, vllm, switch_dir).connect

    def connect(name: str, url: str, role: str | None = None) -> NativeInstance:
        return NativeInstance(connections, name, url)  # which says itself what it is

    return connect
