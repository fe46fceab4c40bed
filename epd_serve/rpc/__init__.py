"""Calls between the processes of a deployment.

* A link carries many calls as MessagePack frames (:mod:`~epd_serve.rpc.messages`) over one connection, from the
  gateway to native instances and vLLM's connector, and between instances. :mod:`~epd_serve.rpc.link` is the
  caller's end, :mod:`~epd_serve.rpc.server` the server's.
* KV and features are read over connections of their own with the same greeting (:mod:`epd_serve.transfer.tcp`).
* vLLM's servers, the admin API and health checks are called over HTTP (:mod:`~epd_serve.rpc.http`).
"""
