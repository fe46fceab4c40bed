"""Seconds that bytes take between instances, by how far these are apart."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The host and the device of an instance. Unknown hosts ("") count as different ones."""

    host_id: str = ""
    device: str = ""


UNKNOWN = Place()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    handshake_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        return self.handshake_s + nbytes / self.bytes_per_s


#: Orders of magnitude: memory of one device, shared memory of one host, a 10 Gbit/s network.
SAME_DEVICE = Link(handshake_s=1e-4, bytes_per_s=2e10)
SAME_HOST = Link(handshake_s=3e-4, bytes_per_s=4e9)
NETWORK = Link(handshake_s=1e-3, bytes_per_s=1e9)


def link_between(one: Place, other: Place) -> Link:
    if not one.host_id or one.host_id != other.host_id:
        return NETWORK
    return SAME_DEVICE if one.device == other.device else SAME_HOST
