"""Everything that is shown of requests: logs, metrics, traces, the dashboard."""
