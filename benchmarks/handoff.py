"""The hand-over of a prompt's KV, and of a picture's feature, from a process to another on one device.

All is computed when it begins, so that nothing is hidden; blocks are in no
order on either side. The ways are those of ``kv_transfer.transport``: from device to device on one host
(``auto``), through the host's memory, shared (``shm``) or over TCP as between hosts (``tcp``), and from device to
device over ``mooncake``, where it reaches the device's memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from device.registry import get_device
from epd_serve.engine.device_features import DeviceFeatureStore
from epd_serve.engine.device_memory import are_reached
from epd_serve.engine.kv_memory import KVMemory
from epd_serve.protocol import wire
from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.feature_store import EmbeddedFeatureStore
from epd_serve.transfer.grouping import GroupSizer
from epd_serve.transfer.kv_receiver import read_kv
from epd_serve.transfer.kv_sender import KVSender, OutgoingTransfer, Part
from epd_serve.transfer.mooncake.engine import MooncakeOptions
from epd_serve.transfer.mooncake.transport import MooncakeTransport

WAYS = ("auto", "shm", "tcp", "mooncake")
#: Of Qwen3-VL-8B.
LAYOUT = wire.KVLayout(
    num_layers=36, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", model="random"
)
NUM_TOKENS = 2000
#: Of a picture of a megapixel for Qwen3-VL-8B: tokens, and its width with three levels of deepstack.
FEATURE = (1024, 4 * 4096)
_STAGING_BYTES = 256 << 20


def _transport(device_name: str, way: str) -> EmbeddedTransport | MooncakeTransport:
    if way == "mooncake":
        device = get_device(device_name)
        capability = device.transport
        return MooncakeTransport(
            MooncakeOptions(
                host="127.0.0.1",
                protocol=(capability.device_protocols or ("tcp",))[0],
                alignment_bytes=capability.alignment_bytes,
                max_regions=capability.max_regions,
                device=device.type,
                activate=device.activate,
            )
        )
    return EmbeddedTransport(path="tcp" if way == "tcp" else "shm")


def _lacks(device_name: str, way: str) -> str:
    """The reason why a way cannot run here; "" where it can."""
    if way != "mooncake":
        return ""
    try:
        transport = _transport(device_name, way)
    except ValueError as error:
        return str(error)
    assert not isinstance(transport, EmbeddedTransport)
    try:
        if are_reached(get_device(device_name), transport):
            return ""
        return f"its {transport.engine.options.protocol} does not reach the memory of {device_name} here"
    finally:
        transport.close()


def _each_way(device_name: str, measured: Callable[[str], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for way in WAYS:
        row = {"lacks": lacks} if (lacks := _lacks(device_name, way)) else measured(way)
        assert lacks or row["is_right"], f"{way}: what came is not what went"
        yield way, row


def measure_kv(
    device_name: str, layout: wire.KVLayout = LAYOUT, *, num_tokens: int = NUM_TOKENS, repeats: int = 20
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield milliseconds of each way, the first time (mapping, allocation) and later."""
    return _each_way(device_name, partial(_measure, device_name, layout, num_tokens, repeats))


def measure_feature(
    device_name: str, shape: tuple[int, int] = FEATURE, *, repeats: int = 20
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the same of a feature in bfloat16, from the end of the tower's work to the consumer's device."""
    return _each_way(device_name, partial(_measure_feature, device_name, shape, repeats))


def _measure(device_name: str, layout: wire.KVLayout, num_tokens: int, repeats: int, way: str) -> dict[str, Any]:
    num_blocks = -(-num_tokens // layout.block_size)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_decode, args=(theirs, device_name, wire.encode(layout), num_blocks, way), daemon=True
    )
    process.start()
    device = get_device(device_name)
    device.activate()
    transport, memory = _memory(device_name, layout, num_blocks, way)
    memory.tensor.copy_(torch.randint_like(memory.tensor, 256))
    device.synchronize()
    ours.send_bytes(wire.encode(wire.KVAnnouncement(memory.region, 0, 0, [])))
    target = wire.decode(ours.recv_bytes(), wire.ReserveReply)
    sender = KVSender(memory, GroupSizer(num_layers=layout.num_layers), time.monotonic)
    local = random.Random(1).sample(range(1, num_blocks + 1), num_blocks)
    times = list[float]()
    for number in range(1 + repeats):
        transfer = _Transfer(f"t{number}", target, ours)
        passed, start = threading.Event(), time.perf_counter()
        sender.push(range(layout.num_layers), [Part(transfer, local, target.block_ids)])
        sender.fence(transfer, passed.set)
        assert passed.wait(600), "no hand-over in ten minutes"
        times.append(1e3 * (time.perf_counter() - start))
        if transfer.error is not None:
            raise transfer.error
    sender.close()
    ours.send_bytes(b"")
    there = ours.recv()
    process.join()
    nbytes = memory.nbytes(layout.num_layers, num_blocks)
    is_right = there == _checksum(memory, local)
    memory.release(transport)
    transport.close()
    return _row(nbytes, times, is_right=is_right)


class _Transfer(OutgoingTransfer):
    """A transfer to the process that reads, at the other end of a pipe."""

    def __init__(self, name: str, target: wire.ReserveReply, connection: Connection) -> None:
        super().__init__(name, target)
        self._connection = connection

    def announce(self, announcement: wire.KVAnnouncement) -> wire.KVTaken:
        self._connection.send_bytes(wire.encode(announcement))
        return wire.decode(self._connection.recv_bytes(), wire.KVTaken)


def _memory(
    device_name: str, layout: wire.KVLayout, num_blocks: int, way: str
) -> tuple[EmbeddedTransport | MooncakeTransport, KVMemory]:
    transport = _transport(device_name, way)
    memory = KVMemory(
        layout,
        num_blocks + 1,
        get_device(device_name),
        transport,
        staging_bytes=_STAGING_BYTES,
        lease_s=60.0,
        shares=way == "auto",
        registers=way == "mooncake",
    )
    return transport, memory


def _checksum(memory: KVMemory, blocks: Sequence[int]) -> int:
    content = memory.tensor[:, :, torch.tensor(blocks, device=memory.tensor.device)].cpu()
    return zlib.crc32(content.contiguous().view(torch.uint8).numpy())


def _decode(connection: Connection, device_name: str, layout: bytes, num_blocks: int, way: str) -> None:
    """The other process: has memory, reads what it is offered, says what it has in the end."""
    get_device(device_name).activate()
    transport, memory = _memory(device_name, wire.decode(layout, wire.KVLayout), num_blocks, way)
    blocks = random.Random(2).sample(range(1, num_blocks + 1), num_blocks)
    source = wire.decode(connection.recv_bytes(), wire.KVAnnouncement).region
    target = wire.ReserveReply(blocks, 0, memory.region.name, memory.staged_cells, memory.maps(source))
    connection.send_bytes(wire.encode(target))
    while message := connection.recv_bytes():
        announced = wire.decode(message, wire.KVAnnouncement)
        read_kv(announced, announced.parts, memory, transport)
        connection.send_bytes(wire.encode(wire.KVTaken([part.transfer_id for part in announced.parts])))
    connection.send(_checksum(memory, blocks))


def _measure_feature(device_name: str, shape: tuple[int, int], repeats: int, way: str) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_encode, args=(theirs, device_name, shape, repeats, way), daemon=True)
    process.start()
    device = get_device(device_name)
    device.activate()
    transport, store = _feature_store(device_name, 0, way)
    assert ours.recv_bytes() == b"ready"
    times, found = list[float](), set[int]()
    for _ in range(1 + repeats):
        start = time.perf_counter()
        ours.send_bytes(b"next")
        feature = store.fetch(wire.decode(ours.recv_bytes(), wire.FeatureEvent))
        times.append(1e3 * (time.perf_counter() - start))
        found.add(zlib.crc32(feature.cpu().numpy()))
    ours.send_bytes(b"")
    there = ours.recv()
    process.join()
    store.close()
    transport.close()
    nbytes = 2 * shape[0] * shape[1]
    return _row(nbytes, times, is_right=found == {there})


def _row(nbytes: int, times: Sequence[float], *, is_right: bool) -> dict[str, Any]:
    median_ms = statistics.median(times[1:])
    return {
        "nbytes": nbytes,
        "first_ms": times[0],
        "median_ms": median_ms,
        "gb_s": nbytes / median_ms / 1e6,
        "is_right": is_right,
    }


def _feature_store(
    device_name: str, capacity_bytes: int, way: str
) -> tuple[EmbeddedTransport | MooncakeTransport, DeviceFeatureStore]:
    transport = _transport(device_name, way)
    host = EmbeddedFeatureStore(transport, _STAGING_BYTES)
    store = DeviceFeatureStore(get_device(device_name), transport, host, capacity_bytes if way == "auto" else 0)
    return transport, store


def _encode(connection: Connection, device_name: str, shape: tuple[int, int], repeats: int, way: str) -> None:
    """The other process: keeps a feature each time that it is asked, and says what it was in the end."""
    device = get_device(device_name)
    device.activate()
    _, store = _feature_store(device_name, _STAGING_BYTES, way)
    feature = torch.randint(0, 256, (2 * shape[0] * shape[1],), dtype=torch.uint8).to(device.torch_device)
    device.synchronize()
    connection.send_bytes(b"ready")

    async def serve() -> None:
        for number in range(1 + repeats):
            connection.recv_bytes()
            stored = await store.put(f"{number}", feature, list(shape), "bfloat16", "r")
            assert stored is not None, "there is room for each"
            connection.send_bytes(wire.encode(store.event(f"{number}", stored, "r")))
            store.release("r", f"{number - 1}")  # whose copy has ended

    asyncio.run(serve())
    connection.recv_bytes()
    connection.send(zlib.crc32(feature.cpu().numpy()))
    store.close()
