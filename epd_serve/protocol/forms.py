"""Bodies of the type ``multipart/form-data`` (RFC 7578), as clients upload files."""

from __future__ import annotations

import re

from epd_serve.errors import InvalidRequest

_MAX_PARTS = 32
_MAX_HEAD = 4096
_NAME = re.compile(rb'[;\s]name=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)


def read_form(body: bytes | bytearray) -> dict[str, bytes]:
    """The fields by name; of a file its content. The boundary is the body's first line.

    Raises InvalidRequest for a body that is no form, is cut off, or has a field twice.
    """
    boundary = bytes(body[: body.find(b"\r\n", 0, 256)]) if body[:2] == b"--" else b""
    if not 2 < len(boundary) <= 72:
        raise InvalidRequest("the body must be multipart/form-data with a field 'file'", code="invalid_form")
    fields: dict[str, bytes] = {}
    position = len(boundary) + 2
    while True:
        end = body.find(b"\r\n" + boundary, position)
        split = body.find(b"\r\n\r\n", position, position + _MAX_HEAD)
        if end < 0 or split < 0 or split > end or len(fields) == _MAX_PARTS:
            raise InvalidRequest("the form is cut off, or broken", code="invalid_form")
        found = _NAME.search(body, position, split)
        if found is None:
            raise InvalidRequest("a part of the form has no name", code="invalid_form")
        name = (found[1] or found[2] or b"").decode("utf-8", "replace")
        if name in fields:
            raise InvalidRequest(f"the form has the field {name[:100]!r} twice", param=name[:100])
        fields[name] = bytes(body[split + 4 : end])
        position = end + 2 + len(boundary)
        if body[position : position + 2] == b"--":
            return fields
        if body[position : position + 2] != b"\r\n":
            raise InvalidRequest("the form is cut off, or broken", code="invalid_form")
        position += 2
