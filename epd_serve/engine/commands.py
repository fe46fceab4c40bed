"""Messages between the leader of a tensor-parallel instance and its followers: commands and their answers.

They travel over a :class:`epd_serve.rpc.link.Link`. Followers carry commands out in the order in which they were
sent.
"""

from __future__ import annotations

import socket
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from epd_serve.engine.step_inputs import StepInputs
from epd_serve.protocol.wire import KVLayout, Region
from epd_serve.rpc.link import Link, pack

_MAX_BYTES = (1 << 32) - 1


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Meet the other ranks and load this rank's share of the model; answered by :class:`Joined`."""

    name: str
    model: str
    dtype: str
    device: str
    threads: int | None
    share: tuple[float, float] | None
    memory_share: float | None
    rank: int
    size: int
    rendezvous: str
    timeout_s: float


class CreateCache(msgspec.Struct, frozen=True, kw_only=True, tag="cache"):
    """Allocate the KV cache; ``slab`` is the leader's, in whose cells KV of all heads comes and goes.

    Answered by :class:`Created`.

    The rest is as in :class:`~epd_serve.engine.step.StepExecutor`.
    """

    layout: KVLayout
    num_blocks: int
    slab: Region
    num_position_axes: int
    graph_sizes: list[int]
    max_num_seqs: int
    prefill_graph_sizes: list[int]
    max_model_len: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave the group of ranks, as all of them do at once. Nothing but the end comes after it."""


class CopyBlock(msgspec.Struct, frozen=True, tag="copy"):
    source: int
    target: int


class CopyCells(msgspec.Struct, frozen=True, tag="cells"):
    """Copy blocks of layers ``first_layer`` ... ``end_layer - 1`` to cells of the slab; with ``lands`` from there.

    Answered by :class:`Done`; ``number`` tells this copy from all others.
    """

    number: int
    first_layer: int
    end_layer: int
    blocks: list[int]
    first_cell: int
    lands: bool


class MapKV(msgspec.Struct, frozen=True, tag="map"):
    """Map the KV of those ranks behind a region that need this rank's heads; answered by :class:`Done`."""

    number: int
    region: Region


class UnmapKV(msgspec.Struct, frozen=True, tag="unmap"):
    """End a mapping, if there is one; answered by :class:`Done`."""

    number: int
    name: str


class WriteKV(msgspec.Struct, frozen=True, tag="write"):
    """Copy this rank's heads of blocks of some layers to blocks of a mapped region; answered by :class:`Done`.

    The rest is as in :class:`~epd_serve.transfer.kv_sender.RemoteWrite`.
    """

    number: int
    name: str
    first_layer: int
    end_layer: int
    blocks: list[int]
    remote: list[int]
    slots: list[int]
    deadline: float


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    free_bytes: int
    """Memory of the device that is free once the weights are loaded."""


class Created(msgspec.Struct, frozen=True, tag="created"):
    handle: bytes
    """By which others map the cache; empty where they cannot."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The copy or mapping with this number has been carried out; with an error, it has not been and may not be."""

    number: int
    error: str = ""


#: Commands that a rank carries out beside its steps, in their order.
Beside = CopyCells | MapKV | UnmapKV | WriteKV
Command = Join | CreateCache | StepInputs | CopyBlock | Leave | Beside
Answer = Joined | Created | Done


def leader_end(end: socket.socket) -> Link[Answer]:
    """The leader's end of a socket pair."""
    return Link(end, _ANSWERS, max_bytes=_MAX_BYTES)


def follower_end(end: socket.socket) -> Link[Command]:
    """The follower's end of a socket pair."""
    return Link(end, _COMMANDS, max_bytes=_MAX_BYTES)


def packed(command: Command) -> bytearray:
    """A command for :meth:`Link.send_packed`."""
    return pack(command, _ENCODER, _MAX_BYTES)


def _encode_tensor(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, Tensor):
        if value.is_meta:  # it comes by the group
            return str(value.dtype).removeprefix("torch."), list(value.shape), b""
        flat = value.contiguous().view(-1).view(torch.uint8)
        return str(value.dtype).removeprefix("torch."), list(value.shape), flat.numpy().tobytes()
    raise NotImplementedError(f"{type(value).__name__} is no part of a command")


def _decode_tensor(kind: type, value: Any) -> Tensor:
    assert kind is Tensor
    dtype, shape, data = value
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta" if prod(shape) else "cpu")
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_tensor)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_decode_tensor)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
