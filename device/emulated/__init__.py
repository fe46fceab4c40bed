"""Emulated accelerators: times of a data sheet, work on a CPU or none at all."""
