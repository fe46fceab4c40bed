"""TLS for the calls between the processes of a deployment: both ends show a certificate of the deployment's CA.

A process reads the files at its start. A certificate holds for a server and for a client (extendedKeyUsage, where
it has one) and names the address under which its process is reached.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from epd_serve.protocol.addresses import is_wildcard

#: The variables that hold the files' paths, for who is started elsewhere.
TLS_CA, TLS_CERT, TLS_KEY = "EPD_SERVE_TLS_CA", "EPD_SERVE_TLS_CERT", "EPD_SERVE_TLS_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files: the CA's certificate, this process's with those between it and the CA, and its private key."""

    ca: Path
    cert: Path
    key: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which :func:`tls_files` reads them."""
        return {TLS_CA: str(self.ca), TLS_CERT: str(self.cert), TLS_KEY: str(self.key)}

    @property
    def server_options(self) -> dict[str, Any]:
        """The arguments of ``uvicorn.Config``."""
        return {
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.cert),
            "ssl_keyfile": str(self.key),
            "ssl_cert_reqs": int(ssl.CERT_REQUIRED),
        }

    def client_context(self) -> ssl.SSLContext:
        """Raises ValueError for files that cannot be read, or do not belong together."""
        return _context(self, ssl.Purpose.SERVER_AUTH, self._changed_ns())

    def check(self, host: str | None) -> None:
        """Meet a process with these files at ``host``, as others will, without a connection. None and a wildcard:
        its address is not looked at.

        Raises ValueError where one end does not accept the other's certificate.
        """
        has_name = host is not None and not is_wildcard(host)
        client, server = self.client_context(), _context(self, ssl.Purpose.CLIENT_AUTH, self._changed_ns())
        server.verify_mode = ssl.CERT_REQUIRED
        client_out, server_out = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = {
            client.wrap_bio(server_out, client_out, server_hostname=host if has_name else _NO_NAME),
            server.wrap_bio(client_out, server_out, server_side=True),
        }
        while ends:
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLCertVerificationError as error:
                    if not has_name and error.verify_code == _WRONG_NAME:
                        return
                    raise ValueError(f"tls: {self.cert} is not accepted: {error.verify_message}") from error

    def _changed_ns(self) -> tuple[int, ...]:
        """When each file was changed last. Raises ValueError for one that is not there."""
        found = []
        for name in ("ca", "cert", "key"):
            path: Path = getattr(self, name)
            try:
                path.open("rb").close()
                found.append(path.stat().st_mtime_ns)
            except OSError as error:
                raise ValueError(f"tls.{name}: {path}: {error.strerror}") from error
        return tuple(found)


_NO_NAME = "epd-serve.invalid"
#: X509_V_ERR_HOSTNAME_MISMATCH: the last thing that is looked at.
_WRONG_NAME = 62


def tls_files(environment: Mapping[str, str] | None = None) -> TlsFiles | None:
    """The files that the environment names; None: it names none. Raises ValueError where some are missing."""
    found = os.environ if environment is None else environment
    names = [name for name in (TLS_CA, TLS_CERT, TLS_KEY) if found.get(name, "").strip()]
    if not names:
        return None
    if missing := {TLS_CA, TLS_CERT, TLS_KEY} - {*names}:
        raise ValueError(f"{', '.join(names)} is set and {', '.join(sorted(missing))} is not; set all three")
    ca, cert, key = (Path(found[name].strip()) for name in (TLS_CA, TLS_CERT, TLS_KEY))
    return TlsFiles(ca=ca, cert=cert, key=key)


@lru_cache(maxsize=8)
def _context(files: TlsFiles, purpose: ssl.Purpose, changed_ns: tuple[int, ...]) -> ssl.SSLContext:
    """Read the files, again where they have changed."""
    try:
        context = ssl.create_default_context(purpose, cafile=str(files.ca))
    except ssl.SSLError as error:
        raise ValueError(f"tls.ca: {files.ca} holds no certificate in PEM ({error.reason or error})") from error
    try:
        # A key with a password would be asked for at the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls.cert: {files.cert} and tls.key: {files.key} are no certificate and its private key without a "
            f"password, in PEM ({error.reason or error})"
        ) from error
    return context
