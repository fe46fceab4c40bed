"""Room for a body that is about to come."""

from __future__ import annotations

import ctypes

#: Less than this is as soon set to zero.
_MIN_BYTES = 32 * 1024

_resize = ctypes.pythonapi.PyByteArray_Resize
_resize.argtypes = (ctypes.py_object, ctypes.c_ssize_t)
_resize.restype = ctypes.c_int


def buffer(size: int) -> bytearray:
    """``size`` bytes to be written before they are read: what is in them nobody knows. ``bytearray(size)`` would
    write megabytes of zeros first."""
    if size < _MIN_BYTES:
        return bytearray(size)
    room = bytearray()
    _resize(room, size)
    return room
