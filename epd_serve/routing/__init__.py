"""The choice of an instance for each stage of a request: pure policies over the instance table."""
