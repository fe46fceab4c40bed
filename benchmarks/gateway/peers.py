"""The gateways that are compared, each as a command; all listen on loopback."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Ports of the stage instances, by role."""

    encode: list[int]
    prefill: list[int]
    decode: list[int]

    @property
    def all(self) -> list[tuple[str, int]]:
        roles = (("E", self.encode), ("P", self.prefill), ("D", self.decode))
        return [(role, port) for role, ports in roles for port in ports]


def _urls(ports: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``command`` gives the argument list for (stages, port, directory for files)."""

    name: str
    what: str
    command: Callable[[Stages, int, Path], list[str]]


def ours(before: Path | None = None) -> Peer:
    """This checkout's gateway, or that of the one in ``before``, by the Python of its own ``.venv``."""
    python = [sys.executable] if before is None else ["env", "-C", str(before), str(before / ".venv/bin/python")]

    def command(stages: Stages, port: int, directory: Path) -> list[str]:
        instances = [f"{role}{number}=http://127.0.0.1:{number}" for role, number in stages.all]
        return [
            *python,
            "-m",
            "benchmarks.gateway.serve",
            str(port),
            str(directory / "access.log"),
            *instances,
        ]

    name = "epd-serve" if before is None else "before"
    return Peer(name=name, what="E, P and D; auth, metrics, validation, access log", command=command)


def vllm_epd(script: Path, python: str) -> Peer:
    def command(stages: Stages, port: int, _: Path) -> list[str]:
        return [
            python,
            str(script),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--encode-servers-urls", ",".join(_urls(stages.encode))),
            *("--prefill-servers-urls", ",".join(_urls(stages.prefill))),
            *("--decode-servers-urls", ",".join(_urls(stages.decode))),
        ]

    return Peer(name="vllm-epd", what="vLLM's disagg_epd_proxy.py: E, P and D", command=command)


def vllm_router(program: str) -> Peer:
    def command(stages: Stages, port: int, _: Path) -> list[str]:
        return [
            program,
            *("--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
            *("--worker-urls", *_urls(stages.decode)),
            *("--log-level", "warning", "--max-payload-size", str(1 << 28)),
        ]

    return Peer(name="vllm-router", what="Rust; one hop, no E, no P", command=command)


def nginx() -> Peer | None:
    """None where nginx is not installed."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        return None

    def command(stages: Stages, port: int, directory: Path) -> list[str]:
        upstream = "".join(f"server 127.0.0.1:{number};" for number in stages.decode)
        configuration = directory / "nginx.conf"
        configuration.write_text(_NGINX.format(port=port, upstream=upstream, directory=directory))
        return [program, "-c", str(configuration), "-e", str(directory / "nginx.error.log")]

    return Peer(name="nginx", what="one hop, no E, no P, nothing read", command=command)


_NGINX = """
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log {directory}/nginx.error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 256m; client_body_buffer_size 64m; client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy; fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u;
  scgi_temp_path {directory}/s; keepalive_requests 1000000;
  upstream stages {{ {upstream} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://stages; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""
