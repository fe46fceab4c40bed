import socket
import subprocess
import sys
from itertools import chain, count, pairwise, repeat
from pathlib import Path

import pytest
from own_ports import free_port

from epd_serve.config import parse_config
from epd_serve.launch.processes import ports as ports_module
from epd_serve.launch.processes.ports import choose_ports, next_port
from epd_serve.rpc.sockets import listen


def test_no_port_is_chosen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn: here each number twice, and blocks that overlap."""
    first = free_port("127.0.0.1")
    for engine, step in (("native", 1), ("vllm", 8)):
        drawn = chain.from_iterable(repeat(first + step * number, 2) for number in count())
        monkeypatch.setattr(ports_module, "draw_port", lambda count, drawn=drawn: next(drawn))
        config = parse_config(
            f"topology: E-P-D\nengine: {engine}\ninstances: {{base_port: 0}}\ngateway: {{port: 0}}"
        )
        ports = choose_ports(config)
        assert all(b - a >= (1 if engine == "native" else 16) for a, b in pairwise(sorted(ports.instances)))
        assert len({ports.gateway, *ports.instances}) == 4


def test_a_port_of_a_server_that_starts_later_is_none_that_anybody_else_is_given() -> None:
    """In another process, as tests have ports of their own here."""
    code = "from epd_serve.launch.processes import ports; print(*(ports.draw_port(1) for _ in range(20)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < int(port) < first for port in done.stdout.split())


def test_the_gateway_s_port_is_taken_from_the_start_of_a_deployment_on() -> None:
    """Its gateway accepts connections only a while later; another one of the deployment inherits them."""
    with listen("127.0.0.1", free_port("127.0.0.1"), "gateway") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        config = parse_config(f"topology: EPD\ngateway: {{port: {port}}}\ninstances: {{base_port: 0}}")
        with pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1 port {port}"):
            choose_ports(config)
        assert choose_ports(config, check=False).gateway == port, "a dry run beside the running deployment"
    choose_ports(config)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{gateway: {port: 8101}, instances: {base_port: 8100}}", "p0 .instances.base_port"),
        ("{gateway: {port: 0}, instances: {base_port: 65534}}", "d0 .instances.base_port"),
        ("gateway: {host: no such host}", "gateway .gateway.port. cannot listen on no such host"),
        ("{gateway: {port: 0, admin: {port: TAKEN}}}", "admin plane .gateway.admin.port"),
        ("{topology: EPD, gateway: {port: 0}, instances: {base_port: TAKEN}}", "epd0 .instances.base_port"),
    ],
)
def test_a_port_that_is_not_free_is_named_with_its_option(text: str, named: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match=named):
        choose_ports(parse_config(text.replace("TAKEN", str(taken.getsockname()[1]))))


def test_one_more_port_is_the_next_free_one_or_any() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert next_port(parse_config(f"instances: {{base_port: {port}}}"), {port + 1}, "e1") > port + 1
    assert next_port(parse_config("instances: {base_port: 0}"), set(), "e1")
