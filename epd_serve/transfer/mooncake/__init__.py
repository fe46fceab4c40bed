"""Mooncake as transport and feature store."""
