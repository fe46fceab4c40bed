"""Moving registered bytes between instances: transports, feature store, reservations, grouped KV transfer."""
