"""Every implementation of a transport by name, for the tests that all of them must pass."""

from __future__ import annotations

import importlib.util

import pytest

from epd_serve.transfer.embedded import EmbeddedTransport
from epd_serve.transfer.mooncake.engine import MooncakeOptions
from epd_serve.transfer.mooncake.transport import MooncakeTransport
from epd_serve.transfer.transport import Transport

#: Mooncake's is fixed by the first engine of a process, so all tests have this one.
TIMEOUT_S = 2.0
#: Smaller than what tests move: bytes from memory that is not registered pass in several parts.
STAGING_BYTES = 512

HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None
needs_mooncake = pytest.mark.skipif(not HAS_MOONCAKE, reason="mooncake is not installed")


def kinds(*names: str) -> list[object]:
    """Test parameters; mooncake's is skipped where it is not installed."""
    return [pytest.param(name, marks=needs_mooncake) if name == "mooncake" else name for name in names]


def mooncake_options(staging_bytes: int = STAGING_BYTES) -> MooncakeOptions:
    return MooncakeOptions(host="127.0.0.1", protocol="tcp", staging_bytes=staging_bytes, timeout_s=TIMEOUT_S)


def make_transport(kind: str) -> Transport:
    if kind == "mooncake":
        return MooncakeTransport(mooncake_options())
    assert kind in ("shm", "tcp", "auto")
    return EmbeddedTransport(path=kind, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
