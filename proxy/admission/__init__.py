"""Who may run now: API keys, their limits, the queue."""
