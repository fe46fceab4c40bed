"""Names whose servers are silent hold up the one who asks for them, and no other."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from proxy.media import resolver as lookups

SCRIPT = Path(__file__).parent.parent / "support" / "dead_names.py"


def test_dead_names_of_one_key_are_no_failure_of_another(tmp_path):
    """With the system's own resolver, whose only server answers for one name, in a network of its own."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = " && ".join(f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("resolv.conf", "hosts"))
    if Path("/etc/nsswitch.conf").exists():
        mounts += f" && mount --bind {tmp_path}/nsswitch.conf /etc/nsswitch.conf"
    command = f"ip link set lo up && {mounts} && exec {sys.executable} {SCRIPT}"
    namespaces = ["unshare", "--map-root-user", "--mount", "--net"]
    if subprocess.run([*namespaces, "sh", "-c", f"ip link set lo up && {mounts}"], capture_output=True).returncode:
        pytest.skip("no namespaces can be made here")
    done = subprocess.run([*namespaces, "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["asked for dead names"] >= 8
    assert seen["dead"] == "InvalidRequest"
    assert seen["dead again"] == "InvalidRequest"
    # Each in much less time than a dead name takes (10 s) or a fetch may (60 s).
    assert seen["another's name"] == seen["another's literal"] == seen["own literal"] == "picture"
    assert seen["own name"] == "picture"
    assert seen["an instance's name"] == "127.0.0.1"
    assert max(seen["seconds"].values()) < 5


async def test_waiting_for_a_name_has_an_end(monkeypatch):
    """And a name that is still looked up has its place among those that may be."""
    entered, release = [], threading.Event()

    def never(*_args, **_options):
        entered.append(None)
        release.wait(60)
        return []

    monkeypatch.setattr(lookups.socket, "getaddrinfo", never)
    monkeypatch.setattr(lookups, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(lookups, "MAX_LOOKUPS", 1)
    names = lookups.Lookups()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await names.resolve("silent.example", 80)
    assert len(entered) == 1
    release.set()
    monkeypatch.setattr(lookups, "TIMEOUT_S", 60)
    assert await names.resolve("silent.example", 80) == []
