"""The sockets that a gateway's parent keeps for its workers."""

from __future__ import annotations

import contextlib
import socket

import pytest

from proxy.workers.sockets import Listeners


def listen(listeners: Listeners, index: int) -> socket.socket:
    """As a worker does with what it has inherited."""
    (descriptor,) = listeners.of(index)
    ours = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
    ours.listen()
    ours.settimeout(300)
    return ours


def call(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=300)


def test_a_port_on_which_workers_of_another_gateway_listen_is_taken():
    one = Listeners("127.0.0.1", 0, 2)
    taken = f"cannot listen on 127.0.0.1 port {one.port}: Address already in use"
    try:
        with listen(one, 1), pytest.raises(ValueError, match=taken):
            Listeners("127.0.0.1", one.port, 2)
    finally:
        one.close()


def test_who_calls_a_worker_that_has_died_waits_for_its_next_life():
    listeners = Listeners("127.0.0.1", 0, 2)
    try:
        listen(listeners, 0).close()  # its own descriptor goes with it
        with call(listeners.port) as client:
            with listen(listeners, 0) as again, again.accept()[0] as accepted:
                accepted.sendall(b"here")
            assert client.recv(4) == b"here"
    finally:
        listeners.close()


def test_a_worker_that_keeps_dying_gets_no_more_calls():
    listeners = Listeners("127.0.0.1", 0, 2)
    port = listeners.port
    try:
        listen(listeners, 0).close()
        with listen(listeners, 1) as other:
            listeners.replace(0)
            for _ in range(16):
                with call(port), other.accept()[0]:
                    pass
        with listen(listeners, 0) as again, contextlib.ExitStack() as kept:
            again.settimeout(0.01)
            for _ in range(64):  # some of them come here again
                kept.enter_context(call(port))
                with contextlib.suppress(TimeoutError):
                    again.accept()[0].close()
                    break
            else:
                raise AssertionError("it is the kernel's to spread them")
    finally:
        listeners.close()
    with pytest.raises(ConnectionRefusedError):
        call(port)
