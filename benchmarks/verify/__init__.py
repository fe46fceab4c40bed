"""``epd-serve verify`` against planted faults, the demo deployment and the field."""
