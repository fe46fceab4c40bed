"""Measure devices and servers for the planner."""
