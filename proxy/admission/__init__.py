"""The decision who may run now: API keys, their limits, the queue."""
