"""Which topology to run, on which devices, and why."""
