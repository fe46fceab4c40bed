"""Fetch, measure and name the media items of requests."""
