"""One stream of spans: stages write them, metrics, traces, logs and OpenTelemetry subscribe."""
