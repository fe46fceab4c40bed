"""A cluster that carries out manifests: pods of Deployments, endpoints of Services, NetworkPolicies."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.podlab.network import Access, Network, Sandbox
from benchmarks.podlab.pod import Image, Manifest, Place, Pod


class Cluster:
    """Attributes:
    pods: by their names.
    stranger: a pod without labels, in the network alone.
    """

    def __init__(
        self, docs: Sequence[Manifest], images: Mapping[str, Image], directory: Path, secrets: Mapping[str, str]
    ) -> None:
        """``images`` are by the names of containers."""
        self._docs, self._images = docs, images
        self.pods: dict[str, Pod] = {}
        self._network = Network()
        files = {one["metadata"]["name"]: one["data"] for one in self._of("ConfigMap")}
        (directory / "top").mkdir(parents=True)
        self._threads = self._network.node.threads()
        self._place = Place(directory=directory, files=files, secrets=secrets, node=self._threads)
        self.stranger = Sandbox("stranger")
        self._network.attach(self.stranger)
        self._addresses = {
            one["metadata"]["name"]: f"10.79.0.{index + 1}"
            for index, one in enumerate(self._of("Service"))
            if one["spec"].get("clusterIP") != "None"
        }
        self._revisions = {one["metadata"]["name"]: 0 for one in self._of("Deployment")}
        self._serial = itertools.count(1)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._deleting: dict[str, asyncio.Task[bool]] = {}
        self._changed = asyncio.Event()
        self._program()

    @property
    def deployments(self) -> list[str]:
        return list(self._revisions)

    def address(self, service: str) -> str:
        return self._addresses[service]

    async def run(self) -> None:
        """The controller of Deployments, until cancelled."""
        try:
            while True:
                self._changed.clear()
                self._program()
                for doc in self._of("Deployment"):
                    while self._step(doc):
                        self._changed.set()
                await self._changed.wait()
        finally:
            for pod in self.pods.values():
                self._deleting.setdefault(pod.name, asyncio.create_task(pod.delete(forced=True)))
            await asyncio.gather(*self._deleting.values(), *self._running.values())
            self.stranger.close()
            self._threads.shutdown()
            self._network.close()

    async def ready(self, *deployments: str) -> float:
        """Wait until these, or all, have all their pods ready and no old ones; returns how long it took."""
        began = time.monotonic()
        wanted = [
            one for one in self._of("Deployment") if one["metadata"]["name"] in (deployments or self._revisions)
        ]
        while not all(self._is_complete(one) for one in wanted):  # noqa: ASYNC110 - many things change it
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def rollout(self, deployment: str) -> float:
        """Replace its pods as ``kubectl rollout restart`` does; returns how long it took."""
        self._revisions[deployment] += 1
        self._changed.set()
        return await self.ready(deployment)

    async def force_delete(self, deployment: str) -> float:
        """As ``kubectl delete pod --force`` with one of its pods; returns when another was ready in its place."""
        pod = next(one for one in self.pods.values() if one.owner == deployment and not one.is_going)
        self._delete(pod, forced=True)
        self._changed.set()
        return await self.ready(deployment)

    def ended_late(self) -> list[str]:
        """Pods whose grace was not enough."""
        return [name for name, task in self._deleting.items() if task.done() and not task.result()]

    def listening(self) -> dict[str, list[int]]:
        """The ports on which pods of each Deployment listen for others."""
        return self._ports(lambda pod, port: True)

    def reached(self, source: Sandbox) -> dict[str, list[int]]:
        """Those of them that take connections of a source."""
        with source.threads() as threads:
            return self._ports(lambda pod, port: threads.submit(_connects, pod.address, port).result())

    def _ports(self, counts: Callable[[Pod, int], bool]) -> dict[str, list[int]]:
        found: dict[str, set[int]] = {owner: set() for owner in self._revisions}
        for pod in self.pods.values():
            found[pod.owner] |= {port for port in pod.sandbox.listening() if counts(pod, port)}
        return {owner: sorted(ports) for owner, ports in found.items()}

    # ------------------------------------------------------------------ Deployments

    def _step(self, doc: Manifest) -> bool:
        """Make or delete one pod where the Deployment's strategy allows it; whether it did."""
        name, count = doc["metadata"]["name"], doc["spec"].get("replicas", 1)
        rolling = doc["spec"]["strategy"]["rollingUpdate"]
        live = [pod for pod in self.pods.values() if pod.owner == name and not pod.is_going]
        old = [pod for pod in live if pod.revision != self._revisions[name]]
        if len(live) - len(old) < count and len(live) < count + rolling["maxSurge"]:
            self._make(doc)
            return True
        spare = sum(pod.is_ready for pod in live) - (count - rolling["maxUnavailable"])
        victim = next((pod for pod in old if not pod.is_ready or spare > 0), None)
        if victim is not None:
            self._delete(victim, forced=False)
        return victim is not None

    def _is_complete(self, doc: Manifest) -> bool:
        name = doc["metadata"]["name"]
        own = [pod for pod in self.pods.values() if pod.owner == name]
        fresh = [pod for pod in own if pod.is_ready and pod.revision == self._revisions[name] and not pod.is_going]
        return len(fresh) == len(own) == doc["spec"].get("replicas", 1)

    def _make(self, doc: Manifest) -> None:
        owner, template = doc["metadata"]["name"], doc["spec"]["template"]
        name = f"{owner}-{next(self._serial):05x}"
        image = self._images[template["spec"]["containers"][0]["name"]]
        sandbox = Sandbox(name)
        address = self._network.attach(sandbox)
        pod = Pod(
            name, owner, self._revisions[owner], template, image, self._place, sandbox, address, self._changed.set
        )
        self.pods[name] = pod
        self._running[name] = asyncio.create_task(pod.run())

    def _delete(self, pod: Pod, *, forced: bool) -> asyncio.Task[bool]:
        def forget(_: asyncio.Task[bool]) -> None:
            self.pods.pop(pod.name, None)
            self._changed.set()

        task = self._deleting[pod.name] = asyncio.create_task(pod.delete(forced=forced))
        task.add_done_callback(forget)
        pod.is_going = True
        return task

    # ------------------------------------------------------------------ Services and NetworkPolicies

    def _program(self) -> None:
        """Bring names, services and policies up to date."""
        names, services = ["127.0.0.1 localhost"], []
        for doc in self._of("Service"):
            name, spec = doc["metadata"]["name"], doc["spec"]
            unready = spec.get("publishNotReadyAddresses", False)
            ends = [
                pod for pod in self._matching(spec["selector"]) if unready or (pod.is_ready and not pod.is_going)
            ]
            if name in self._addresses:
                names.append(f"{self._addresses[name]} {name}")
                for port in spec["ports"]:
                    targets = [(pod.address, pod.ports[port["targetPort"]]) for pod in ends]
                    services.append((self._addresses[name], port["port"], targets))
            else:
                names += [f"{pod.address} {name}" for pod in ends]
        self._place.hosts.write_text("\n".join(names) + "\n")
        policies: dict[str, list[Access]] = {}
        for doc in self._of("NetworkPolicy"):
            for pod in self._matching(doc["spec"]["podSelector"]["matchLabels"]):
                for rule in doc["spec"]["ingress"]:
                    policies.setdefault(pod.address, []).extend(self._accesses(rule, pod))
        self._network.program(services, policies)

    def _accesses(self, rule: Manifest, pod: Pod) -> Iterator[Access]:
        sources = None
        if "from" in rule:
            selectors = [one["podSelector"]["matchLabels"] for one in rule["from"]]
            sources = tuple(one.address for selector in selectors for one in self._matching(selector))
        for port in rule.get("ports", [None]):
            yield Access(sources=sources, port=None if port is None else pod.ports[port["port"]])

    def _matching(self, selector: Mapping[str, str]) -> list[Pod]:
        return [pod for pod in self.pods.values() if selector.items() <= pod.labels.items()]

    def _of(self, kind: str) -> list[Manifest]:
        return [one for one in self._docs if one["kind"] == kind]


@asynccontextmanager
async def cluster(
    docs: Sequence[Manifest], images: Mapping[str, Image], directory: Path, secrets: Mapping[str, str]
) -> AsyncIterator[Cluster]:
    """Within, the manifests' pods run."""
    made = Cluster(docs, images, directory, secrets)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=2.0):
            return True
    except OSError:
        return False
