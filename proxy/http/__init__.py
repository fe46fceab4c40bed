"""HTTP between a client and the gateway: the room of the gateway's own server.

The rest of the gateway sees a :class:`proxy.http.client.Client`, whatever server has its connection. Plain POSTs
for generated text are served by :mod:`proxy.http.connection`, all else by uvicorn with the limits of
:mod:`proxy.http.http1`.

uvicorn has no limit of bytes or time for heads and trailers, none of time for bodies; it takes heads that two
servers read in two ways, and goes on to accept when descriptors run out (docs/design/threats.md).
"""
