"""Accounting of KV blocks and features: who holds what, what may be evicted. No tensors of its own, no clock."""
