"""The planner: chooses a topology and its devices, and explains the choice."""
