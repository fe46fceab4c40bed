"""Movement of registered bytes between instances: transports, feature stores, reservations, grouped KV."""
