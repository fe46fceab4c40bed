"""Calls between the processes of a deployment.

* A link has many calls on one connection, MessagePack in frames: a gateway's to native instances and to vLLM's
  connector, and theirs to each other (:mod:`~epd_serve.rpc.messages`). :mod:`~epd_serve.rpc.link` is the caller's
  end, :mod:`~epd_serve.rpc.server` the other. Reads of KV and features have the same greeting and frames, on
  connections of their own (:mod:`epd_serve.transfer.tcp`): their bytes go where they are to lie.
* HTTP goes to vLLM's servers, to the admin API and for health (:mod:`~epd_serve.rpc.http`).

Orders to decoders of media carry file descriptors, over Unix sockets (:mod:`epd_serve.media.decoder_pool`).
"""
