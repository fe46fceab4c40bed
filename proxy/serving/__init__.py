"""Serves checked requests on the instances: one coroutine a request."""
