"""Measurements of devices, deployments and co-location, from which the planner simulates."""
