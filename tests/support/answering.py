"""An HTTP server in a thread, whose answers are a function of path and body."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer


class UnixServer(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@contextmanager
def answering(answer: Callable[[str, bytes], tuple[int, bytes]], socket: Path | None = None) -> Iterator[str]:
    """Serve at a free port, whose URL is yielded, or at a Unix socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path, self.rfile.read(int(self.headers.get("content-length", 0))))
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = UnixServer(str(socket), Handler) if socket else ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield "" if socket else f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
