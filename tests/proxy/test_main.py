"""The gateway as a process."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from own_ports import free_port

from epd_serve.config import parse_config
from epd_serve.protocol.addresses import is_loopback
from proxy.settings import GatewaySettings


def test_gateways_share_a_port_where_all_of_them_say_so():
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "epd_serve.cli", "proxy", "--instance", "epd0=http://127.0.0.1:1"]
    command += ["--port", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    gateways = [subprocess.Popen([*command, "--reuse-port"], **pipes) for _ in range(2)]
    try:
        for gateway in gateways:
            assert gateway.stdout.readline().startswith("Ready: ")
        alone = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert alone.returncode != 0 and "address already in use" in alone.stderr
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60)
        with refused.value as response:
            assert json.load(response)["instances"]["epd0"] == {"role": None, "ready": False}
        gateways[0].send_signal(signal.SIGTERM)
        assert (gateways[0].communicate(timeout=300), gateways[0].returncode) == (("", ""), 0)
        for _ in range(8):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=60).close()
    finally:
        for gateway in gateways:
            gateway.kill()
            gateway.communicate()


def test_a_failed_background_task_ends_the_gateway():
    code = """
import asyncio
from epd_serve.config import parse_config
from proxy.fleet import Fleet
from proxy.main import run_gateway

async def run(self):
    await asyncio.sleep(0)
    raise RuntimeError("no more fleet")

Fleet.run = run
raise SystemExit(run_gateway(parse_config(""), [("epd0", "http://127.0.0.1:1")], "127.0.0.1", 0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1, done.stderr
    assert "CRITICAL a background task failed" in done.stderr and "no more fleet" in done.stderr


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("gpu7", False)],
)
def test_private_media_are_allowed_only_for_a_local_gateway(host, loopback):
    assert is_loopback(host) is loopback
    assert GatewaySettings.of(parse_config(""), host).allow_private is loopback
    # Who has a key comes from elsewhere, by a reverse proxy.
    keys = f"gateway: {{api_keys: [{{name: a, hash: 'sha256:{'0' * 64}'}}]}}"
    assert not GatewaySettings.of(parse_config(keys), host).allow_private
    for chosen in ("true", "false"):
        config = parse_config(f"gateway: {{media: {{allow_private: {chosen}}}}}")
        assert GatewaySettings.of(config, host).allow_private is (chosen == "true")
