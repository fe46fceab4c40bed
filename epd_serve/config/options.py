"""All that one instance process is told at its start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator

from epd_serve.config.sections import InstanceSettings, ShapeConfig, SharedConfig
from epd_serve.config.shares import DeviceShare
from epd_serve.config.sizes import StepSizes, tokens_per_block
from epd_serve.types import Role


def _read_role(value: object) -> Role:
    return value if isinstance(value, Role) else Role.parse(str(value))


class InstanceOptions(SharedConfig, InstanceSettings):
    """The options of one instance: those of its deployment and its role, and its own place.

    Attributes:
        name: unique in the deployment (``e0``).
        model: directory of a transformers model, or a shape without weights.
        served_model_name: what clients call the model.
        port: of the control server; its URL is ``http://host:port``.
        advertise: address under which others reach it; None: ``host``.
        data_port: port on which KV and features are read and written over TCP; 0: a free one.
        device: ``cpu``, ``cuda:0``, ``npu:1``; indices count the devices that the process can see.
        device_share: the part of the device that the instance keeps to; None: no limit.
        device_board: ``path:slot`` of the file in which the instances on one device tell each other what they do;
            None where no other is there.
        core_board: the file in which instances that divide the machine's cores note whether they compute; None:
            ``threads`` belong to this one.
        switch_dir: where its settings in other roles are found, and its role is kept for when it is started again
            (:mod:`epd_serve.config.role_files`); None: it is not kept.
        device_memory_bytes: of the device, once it is open: the share of it that the instance may use.
        join: admin planes of gateways that it joins once it is ready; none: whoever started it tells the gateway.
        queue_timeout_s: how long a request waits for room in D's KV cache; then the client gets a 429.
        block_size: tokens per KV block; None: 128 on an NPU, 16 elsewhere.
        staging_bytes: host memory through which KV of an accelerator goes that cannot go from device to device,
            and registered memory of Mooncake; larger pieces go in rounds.
    """

    name: str
    resident: Literal["role", "all"] = "role"
    role: Annotated[Role, PlainValidator(_read_role), PlainSerializer(str, return_type=str)]
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
    staging_bytes: int = 256 << 20
    block_size: int | None = None

    @property
    def tokens_per_block(self) -> int:
        return tokens_per_block(self.block_size, self.device)

    @property
    def sizes(self) -> StepSizes:
        """The sizes that were asked for; the others follow from the device."""
        sizes = StepSizes.of_device(self.device.partition(":")[0], self.device_memory_bytes)
        asked = {name: value for name in StepSizes.__slots__ if (value := getattr(self, name)) is not None}
        return replace(sizes, **asked)

    def on_memory(self, total_bytes: int) -> InstanceOptions:
        """The options, now that the memory of the device is known."""
        share = self.memory_share or (self.device_share.share if self.device_share else 1.0)
        return self.model_copy(update={"device_memory_bytes": int(total_bytes * share)})

    @property
    def kv_memory_sizes(self) -> tuple[int | None, ...]:
        """The options of which any makes the KV memory another."""
        return self.num_blocks, self.kv_cache_bytes, self.tokens_per_block

    def to_json(self) -> str:
        """For ``epd-serve instance --options``."""
        first = {"name": self.name, "role": str(self.role)}  # for who reads it in a list of processes
        return json.dumps(first | self.model_dump(mode="json", exclude_defaults=True))


def decode_graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes at which decode steps are captured: powers of two, and the largest."""
    return [*(1 << i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs]
