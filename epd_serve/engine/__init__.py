"""The engine of an instance: step loop, step execution and KV memory."""
