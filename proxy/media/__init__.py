"""Media items of a request: fetched, measured, named."""
