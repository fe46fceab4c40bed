"""Starting a deployment's processes on this machine, and stopping all of them again."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epd_serve.launch.deployment import InstanceHandle, LocalDeployment
    from epd_serve.launch.processes.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState
    from epd_serve.launch.processes.supervisor import Backoff, Supervisor

_MODULES = {
    "Backoff": "processes.supervisor",
    "InstanceHandle": "deployment",
    "LocalDeployment": "deployment",
    "ManagedProcess": "processes.process",
    "ProcessDied": "processes.process",
    "ProcessSpec": "processes.process",
    "ProcessState": "processes.process",
    "Supervisor": "processes.supervisor",
}

__all__ = [
    "Backoff",
    "InstanceHandle",
    "LocalDeployment",
    "ManagedProcess",
    "ProcessDied",
    "ProcessSpec",
    "ProcessState",
    "Supervisor",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: a deployment is checked before half a second goes into other modules."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
