"""Spans of stages, to which metrics, traces, logs and OpenTelemetry subscribe."""
