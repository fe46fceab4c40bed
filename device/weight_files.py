"""Anonymous memory files in which processes of one host keep packed weights together; without torch.

Whoever starts the processes opens them and passes the descriptors on. The kernel frees a file with the last
process that has it, so a crash leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

#: "part=descriptor" pairs with commas between, in the environment of the processes that share.
VARIABLE = "EPD_SERVE_WEIGHT_FILES"
#: Those of the parts, with commas between, that a process copies to memory of its own where it has the time.
COPIES = "EPD_SERVE_WEIGHT_COPIES"


def open_weight_files(parts: Iterable[str]) -> dict[str, int]:
    """An empty memory file for each part of a model; the caller closes the descriptors."""
    return {part: os.memfd_create(f"weights-{part}", os.MFD_CLOEXEC) for part in parts}


def to_variable(files: Mapping[str, int]) -> str:
    """The variable's value for processes that inherit these descriptors under the same numbers."""
    return ",".join(f"{part}={descriptor}" for part, descriptor in files.items())


def copied() -> set[str]:
    """The parts that this process is to copy."""
    return set(os.environ.get(COPIES, "").split(","))


def inherited() -> dict[str, int]:
    """The files that this process has inherited, by part, from its environment."""
    pairs = (pair.split("=") for pair in os.environ.get(VARIABLE, "").split(",") if pair)
    return {part: int(descriptor) for part, descriptor in pairs}
