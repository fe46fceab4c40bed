"""All that one instance process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from epd_serve.types import Role

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVTransport = Literal["auto", "shm", "tcp"]

MEBIBYTE = 1024**2


@dataclass(frozen=True, kw_only=True)
class InstanceOptions:
    """One instance; each field is the flag of the same name of ``epd-serve instance``.

    Attributes:
        name: unique in the deployment (``e0``).
        model: directory of a transformers model.
        served_model_name: what clients call the model.
        port: of the control server; its URL is ``http://host:port``.
        device: ``cpu``, ``cuda:0``, ``npu:1``; indices count the devices that the process can see. Several, with
            commas between them, share the language model (tensor parallelism).
        threads: compute threads on the CPU; None leaves the choice to the library.
        block_size: tokens per KV block.
        num_blocks, kv_cache_bytes: size of the KV pool, given as one or the other; both None: the instance
            chooses.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most sequences in a step.
        max_model_len: longest prompt and answer together, in tokens; None: what the model allows.
        image_budget_pixels: most pixels encoded in a step; a larger image is encoded alone.
        feature_store_bytes: what E keeps of its encoder output, for P to fetch.
        feature_cache_bytes: what P keeps of the features it has fetched.
        feature_timeout_s: how long P waits for a feature before it computes it itself.
        lease_s: how long memory that a peer has not confirmed is kept for it.
        kv_transport: how KV moves from P to D; ``auto`` is shared memory on one host, else TCP.
        kv_group_layers: layers sent together; None: chosen from measured times.
    """

    name: str
    role: Role
    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8100
    device: str = "cpu"
    dtype: DType = "auto"
    threads: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_model_len: int | None = None
    image_budget_pixels: int = 8 * MEBIBYTE
    feature_store_bytes: int = 256 * MEBIBYTE
    feature_cache_bytes: int = 256 * MEBIBYTE
    feature_timeout_s: float = 30.0
    lease_s: float = 30.0
    kv_transport: KVTransport = "auto"
    kv_group_layers: int | None = None

    @property
    def devices(self) -> list[str]:
        """The devices of the instance, one for each tensor-parallel rank; the first also runs the tower."""
        return self.device.split(",")

    def to_arguments(self) -> list[str]:
        """The flags of ``epd-serve instance`` that mean the same as this object."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                arguments += [f"--{field.name.replace('_', '-')}", str(value)]
        return arguments
