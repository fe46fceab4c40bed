"""Carries out a request's way (epd_serve/flow/) on the instances."""
