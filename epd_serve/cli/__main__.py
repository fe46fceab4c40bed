"""``python -m epd_serve.cli``."""

from epd_serve.cli import main

main()
