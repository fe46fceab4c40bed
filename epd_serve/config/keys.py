"""API keys and their hashes.

Keys are random text of 256 bits, so one SHA-256 is as good a hash for them as a slow one (slow hashes make up for
passwords that can be guessed) and costs about a microsecond per request.
"""

from __future__ import annotations

import os
import secrets
from hashlib import sha256

#: What keys made by ``epd-serve key new`` begin with, so that people and secret scanners know one at sight.
KEY_PREFIX = "epd-"
HASH_PREFIX = "sha256:"
#: The variable that holds the key of an admin plane for those who call it: it shall stand in no list of processes.
ADMIN_KEY = "EPD_SERVE_ADMIN_KEY"


def new_key() -> tuple[str, str]:
    """A fresh API key of 256 random bits and its hash as the deployment file takes it."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """``sha256:`` and 64 hex digits."""
    return HASH_PREFIX + sha256(key.encode()).hexdigest()


def admin_headers() -> dict[str, str]:
    """Return the headers of a call to an admin plane, where its key is known."""
    key = os.environ.get(ADMIN_KEY, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}
