"""The hardware-abstraction layer: devices, streams, attention, graphs, partitions. Independent of serving."""
