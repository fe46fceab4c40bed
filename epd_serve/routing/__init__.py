"""Which instance takes which stage of a request: pure policies over the instance table."""
