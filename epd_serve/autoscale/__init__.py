"""Adapt a running deployment to its load: switch roles, detect workload drift."""
