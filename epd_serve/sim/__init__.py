"""Deployments under a virtual clock: the real scheduler, router and block accounting, with stages of known cost."""
