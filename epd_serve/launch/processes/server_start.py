"""Imported first in the fork server: it dies with the launcher also while it imports, and collects no garbage
meanwhile (:func:`epd_serve.imports.uncollected`)."""

import gc
import os

from epd_serve.lifeline import die_with_parent

die_with_parent(os.getppid())
gc.disable()
