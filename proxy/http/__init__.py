"""HTTP between a client and the gateway: uvicorn's server, and one request's client over ASGI."""
