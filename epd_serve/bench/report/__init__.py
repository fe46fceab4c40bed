"""The report of ``epd-serve bench``: one HTML file that needs nothing else, and its plots as pictures."""
