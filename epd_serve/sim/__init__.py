"""Deployments under a virtual clock: the real scheduler, router and block accounting; stages of known cost."""
