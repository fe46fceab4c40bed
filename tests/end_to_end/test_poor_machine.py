"""A deployment where shared memory and the disk are full and few files may be open: it serves, or says why not."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from chat import chat
from http_client import http_client
from pictures import noise
from program import read_until

NAMESPACES = ["unshare", "--map-root-user", "--mount"]


@pytest.mark.slow
async def test_it_serves_where_everything_is_full(tmp_path: Path) -> None:
    """All places where temporary files could go have four kilobytes left, and a process 64 descriptors."""
    (tmp_path / "d.yaml").write_text("gateway: {port: 0}\ninstances: {base_port: 0, threads: 1}\n")
    full = " && ".join(
        f"mount -t tmpfs -o size=64k tmpfs {place} && head -c {size} /dev/zero >{place}/full"
        for place, size in (("/dev/shm", "64K"), ("/var/tmp", "52K"), ("/tmp", "52K"))
    )
    if subprocess.run([*NAMESPACES, "sh", "-c", full], capture_output=True).returncode:  # noqa: ASYNC221
        pytest.skip("no namespaces can be made here")
    program = shlex.join([sys.executable, "-m", "epd_serve.cli", "up", "/dev/fd/0", "--topology", "E-P-D"])
    script = f"{full} && cd /proc && ulimit -n 64 && exec {program}"
    with (
        (tmp_path / "d.yaml").open() as file,
        subprocess.Popen(  # noqa: ASYNC220
            [*NAMESPACES, "sh", "-c", script],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "EPD_SERVE_RUNTIME_DIR": "/tmp/run"},
        ) as process,
    ):
        try:
            output = await asyncio.to_thread(read_until, process, "Ready: ")
            assert "No space left on device" in output, "what could not be written is named"
            found = re.search(r"Ready: (http://\S+)/v1", output)
            assert found is not None
            async with http_client(found[1]) as client:
                bodies = [chat("What is this?", noise(seed), max_tokens=3) for seed in range(60)]
                answers = await asyncio.gather(
                    *(client.post("/v1/chat/completions", json=body) for body in bodies), return_exceptions=True
                )
                codes = {answer.status_code for answer in answers if isinstance(answer, httpx.Response)}
                assert 200 in codes and codes <= {200, 502, 503}
                async with asyncio.timeout(60):
                    while True:
                        answer = await client.post("/v1/chat/completions", json=bodies[0])
                        if answer.status_code == 200:
                            break
                        await asyncio.sleep(0.1)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0
