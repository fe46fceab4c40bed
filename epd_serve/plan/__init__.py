"""The planner: choose a topology and its devices, and explain the choice."""
