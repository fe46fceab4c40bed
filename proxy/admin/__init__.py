"""What operators and the launcher order."""
