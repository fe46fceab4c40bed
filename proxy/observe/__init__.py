"""Logs, metrics, traces and dashboard figures of requests."""
