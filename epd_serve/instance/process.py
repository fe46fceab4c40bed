"""The end of an instance's process, where it cannot go on: whoever started it starts it again."""

from __future__ import annotations

import logging
import os

from device.base import BareDevice, DeviceLost

logger = logging.getLogger(__name__)


def end_process() -> None:
    """End this process at once: an instance is whole or gone."""
    logging.shutdown()
    os._exit(1)


def end_if_lost(device: BareDevice) -> None:
    """End this process where its device is lost, since no step on it will succeed again."""
    try:
        device.check()
    except DeviceLost as error:
        logger.critical("%s; this process ends", error)
        end_process()
