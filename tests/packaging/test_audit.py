"""Known vulnerabilities are found where OSV can be reached; a release says what it is made of."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAW = {"id": "OSV-1", "summary": "It breaks.", "affected": [{"package": {"name": "pillow", "ecosystem": "PyPI"}}]}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "requirements" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@contextmanager
def osv(flaws: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """A server of vulnerabilities by package: its address, and who was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(f"{query['package']['name']}=={query['version']}")
            found = flaws.get(query["package"]["name"])
            body = json.dumps({"vulns": [found]} if found else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        server.shutdown()


@pytest.mark.parametrize("flaws", [{}, {"pillow": FLAW}], ids=["none", "one"])
def test_all_that_is_pinned_is_asked_for(flaws: dict[str, object]) -> None:
    with osv(flaws) as (url, asked):
        done = run("audit.py", "--osv-url", url)
    assert done.returncode == len(flaws), done.stdout + done.stderr
    assert f"{len(asked)} packages audited: {len(flaws)} known" in done.stdout
    assert ("OSV-1" in done.stdout) == bool(flaws)
    assert "torch==2.14.1" in asked and len(asked) == len(set(asked)) > 100


def test_where_there_is_no_data_the_audit_says_so() -> None:
    done = run("audit.py", "--osv-url", "http://127.0.0.1:1/v1/query")
    assert (done.returncode, done.stdout.startswith("not audited")) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("lock", ["base", "docs"])
def test_a_bill_of_materials_has_every_package_and_hash_of_its_lock(lock: str) -> None:
    bill = json.loads(run("sbom.py", lock).stdout)
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    hashes = [digest["content"] for part in bill["components"] for digest in part["hashes"]]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert len(hashes) == text.count("--hash=sha256:") and all(digest in text for digest in hashes)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert bill["metadata"]["component"]["version"] == version
    [needed] = [one["dependsOn"] for one in bill["dependencies"] if one["ref"] == "epd-serve"]
    assert {part["bom-ref"] for part in bill["components"]} == set(needed)
