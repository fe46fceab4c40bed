"""Calls between the processes of a deployment.

* :mod:`epd_serve.rpc.streams` has many calls on one connection, MessagePack in frames (:mod:`epd_serve.rpc.link`):
  a gateway's to the stages of an instance that answer with tokens.
* :mod:`epd_serve.rpc.http` is the client of every server of a deployment: calls of the gateway and of instances,
  the launcher's looks at health, the load tester's requests, the admin API's client (:mod:`epd_serve.rpc.admin`).

Three ways are others because of what they carry. Orders to decoders of media carry file descriptors
(:mod:`epd_serve.media.decoder_pool`). KV and features are bytes that are written where they are to lie
(:mod:`epd_serve.transfer`). Notices to processes of vLLM come over TCP from strangers, with limits for each sender
(:mod:`epd_serve.vllm_plugin.notices`). aiohttp, with redirects and resolvers of its own, reaches servers that are
of no deployment: those of media and of web hooks. ``epd-serve chat`` and the profiler, which wait for one answer
at a time, have urllib.
"""
