"""The engine of a model that computes nothing: digests in place of KV, times in place of work."""
