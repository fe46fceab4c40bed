"""Media items that stand in the request itself: ``data:image/png;base64,...``."""

from __future__ import annotations

import binascii

import pybase64

from epd_serve.errors import InvalidRequest, TooLarge


def parse_data_url(url: str, max_bytes: int) -> tuple[str, bytes]:
    """``data:image/png;base64,...`` → (media type in lower case, bytes).

    The media type may be left out ("" then). Raises InvalidRequest with what is wrong, TooLarge before decoding
    where the text is too long for ``max_bytes``.
    """
    header, comma, text = url.partition(",")
    return decode_data_url(header + comma, text, max_bytes)


def decode_data_url(header: str, text: str | memoryview, max_bytes: int) -> tuple[str, bytes]:
    """The same for a data URL in two parts: up to its first comma, and the rest."""
    if header[:5].lower() != "data:" or not header.endswith(","):
        raise InvalidRequest(
            f"{header[:40]!r} is no data URL; it should look like 'data:image/png;base64,iVBORw0...'"
        )
    media_type, *parameters = header[5:-1].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequest("the data URL is not base64; it should look like 'data:image/png;base64,iVBORw0...'")
    media_type = media_type.strip().lower()
    if media_type and not media_type.startswith("image/"):
        raise InvalidRequest(f"the data URL has media type {media_type[:60]!r}; only image/... is supported")
    if len(text) // 4 * 3 > max_bytes + 2:
        raise TooLarge(f"the image has about {len(text) // 4 * 3} bytes; at most {max_bytes} are accepted")
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"the base64 text of the data URL cannot be decoded ({error}); use the standard alphabet (A-Z a-z 0-9 "
            f"+ /) with '=' padding and without line breaks"
        ) from error
    return media_type, bytes(data)
