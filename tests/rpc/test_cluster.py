"""The greeting of a connection, without a connection."""

import pytest

from epd_serve.rpc.cluster import CallerGreeting, Endpoint, Refused, ServerGreeting
from epd_serve.rpc.messages import Proof

KEY = "0123456789abcdef"
HERE = Endpoint("instance", "127.0.0.1:8100")


def test_a_proof_is_right_once_and_behind_a_greeting():
    server, caller = ServerGreeting(KEY, [HERE]), CallerGreeting(KEY, HERE, "d0")
    with pytest.raises(Refused):
        server.check(Proof(""))
    proof = caller.prove(server.answer(caller.hello))
    server.check(proof)
    for again in (proof, Proof("")):
        with pytest.raises(Refused):
            server.check(again)
