"""Fitting a running deployment to its load: who changes roles, when the workload has drifted."""
