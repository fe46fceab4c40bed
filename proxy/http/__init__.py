"""HTTP between a client and the gateway."""
