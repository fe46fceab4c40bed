"""The report of ``epd-serve bench``: one HTML file that needs nothing else, and its plots as pictures."""

from epd_serve.bench.report.page import write_pngs, write_report

__all__ = ["write_pngs", "write_report"]
