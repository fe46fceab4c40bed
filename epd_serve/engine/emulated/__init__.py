"""Engine of an emulated model: digests instead of KV, modelled times instead of work."""
