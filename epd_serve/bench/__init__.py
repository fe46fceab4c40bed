"""The load tester behind ``epd-serve bench``."""
