"""TLS between the processes of a deployment: both ends show a certificate of the deployment's CA.

A process reads the files at its start. Its certificate must allow server and client use (extendedKeyUsage, if any)
and name the address that others connect to.
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

#: Environment variables with the paths of the files.
TLS_CA, TLS_CERT, TLS_KEY = "EPD_SERVE_TLS_CA", "EPD_SERVE_TLS_CERT", "EPD_SERVE_TLS_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files: the CA's certificate, this process's certificate chain and its private key."""

    ca: Path
    cert: Path
    key: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which :func:`tls_files` reads them."""
        return {TLS_CA: str(self.ca), TLS_CERT: str(self.cert), TLS_KEY: str(self.key)}

    @property
    def server_options(self) -> dict[str, Any]:
        """Arguments of ``uvicorn.Config``."""
        return {
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.cert),
            "ssl_keyfile": str(self.key),
            "ssl_cert_reqs": int(ssl.CERT_REQUIRED),
        }

    def client_context(self) -> ssl.SSLContext:
        """Raises ValueError if the files cannot be read or do not belong together."""
        return _context(self, ssl.Purpose.SERVER_AUTH)

    def check(self, host: str | None) -> None:
        """Do a TLS handshake in memory with a server at ``host`` that uses these files.

        None or a wildcard address skips the check of the name. Raises ValueError if a certificate is rejected.
        """
        has_name = host is not None and not is_wildcard(host)
        client, server = self.client_context(), _context(self, ssl.Purpose.CLIENT_AUTH)
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


_NO_NAME = "epd-serve.invalid"
#: X509_V_ERR_HOSTNAME_MISMATCH, the last check of a certificate.
_WRONG_NAME = 62


def tls_files(environment: Mapping[str, str] | None = None) -> TlsFiles | None:
    """Return the files that the environment names, or None. Raises ValueError if only some variables are set."""
    found = os.environ if environment is None else environment
    names = [name for name in (TLS_CA, TLS_CERT, TLS_KEY) if found.get(name, "").strip()]
    if not names:
        return None
    if missing := {TLS_CA, TLS_CERT, TLS_KEY} - {*names}:
        raise ValueError(f"{', '.join(names)} is set and {', '.join(sorted(missing))} is not; set all three")
    ca, cert, key = (Path(found[name].strip()) for name in (TLS_CA, TLS_CERT, TLS_KEY))
    return TlsFiles(ca=ca, cert=cert, key=key)


@lru_cache(maxsize=8)
def _context(files: TlsFiles, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Read the files, once in a process. Raises ValueError."""
    for name, path in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"tls.{name}: {path}: {error.strerror}") from error
    try:
        context = ssl.create_default_context(purpose, cafile=str(files.ca))
    except ssl.SSLError as error:
        raise ValueError(f"tls.ca: {files.ca} is not a PEM certificate ({error.reason or error})") from error
    try:
        # an empty password, or OpenSSL asks for one at the terminal
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"tls.cert: {files.cert} and tls.key: {files.key} are not a PEM certificate and its private key "
            f"without a password ({error.reason or error})"
        ) from error
    return context
