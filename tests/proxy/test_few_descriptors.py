"""A gateway that may open few files: who comes too many hears so, and it serves on."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[1])))
sys.argv[1:] = ["proxy", "--port", sys.argv[2], "--instance", f"pd0=http://127.0.0.1:{sys.argv[3]}"]
from epd_serve.cli import main
main()
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def status(one: socket.socket, path: bytes = b"/health/live") -> int:
    """0: it was closed without a word."""
    one.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
    try:
        answer = one.recv(65536)
    except ConnectionError:
        return 0
    if answer.startswith(b"HTTP/1.1 503"):
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "out_of_descriptors"
        assert b"retry-after" in answer
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize("most", [80, 4096])
def test_connections_beyond_the_limit_are_refused_in_words(most: int) -> None:
    port, nobody = free_ports(2)
    command = [sys.executable, "-c", PROGRAM, str(most), str(port), str(nobody)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while True:
                try:
                    connect(port).close()
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.05)
            several = []
            seen: Counter[int] = Counter()
            for _ in range(100):
                several.append(connect(port))
                seen[status(several[-1])] += 1
            assert set(seen) == ({200, 503} if most == 80 else {200}), seen
            several += [connect(port) for _ in range(200)]  # all at once, and none of them speaks
            time.sleep(2.5)  # it looks after its own memory meanwhile, and asks for its instance
            for one in several:
                one.close()
            deadline = time.monotonic() + 60
            while True:
                with connect(port) as one:
                    if status(one) == 200:
                        break
                assert time.monotonic() < deadline, "it serves again"
                time.sleep(0.1)
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert (f"may have {most} files open" in log) == (most < 1024)
