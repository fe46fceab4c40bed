"""A CA and certificates of it, made with the openssl command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from epd_serve.rpc.tls import TlsFiles


class Authority:
    """A CA of its own, whose files lie in ``directory``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self._run(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 wants both extensions
        )

    def files(self, name: str, *, ip: str = "127.0.0.1", days: int = 2, ca: Authority | None = None) -> TlsFiles:
        """A certificate for an address; ``days`` below 0: it has expired. ``ca``: whom its holder trusts."""
        own = f"{self._name}-{name}"
        self._run(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", f"{own}.key", "-out", f"{own}.csr"),
        )
        (self._directory / f"{own}.ext").write_text(f"subjectAltName=IP:{ip}\nauthorityKeyIdentifier=keyid\n")
        self._run(
            *("x509", "-req", "-in", f"{own}.csr", "-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key"),
            *("-CAcreateserial", "-extfile", f"{own}.ext", "-out", f"{own}.pem", "-days", str(days)),
        )
        directory = self._directory
        trusted = ca or self
        return TlsFiles(
            ca=trusted._directory / f"{trusted._name}.pem",
            cert=directory / f"{own}.pem",
            key=directory / f"{own}.key",
        )

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self._directory, capture_output=True, text=True, env={**os.environ}
        )
        assert done.returncode == 0, done.stderr
