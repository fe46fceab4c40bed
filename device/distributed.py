"""Groups of devices that compute one model together: the collectives that tensor parallelism needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from device.base import Device

#: Which network interface a backend's own connections use: the ranks of an instance share a host.
_INTERFACE_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME", "hccl": "HCCL_SOCKET_IFNAME"}


#: The time that ranks have to load before their group begins.
_LOADING = timedelta(seconds=300)


class Group(Protocol):
    """The ranks of one tensor-parallel instance; all of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, on every rank; ``partial`` may be overwritten."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' parts, of one shape, side by side along the last dimension."""

    def broadcast(self, own: Tensor) -> Tensor:
        """That of rank 0, on every rank; ``own`` has its shape and may be overwritten."""


class Alone:
    """Fills the Group protocol for an instance on one device: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, own: Tensor) -> Tensor:
        return own


class ProcessGroup:
    """Fills the Group protocol with one process for each rank, over the device's backend: gloo, nccl or hccl."""

    def __init__(self, device: Device, rank: int, size: int, rendezvous: Path, timeout_s: float) -> None:
        """Meet the other ranks; blocks until all are there, 300 s at most. A process can be in one group only.

        Args:
            rendezvous: a path without a file, the same for all ranks, in a directory of theirs alone.
            timeout_s: seconds that a collective waits for a rank that does not come; then it raises RuntimeError.
        """
        import torch.distributed

        self._collectives: Any = torch.distributed
        backend = device.transport.distributed_backend
        os.environ.setdefault(_INTERFACE_VARIABLES[backend], "lo")
        device.activate()
        store = torch.distributed.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
        store.set(f"rank {rank}", "is there")
        store.wait([f"rank {other}" for other in range(size)], _LOADING)
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        self.rank, self.size = rank, size

    def all_reduce(self, partial: Tensor) -> Tensor:
        _exchange(self._collectives.all_reduce, partial)
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        import torch

        parts, gather = [torch.empty_like(part) for _ in range(self.size)], self._collectives.all_gather
        _exchange(lambda own, *all_parts: gather(list(all_parts), own), part.contiguous(), *parts)
        return torch.cat(parts, dim=-1)

    def broadcast(self, own: Tensor) -> Tensor:
        _exchange(functools.partial(self._collectives.broadcast, src=0), own)
        return own

    def close(self) -> None:
        """Leave the group."""
        self._collectives.destroy_process_group()


def _exchange(collective: Callable[..., object], *tensors: Tensor) -> None:
    """Begin a collective. torch.distributed knows of no emulated device: there it is work of the stream."""
    if tensors[0].device.type != "emulated":
        collective(*tensors)
        return
    from device.emulated.tensors import launch

    launch(collective, *tensors)
