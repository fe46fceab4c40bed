"""Baselines of the papers that epd-serve is compared with: none of them is part of the product."""
