"""Many small chunks of an HTTP/1.1 body at once (RFC 9112, section 7.1), as a stream of tokens has them."""

from __future__ import annotations

_CRLF = b"\r\n"
_LAST = [b"0", b"", b""]
#: The plain spelling of sizes; chunks of other ones are rare, or large.
_SIZES = {b"%x" % size: size for size in range(1, 2048)}


def whole_chunks(data: bytes) -> tuple[list[bytes], bytes] | None:
    """What is in the chunks of ``data``, and the body's end behind them, or b"" where more is to come.

    None where these are not whole chunks, or not plain ones: then a parser has to look at each.
    """
    parts = data.split(_CRLF)
    end = b""
    if parts[-3:] == _LAST:
        del parts[-3:]
        end = b"0\r\n\r\n"
    elif parts.pop():
        return None
    contents = parts[1::2]
    return (contents, end) if [*map(_SIZES.get, parts[::2])] == [*map(len, contents)] else None
