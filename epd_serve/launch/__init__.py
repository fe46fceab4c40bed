"""Starting a deployment's processes on this machine, and stopping all of them again."""

from epd_serve.launch.backoff import Backoff
from epd_serve.launch.deployment import InstanceHandle, LocalDeployment
from epd_serve.launch.process import ManagedProcess, ProcessDied, ProcessSpec, ProcessState
from epd_serve.launch.supervisor import Supervisor

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
