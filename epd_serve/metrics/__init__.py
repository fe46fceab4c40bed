"""Measurements of requests and their export."""
