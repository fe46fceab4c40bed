"""Where servers are reached."""

from __future__ import annotations


def url_of(host: str, port: int) -> str:
    """The URL under which a server on this machine that listens on ``host`` is reached from this machine."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
