"""Options of one instance process, also in other roles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import PlainSerializer, PlainValidator

from epd_serve.config.sections import InstanceSettings, ShapeConfig, SharedConfig
from epd_serve.config.shares import DeviceShare
from epd_serve.config.sizes import StepSizes
from epd_serve.topology.remembered import remember_role, remembered_role
from epd_serve.types import Role

#: Options that a process keeps in every role.
OF_PROCESS = frozenset({"threads", "share", "memory_share", "tower_share", "resident"})
#: File of a local deployment with the settings of each role.
_SETTINGS = "roles.json"


class InstanceOptions(SharedConfig, InstanceSettings):
    """Options of one instance: its deployment's, its role's and its own.

    Attributes:
        name: unique in the deployment, such as ``e0``.
        model: directory of a transformers model, or a shape without weights.
        served_model_name: the model's name for clients.
        port: port of the control server; its URL is ``http://host:port``.
        advertise: address for peers; None: ``host``.
        data_port: port for KV and features over TCP; 0: a free one.
        device: ``cpu``, ``cuda:0``, ``npu:1``; indices count the devices visible to the process.
        device_share: share of the device; None: no limit.
        device_board: ``path:slot`` of the file in which instances on one device publish their activity; None: this
            instance is alone there.
        core_board: file in which instances that divide the machine's cores mark themselves as computing; None:
            this instance owns its ``threads``.
        switch_dir: directory with its settings in other roles (:func:`write_role_settings`), which also keeps its
            role across restarts; None: the role is not kept.
        device_memory_bytes: bytes of the device that the instance may use, known once the device is open.
        join: admin planes of gateways to join once ready; empty: the launcher registers the instance.
        queue_timeout_s: longest wait for memory in D's KV cache before the client gets a 503.
        num_blocks: number of KV blocks; None: as many as ``kv_cache_bytes`` or the device's memory holds.
        block_size: tokens per KV block; None: 128 on an NPU, 16 elsewhere.
        staging_bytes: host memory for KV that cannot move directly between accelerators, and registered memory of
            Mooncake; larger pieces are sent in rounds.
    """

    name: str
    resident: Literal["role", "all"] = "role"
    role: Annotated[
        Role,
        PlainValidator(lambda role: role if isinstance(role, Role) else Role.parse(str(role))),
        PlainSerializer(str, return_type=str),
    ]
    model: Path | ShapeConfig
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8100
    advertise: str | None = None
    data_port: int = 0
    device: str = "cpu"
    device_share: DeviceShare | None = None
    device_board: str | None = None
    core_board: Path | None = None
    switch_dir: Path | None = None
    device_memory_bytes: int = 0
    join: tuple[str, ...] = ()
    queue_timeout_s: float = 60.0
    num_blocks: int | None = None
    block_size: int | None = None
    staging_bytes: int = 256 << 20

    @property
    def tokens_per_block(self) -> int:
        """``block_size``, by default 128 on an NPU, the minimum of its paged prefill."""
        return self.block_size or (128 if self.device.startswith("npu") else 16)

    @property
    def sizes(self) -> StepSizes:
        """Configured sizes, with defaults that follow from the device."""
        sizes = StepSizes.of_device(self.device.partition(":")[0], self.device_memory_bytes)
        asked = {name: value for name in StepSizes.__slots__ if (value := getattr(self, name)) is not None}
        return replace(sizes, **asked)

    @property
    def kv_memory_sizes(self) -> tuple[int | None, ...]:
        """Options that determine the KV memory."""
        return self.num_blocks, self.kv_cache_bytes, self.tokens_per_block

    def on_memory(self, total_bytes: int) -> Self:
        """Return the options with the device's memory filled in."""
        share = self.memory_share or (self.device_share.share if self.device_share else 1.0)
        return self.model_copy(update={"device_memory_bytes": int(total_bytes * share)})

    def in_role(self, role: Role) -> Self:
        """Return the options of the same process in another role, with the deployment's settings for it."""
        changes: dict[str, Any] = {"role": role}
        if self.switch_dir is not None and (file := self.switch_dir / _SETTINGS).exists():
            values = json.loads(file.read_text(encoding="utf-8"))[str(role)]
            settings = InstanceSettings.model_validate(values)
            changes |= {
                name: getattr(settings, name) for name in InstanceSettings.model_fields.keys() - OF_PROCESS
            }
        return self.model_copy(update=changes)

    def remember_role(self) -> None:
        """Save the role of the instance for its next start."""
        if self.switch_dir is not None:
            remember_role(self.switch_dir, self.name, self.role)

    def in_remembered_role(self) -> Self:
        """Return the options of a starting instance in its last role, if saved."""
        role = None if self.switch_dir is None else remembered_role(self.switch_dir, self.name)
        return self if role is None or role == self.role else self.in_role(role)

    def to_json(self) -> str:
        """Return JSON for ``epd-serve instance --options``."""
        first = {"name": self.name, "role": str(self.role)}  # first, for readers of process lists
        return json.dumps(first | self.model_dump(mode="json", exclude_defaults=True))


def write_role_settings(directory: Path, settings: Mapping[str, InstanceSettings]) -> None:
    """Write the settings of each role, for instances that switch roles from now on."""
    own = set(InstanceSettings.model_fields)
    new = directory / f"{_SETTINGS}.new"
    new.write_text(json.dumps({role: one.model_dump(mode="json", include=own) for role, one in settings.items()}))
    new.replace(directory / _SETTINGS)


def directory_of(file: Path) -> Path | None:
    """Return the directory of the local deployment whose gateway has this file; None for a user's own file."""
    return file.parent if (file.parent / _SETTINGS).exists() else None


def decode_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the captured batch sizes of decode steps: powers of two, and the largest."""
    return [*(1 << i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs]
