"""HTTP between clients and the gateway."""
