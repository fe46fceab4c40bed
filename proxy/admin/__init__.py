"""The orders of operators and of the launcher."""
