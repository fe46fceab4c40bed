"""What to compute in the next step: pure functions from state to decision."""
