"""A GPU tensor shared between processes of one host without a copy (CUDA IPC), as plain bytes for any socket.

torch counts the users of shared memory: what was exported stays allocated until the importer lets go of it, even
when the exporter's tensor is gone. Import each export once; one that nobody imports is kept to the process's end.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

_BYTES = ("memory", "counter", "event")
_INTEGERS = ("size", "offset", "counter_offset", "tensor_offset")
_LISTS = ("shape", "stride")


def export_tensor(tensor: Tensor) -> bytes:
    """A handle with which one other process of this host can open the memory of a CUDA tensor.

    Raises ValueError for a tensor that is not on a GPU.
    """
    if not tensor.is_cuda:
        raise ValueError(f"a tensor on {tensor.device}: only GPU memory is shared by CUDA IPC")
    storage: Any = tensor.untyped_storage()
    index, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return pack(
        {
            "gpu": str(torch.cuda.get_device_properties(index).uuid),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "tensor_offset": tensor.storage_offset(),
            "memory": memory,
            "size": size,
            "offset": offset,
            "counter": counter,
            "counter_offset": counter_offset,
            "event": event,
            "waits": waits,
        }
    )


def import_tensor(handle: bytes) -> Tensor:
    """The tensor behind a handle of another process: the same memory, on this process's view of the same GPU.

    Raises ValueError for bytes that are no handle, and where the GPU is not visible here.
    """
    fields = unpack(handle)
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if fields["gpu"] not in uuids:
        raise ValueError(
            f"GPU {fields['gpu']} is not visible to this process; it sees {', '.join(uuids) or 'none'}"
        )
    index = uuids.index(fields["gpu"])
    storage_type: Any = torch.UntypedStorage
    opened = torch.empty(0, dtype=getattr(torch, fields["dtype"]), device=torch.device("cuda", index))
    storage = storage_type._new_shared_cuda(
        index,
        fields["memory"],
        fields["size"],
        fields["offset"],
        fields["counter"],
        fields["counter_offset"],
        fields["event"],
        fields["waits"],
    )
    return opened.set_(storage, fields["tensor_offset"], fields["shape"], fields["stride"])


def pack(fields: dict[str, Any]) -> bytes:
    """JSON, with bytes in hexadecimal."""
    return json.dumps({name: field.hex() if name in _BYTES else field for name, field in fields.items()}).encode()


def unpack(handle: bytes) -> dict[str, Any]:
    """The fields of ``pack``, each of its type. Raises ValueError."""
    try:
        fields = json.loads(handle)
        if not isinstance(fields, dict):
            raise TypeError("not an object")
        fields = {name: bytes.fromhex(field) if name in _BYTES else field for name, field in fields.items()}
        checks = (
            all(isinstance(fields[name], bytes) for name in _BYTES),
            all(type(fields[name]) is int and fields[name] >= 0 for name in _INTEGERS),
            all(type(number) is int and number >= 0 for name in _LISTS for number in fields[name]),
            len(fields["shape"]) == len(fields["stride"]),
            isinstance(fields["gpu"], str) and isinstance(fields["waits"], bool),
            isinstance(getattr(torch, fields["dtype"], None), torch.dtype),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a handle of a GPU tensor: {error}") from error
    if not all(checks):
        raise ValueError("not a handle of a GPU tensor: a field has the wrong type")
    return fields
