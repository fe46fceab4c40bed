"""An instance's report, for tests that care about few of its fields."""

from __future__ import annotations

from typing import Any

from epd_serve.protocol.instance_state import InstanceInfo, Load


def instance_info(name: str = "p0", role: str | None = None, **fields: Any) -> InstanceInfo:
    """Ready and idle; of the role that its name begins with, unless ``role`` says otherwise."""
    values: dict[str, Any] = {
        "name": name,
        "role": name.rstrip("0123456789").upper() if role is None else role,
        "url": "",
        "model": "m",
        "model_path": "",
        "max_model_len": 1024,
        "media_fingerprint": "f",
        "device": "cpu",
        "dtype": "float32",
        "pid": 1,
        "ready": True,
        "load": Load(),
    }
    return InstanceInfo(**values | fields)
