"""Calls between the processes of a deployment.

* A link has many calls on one connection, MessagePack in frames: a gateway's to native instances, and theirs to
  each other (:mod:`~epd_serve.rpc.messages`). :mod:`~epd_serve.rpc.link` is the caller's end,
  :mod:`~epd_serve.rpc.server` the other.
* HTTP goes to vLLM's servers, to the admin API and for health (:mod:`~epd_serve.rpc.http`).

Three ways are others because of what they carry. Orders to decoders of media carry file descriptors
(:mod:`epd_serve.media.decoder_pool`). KV and features are bytes that are written where they are to lie
(:mod:`epd_serve.transfer`). Notices to processes of vLLM come over TCP from strangers, with limits for each sender
(:mod:`epd_serve.vllm_plugin.notices`).
"""
