"""The choice of work for the next step: pure functions from state to decision."""
