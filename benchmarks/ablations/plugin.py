"""Registers the baselines that the environment names.

Not in :mod:`benchmarks.ablations.processes`: a forked instance imports its launcher's main module, with it that
module, before it has its environment.
"""

from __future__ import annotations

import json
import os

from benchmarks.ablations.processes import SETTINGS, use

use(**json.loads(os.environ[SETTINGS]))
