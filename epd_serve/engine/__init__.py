"""The engine of an instance: its step loop, what computes the steps, and the memory of their KV."""
