"""An instance: its control server, its step loop and the runners of its stages."""
