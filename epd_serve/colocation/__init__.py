"""``epd-serve interference``: what operators and stages cost each other on one device."""
