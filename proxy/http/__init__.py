"""HTTP between a client and the gateway: the room of the gateway's own server.

The rest of the gateway sees a :class:`proxy.http.client.Client`, whatever server has its connection. Plain POSTs
for generated text are served by :mod:`proxy.http.connection`, all else by uvicorn with the limits of
:mod:`proxy.http.http1`. With the same handlers behind it, uvicorn with httptools takes 1.42 times the CPU of the
own server for a text request, 1.39 times with an image, 1.29 times for a stream with 10 ms between tokens (medians
of 7 interleaved rounds on two cores that were not quiet: ``python -m benchmarks.http_server``).

uvicorn has no limit of bytes or time for heads and trailers, none of time for bodies; it takes heads that two
servers read in two ways, and goes on to accept when descriptors run out (docs/design/threats.md).
"""
