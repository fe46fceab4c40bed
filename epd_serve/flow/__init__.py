"""One request's way over the instances as a pure state machine: events in, actions out.

It reads no clock and owns no socket: the gateway (proxy/dispatch/) executes its actions on connections, the
simulator (epd_serve/sim/gateway.py) on virtual time. Every decision about a failure is taken here.
"""
