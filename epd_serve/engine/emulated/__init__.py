"""Engine of an emulated model: digests in place of KV, modelled times in place of work."""
