"""Serve checked requests on the instances, one coroutine per request."""
