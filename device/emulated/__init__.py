"""Emulated accelerators: times from a data sheet, work on a CPU or no work."""
