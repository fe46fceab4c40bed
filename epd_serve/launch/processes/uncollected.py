"""Imported first in the fork server: see :func:`epd_serve.imports.uncollected`."""

import gc

gc.disable()
