"""What ``epd-serve verify`` finds: planted faults, and the field."""
