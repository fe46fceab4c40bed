"""API keys and their hashes.

Keys have 256 random bits, so SHA-256 protects them as well as a slow hash would (slow hashes protect guessable
passwords), at about a microsecond per request.
"""

from __future__ import annotations

import os
import secrets
from hashlib import sha256

#: Prefix of keys made by ``epd-serve key new``, for people and secret scanners.
KEY_PREFIX = "epd-"
HASH_PREFIX = "sha256:"
#: Variable with the admin plane's key for its callers, because process lists show arguments.
ADMIN_KEY = "EPD_SERVE_ADMIN_KEY"


def new_key() -> tuple[str, str]:
    """Return a new API key of 256 random bits, and its hash for the deployment file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """Return ``sha256:`` and 64 hex digits."""
    return HASH_PREFIX + sha256(key.encode()).hexdigest()


def admin_headers() -> dict[str, str]:
    """Return the headers of a call to an admin plane, with its key if known."""
    key = os.environ.get(ADMIN_KEY, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}
