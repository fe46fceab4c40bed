"""Mooncake: its Transfer Engine as a transport, its store for features."""
