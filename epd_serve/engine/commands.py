"""Messages between the leader of a tensor-parallel instance and its followers: commands and their answers.

Length-prefixed msgpack over a socket pair. Followers carry commands out in the order in which they were sent.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from epd_serve.engine.step_inputs import StepInputs
from epd_serve.protocol.wire import KVLayout, Region

_LENGTH = struct.Struct("<Q")


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
    """Allocate the KV cache; ``slab`` is the leader's, in which KV of all heads comes and goes.

    The rest is as in :class:`~epd_serve.engine.step.StepExecutor`.
    """

    layout: KVLayout
    num_blocks: int
    slab: Region
    num_position_axes: int
    graph_sizes: list[int]
    max_model_len: int


class CopyBlock(msgspec.Struct, frozen=True, tag="copy"):
    source: int
    target: int


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Copy blocks of layers ``first_layer`` ... ``end_layer - 1`` into the slab; answered by :class:`Done`.

    ``number`` tells this staging from all others.
    """

    number: int
    first_layer: int
    end_layer: int
    blocks: list[int]


class Land(msgspec.Struct, frozen=True, tag="land"):
    """Copy blocks of all layers from the slab into the cache."""

    blocks: list[int]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    free_bytes: int
    """Memory of the device that is free once the weights are loaded."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The :class:`Stage` with this number has been carried out."""

    number: int


KVCommand = CopyBlock | Stage | Land
Command = Join | CreateCache | StepInputs | KVCommand
Answer = Joined | Done


class Channel:
    """One end of the socket pair. Sending is safe from any thread; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._send_lock = threading.Lock()

    def send(self, message: Command | Answer) -> None:
        """Send a message. Raises OSError when the other end is gone."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)

    def receive(self) -> bytes:
        """The next message. Raises EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return bytes(self._read(length))

    def close(self) -> None:
        """Close the socket; the other end learns of it, and so does a thread that receives here."""
        with suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                read = self._socket.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not read:
                raise EOFError("the other end is closed")
            view = view[read:]
        return data


def encode(message: Command | Answer) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_tensor)


def decode_command(data: bytes) -> Command:
    return _COMMANDS.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _ANSWERS.decode(data)


def _encode_tensor(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, Tensor):
        flat = value.contiguous().view(-1).view(torch.uint8)
        return str(value.dtype).removeprefix("torch."), list(value.shape), flat.numpy().tobytes()
    raise NotImplementedError(f"{type(value).__name__} is no part of a command")


def _decode_tensor(kind: type, value: Any) -> Tensor:
    assert kind is Tensor
    dtype, shape, data = value
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)


_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_decode_tensor)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
