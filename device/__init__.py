"""The hardware-abstraction layer: devices, streams, attention, graphs, partitions. It knows nothing of serving."""
