"""The cost of stages and of transfers between them, in seconds and in money."""
