"""A worker's inheritance from its parent."""

from __future__ import annotations

import os
import socket

import msgspec

from epd_serve.config import DeploymentConfig


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Handed over on the command line; all but the first two are file descriptors.

    Attributes:
        index, count: which worker it is, of how many; 0 leads: it has the admin plane and the controller.
        config: the deployment as the parent has read it, as JSON.
        channel: a stream socket to the parent.
        ledger: shared memory (:mod:`proxy.admission.ledger`).
        listeners: sockets for clients, this worker's own; the parent keeps them open over the worker's death.
        admin: the socket of the admin plane, where there is one.
    """

    index: int
    count: int
    config: int
    channel: int
    ledger: int
    listeners: tuple[int, ...]
    admin: int | None = None

    @classmethod
    def parse(cls, text: str) -> WorkerSetup:
        """Raises ValueError: it is the parent's to write it, and nobody else's."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"--worker is for the workers that gateway.workers starts: {error}") from error

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All that the worker's process must inherit."""
        admin = () if self.admin is None else (self.admin,)
        return (self.config, self.channel, self.ledger, *self.listeners, *admin)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def deployment(self) -> DeploymentConfig:
        """As it was when the parent started."""
        text = os.pread(self.config, os.fstat(self.config).st_size, 0)
        return DeploymentConfig.model_validate_json(text)

    def sockets(self) -> list[socket.socket]:
        """For clients; to be asked for once."""
        return [socket.socket(fileno=number) for number in self.listeners]
