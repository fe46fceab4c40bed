"""Stands in for ``epd-serve instance`` and ``epd-serve proxy``: a server with /health and a chosen behaviour.

FAKE_DIR holds a file NAME.pid for each started process; FAKE_<NAME> is a behaviour: "die", "deaf" (to SIGTERM),
"loading" (503 for half a second), "never" (503 for ever), "parent" (has a child of its own), "once" (starts only
once, and dies at every later start), "stuck" ("deaf" and "never"), "clean" (exits with 0 after SIGTERM), "retires"
(says so and exits with 0 after SIGQUIT).
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--name", default="gateway")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--admin-path")
    parser.add_argument("--listener", type=int)
    arguments, _ = parser.parse_known_args()
    vars(arguments).update(arguments.options)
    behaviour = os.environ.get(f"FAKE_{arguments.name.upper()}", "")
    folder = Path(os.environ["FAKE_DIR"])
    pid_file = folder / f"{arguments.name}.pid"
    started_before = pid_file.exists()
    pid_file.write_text(str(os.getpid()))
    if behaviour == "die" or (behaviour == "once" and started_before):
        for line in range(30):
            print(f"line {line}", flush=True)
        print("no memory for the tower", file=sys.stderr)
        sys.exit(3)
    if behaviour in ("deaf", "stuck"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "retires":
        signal.signal(signal.SIGQUIT, lambda *_: (print("retired", flush=True), sys.exit()))
    if behaviour == "clean":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if behaviour == "parent":
        child = subprocess.Popen(["sleep", "600"])
        (folder / "child.pid").write_text(str(child.pid))
    ready_at = time.monotonic() + {"loading": 0.5, "never": 600.0, "stuck": 600.0}.get(behaviour, 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if time.monotonic() >= ready_at else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

    if arguments.listener is None:
        ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=arguments.listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Path(arguments.admin_path).unlink(missing_ok=True)
    UnixServer(arguments.admin_path, Handler).serve_forever()


class UnixServer(ThreadingMixIn, UnixStreamServer):
    """The gateway's admin API."""

    daemon_threads = True

    def get_request(self) -> Any:
        connection, _ = super().get_request()
        return connection, ("", 0)


if __name__ == "__main__":
    main()
