"""Ports for servers that tests start."""

import random
import socket

_PORTS = range(20000, 32768)
"""Below those that systems give to outgoing connections: one of these could take the port before
the server listens."""


def free_port(address: str = "127.0.0.1") -> int:
    """A port of an address that nobody listens on now."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port of {address} among a hundred")
