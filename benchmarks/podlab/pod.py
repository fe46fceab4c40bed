"""One pod: a container in the sandbox, image, user, volumes and limits that its manifest names."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.podlab.network import Sandbox

Manifest = dict[str, Any]
#: Before a container starts, by how often it has ended: as the kubelet waits.
_BACKOFF_S = (0.0, 0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class Image:
    """Files and environment of a container before its manifest changes them.

    Attributes:
        opened: paths that the container's user may find although it is nobody on this machine.
    """

    root: Path
    environment: Mapping[str, str]
    opened: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """The settings that all pods of a cluster share.

    Attributes:
        directory: for logs, files of ConfigMaps, and claims.
        files: content of ConfigMaps by their name. secrets: values by key.
        node: threads in the node's network, from where probes come.
    """

    directory: Path
    files: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, str]
    node: Executor

    @property
    def hosts(self) -> Path:
        """The file with the names of services, which stands for the cluster's DNS."""
        return self.directory / "hosts"


class Pod:
    """Attributes:
    owner, revision: the Deployment that it is of, and which rollout of it.
    is_going: whether it has been deleted.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        revision: int,
        template: Manifest,
        image: Image,
        place: Place,
        sandbox: Sandbox,
        address: str,
        on_change: Callable[[], None],
    ) -> None:
        self.name, self.owner, self.revision, self.address, self.sandbox = name, owner, revision, address, sandbox
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self._spec = template["spec"]
        (self._container,) = self._spec["containers"]
        self.ports = {one["name"]: int(one["containerPort"]) for one in self._container["ports"]}
        self._image, self._place, self._on_change = image, place, on_change
        self.is_ready = self.is_going = False
        self.num_restarts = 0
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """The container, started again whenever it ends, until the pod is deleted."""
        while not self.is_going:
            await asyncio.sleep(
                _BACKOFF_S[min(self.num_restarts, len(_BACKOFF_S)) - 1] if self.num_restarts else 0
            )
            with (self._place.directory / f"{self.name}.log").open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *("setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.sandbox.pid)),
                    *("--net", "--ipc", "--uts", "unshare", "--mount", "--pid", "--fork", "--kill-child"),
                    *("sh", "-c", self._script()),
                    env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            watching = asyncio.create_task(self._watch())
            try:
                await self._process.wait()
            finally:
                watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._set_ready(False)
            self.num_restarts += not self.is_going

    async def delete(self, *, forced: bool) -> bool:
        """Take it out of the services and end it; returns whether it ended within its grace."""
        self.is_going = True
        self._on_change()
        within = True
        if not forced:
            self._signal(signal.SIGTERM)
            within = await self._ended(float(self._spec["terminationGracePeriodSeconds"]))
        if forced or not within:
            self._signal(signal.SIGKILL)
            await self._ended(30.0)
        self.sandbox.close()
        return within

    async def _ended(self, limit_s: float) -> bool:
        if self._process is None:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), limit_s)
        return self._process.returncode is not None

    def _signal(self, number: int) -> None:
        """To the first process of the container, which is the child of the process that made its namespaces."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError, FileNotFoundError):
                pid = self._process.pid
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                    os.kill(int(child), number)

    # ------------------------------------------------------------------ probes

    async def _watch(self) -> None:
        """The startup probe, then the others; a container that fails for too long is killed."""
        if "startupProbe" in self._container and not await self._passes("startupProbe"):
            return self._signal(signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_readiness())
            tasks.create_task(self._guard_life())
        return None

    async def _passes(self, kind: str) -> bool:
        """Whether the probe passes before it has failed too often."""
        probe = self._container[kind]
        for _ in range(probe.get("failureThreshold", 3)):
            await asyncio.sleep(probe.get("periodSeconds", 10))
            if await self._probe(probe):
                return True
        return False

    async def _follow_readiness(self) -> None:
        while True:
            if self.is_ready:
                self._set_ready(await self._passes("readinessProbe"))
            else:
                self._set_ready(await self._probe(self._container["readinessProbe"]))
            await asyncio.sleep(0 if self.is_ready else self._container["readinessProbe"].get("periodSeconds", 10))

    async def _guard_life(self) -> None:
        while await self._passes("livenessProbe"):
            pass
        self._signal(signal.SIGKILL)

    async def _probe(self, probe: Manifest) -> bool:
        get = probe["httpGet"]
        url = f"http://{self.address}:{self.ports[get['port']]}{get['path']}"
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._place.node, _answers, url, probe.get("timeoutSeconds", 1))

    def _set_ready(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._on_change()

    # ------------------------------------------------------------------ the container

    def _script(self) -> str:
        """The command that makes the container's root, in new namespaces, and becomes the container's own."""
        top = self._place.directory / "top"
        root = top / "root"
        lines = [
            "set -e",
            "mount --make-rprivate /",
            f"mount -t tmpfs top {top}",
            f"mkdir {top}/upper {top}/work {root}",
            f"mount -t overlay root -o lowerdir={self._image.root},upperdir={top}/upper,workdir={top}/work {root}",
            f"mkdir -p {root}/proc {root}/dev {root}/sys",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount --rbind /sys {root}/sys",
            f"touch {root}/etc/hosts",
            f"mount --bind {self._place.hosts} {root}/etc/hosts",
        ]
        volumes = {one["name"]: one for one in self._spec["volumes"]}
        for mount in self._container["volumeMounts"]:
            path = f"{root}{mount['mountPath']}"
            lines += [f"mkdir -p {path}", f"{self._mount(volumes[mount['name']])} {path}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {path}")
        for parent in {parent for path in self._image.opened for parent in path.parents}:
            lines.append(f"chmod o+x {root}{parent}")
        limits, user = self._container["securityContext"], self._spec["securityContext"]
        if limits["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,bind,ro {root}")
        privileges = f"--reuid {user['runAsUser']} --regid {user['runAsGroup']} --groups {user['fsGroup']}"
        if limits["capabilities"]["drop"] == ["ALL"]:
            privileges += " --bounding-set=-all --inh-caps=-all"
        if not limits["allowPrivilegeEscalation"]:
            privileges += " --no-new-privs"
        environment = self._environment()
        command = [_filled(word, environment) for word in self._container["command"]]
        assigned = shlex.join(f"{key}={value}" for key, value in environment.items())
        lines.append(
            f"exec chroot {root} setpriv --pdeathsig KILL {privileges} env -i {assigned} {shlex.join(command)}"
        )
        return "\n".join(lines)

    def _mount(self, volume: Manifest) -> str:
        """The command that mounts it, but for where."""
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            directory = self._place.directory / "claims" / claim["claimName"]
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o777)
            return f"mount --bind {directory}"
        if (source := volume.get("configMap")) is not None:
            directory = self._place.directory / "files" / source["name"]
            directory.mkdir(parents=True, exist_ok=True)
            for name, text in self._place.files[source["name"]].items():
                (directory / name).write_text(text, encoding="utf-8")
            return f"mount --bind {directory}"
        size = volume["emptyDir"].get("sizeLimit", "").removesuffix("i").lower()
        options = f"mode=2777,gid={self._spec['securityContext']['fsGroup']}{f',size={size}' if size else ''}"
        return f"mount -t tmpfs -o {options} {volume['name']}"

    def _environment(self) -> dict[str, str]:
        known = {"metadata.name": self.name, "status.podIP": self.address}
        found = {**self._image.environment}
        for one in self._container["env"]:
            source = one.get("valueFrom", {})
            if "value" in one:
                found[one["name"]] = one["value"]
            elif "fieldRef" in source:
                found[one["name"]] = known[source["fieldRef"]["fieldPath"]]
            elif (key := source["secretKeyRef"]["key"]) in self._place.secrets:
                found[one["name"]] = self._place.secrets[key]
            elif not source["secretKeyRef"].get("optional"):
                raise ValueError(f"{self.name}: the secret has no key {key}")
        return found


def _filled(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)


def _answers(url: str, timeout_s: float) -> bool:
    try:
        with _OPENER.open(url, timeout=timeout_s) as answer:
            return 200 <= int(answer.status) < 400
    except (OSError, urllib.error.HTTPError):
        return False
