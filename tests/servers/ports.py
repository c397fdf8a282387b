"""Ports that are a test's own: a process may listen there, and again after it was killed, and nobody else gets them."""

import socket

_held: list[socket.socket] = []


def own_port() -> int:
    """A port on which only processes that name it listen, until this process ends.

    A socket of this process is bound to it and never listens. Both have SO_REUSEADDR, so the one that names the port
    may have it; the kernel gives it to nobody who takes any. A port that was merely free a moment ago, it may.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
