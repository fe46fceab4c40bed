"""An instance whose port is taken says so in a sentence; one that is ended while it loads ends at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from program import read_until

from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.instance import main
from epd_serve.types import Role

#: An instance whose model takes long to load.
LOADING = """
import time
from epd_serve.config import InstanceOptions, ShapeConfig
from epd_serve.instance import instance, main
from epd_serve.types import Role

def load(*_):
    print("loading", flush=True)
    time.sleep(1000)

instance.open_model = load
model = ShapeConfig(shape_of="qwen2.5-vl-7b")
device = "emulated:h200:0"
main.run_instance(
    InstanceOptions(name="p", role=Role.parse("P"), model=model, served_model_name="m", device=device, port=0)
)
"""


def test_one_that_loads_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True) as process:
        try:
            read_until(process, "loading")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = InstanceOptions(
            name="p",
            role=Role.parse("P"),
            model=ShapeConfig(shape_of="qwen2.5-vl-7b"),
            served_model_name="m",
            device="emulated:h200:0",
            port=port,
        )
        with pytest.raises(ValueError, match=rf"cannot listen on .* port {port}: Address already in use"):
            await main._serve(options)
