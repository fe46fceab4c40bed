"""Simulate deployments on a virtual clock: real scheduler, router and block pool, with modelled stage times."""
