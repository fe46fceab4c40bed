"""Imported first in the fork server: ends it with the launcher, and imports without garbage collection
(:func:`epd_serve.imports.uncollected`)."""

import gc
import os

from epd_serve.lifeline import die_with_parent

# The launcher may have ended already. A server restarted by multiprocessing lacks the variable.
die_with_parent(int(os.environ.pop("EPD_SERVE_LAUNCHER", os.getppid())))
gc.disable()
