"""The parts of a gateway that its routes share."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.admission import Admission
from proxy.fleet import Fleet
from proxy.media.loader import MediaLoader
from proxy.observe.observer import Observer
from proxy.settings import GatewaySettings


@dataclass(frozen=True, kw_only=True)
class Gateway:
    settings: GatewaySettings
    fleet: Fleet
    admission: Admission
    loader: MediaLoader
    observer: Observer
