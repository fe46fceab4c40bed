"""Imported first in the fork server: it dies with the launcher also while it imports, and collects no garbage
meanwhile (:func:`epd_serve.imports.uncollected`)."""

import gc
import os

from epd_serve.lifeline import die_with_parent

# The launcher may have ended already. A server that multiprocessing starts again has no variable.
die_with_parent(int(os.environ.pop("EPD_SERVE_LAUNCHER", os.getppid())))
gc.disable()
