"""An accelerator for tests, ``chip:0``: asynchronous as a GPU, and computed on this machine's cores."""

from device.registry import BACKENDS
from device.transport import TRANSPORTS, TransportCapability

BACKENDS["chip"] = "chip.accelerator"
TRANSPORTS["chip"] = TransportCapability(mooncake_protocols=("tcp", "rdma"), device_protocols=("tcp", "rdma"))
