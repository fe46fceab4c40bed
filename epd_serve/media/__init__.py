"""Media files before any tensor: their names, their headers, and the processes that decode them."""
