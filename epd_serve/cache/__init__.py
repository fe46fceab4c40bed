"""Accounting of KV blocks and features: owners and eviction, without tensors and without a clock."""
