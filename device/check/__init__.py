"""Checks of a device against the reference."""
