"""Start and stop a deployment's processes on this machine."""
