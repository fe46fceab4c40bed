"""Media files: read headers, and decode in separate processes."""
