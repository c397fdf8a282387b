"""A coordinator's addresses: one, or one for each replica if no load balancer stands in front of them.

If an address does not answer, or answers 5xx, the client moves to the next and stays there. Each process has its own
order of addresses, so that neither a start nor the death of a replica sends all clients to one replica.
"""

import logging
import os
import random
import threading
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import httpx

from umbel.client.wire.http_deadline import bound
from umbel.client.wire.proxies import UNREADABLE, require_readable_proxies

ADDRESSES_MAX = 64
log = logging.getLogger("umbel.client")


def addresses_in(text: str) -> tuple[str, ...]:
    """The addresses in `URL[,URL...]`, unchanged. Raises `ValueError` unless each is `http(s)://host[:port]`."""
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if len(addresses) > ADDRESSES_MAX:
        raise ValueError(f"{len(addresses)} addresses are given for the coordinator; the limit is {ADDRESSES_MAX}")
    for address in addresses:
        _require_address(address)
    return addresses


def warn_if_readable(addresses: Sequence[str], what: str) -> None:
    """Warn that others can read `what`, if traffic to an address leaves the machine unencrypted."""
    if any(map(is_readable, addresses)):
        log.warning("http:// is not encrypted: others on the network can read %s; use https://", what)


def is_readable(address: str) -> bool:
    """Whether traffic to this address leaves the machine unencrypted."""
    parts = urlsplit(address)
    return parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")


class CoordinatorAddresses:
    """One HTTP client for each address. Threads may share it."""

    def __init__(self, addresses: Sequence[str], transport: httpx.BaseTransport | None = None) -> None:
        """`transport`: for tests and proxies."""
        self._clients = [
            _client(address, transport) for address in random.SystemRandom().sample(addresses, len(addresses))
        ]
        self._current = 0
        self._n_failed = 0
        self.has_answered = False  # whether any address ever did
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    @property
    def current(self) -> httpx.Client:
        return self._clients[self._current]

    def note_answer(self) -> None:
        self._n_failed, self.has_answered = 0, True

    def note_failure(self, client: httpx.Client) -> bool:
        """Move to the next address. True if that one has not failed since the last answer."""
        with self._lock:
            if client is not self.current:  # another thread was here first
                return True
            self._current = (self._current + 1) % len(self._clients)
            self._n_failed += 1
            return self._n_failed % len(self._clients) != 0

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _client(address: str, transport: httpx.BaseTransport | None) -> httpx.Client:
    """Raises `ValueError` if the file of certificates, or the proxy, that the environment names cannot be used."""
    parts = urlsplit(address)
    base_url = f"{parts.scheme}://{parts.netloc}"
    if transport is None:
        require_readable_proxies()
    try:
        return bound(httpx.Client(base_url=base_url, transport=transport, follow_redirects=False))
    except httpx.InvalidURL:
        raise ValueError(UNREADABLE) from None  # the error may quote a part of the password
    except ImportError as error:
        raise ValueError(
            "the environment names a SOCKS proxy (ALL_PROXY or HTTPS_PROXY), for which the package socksio is missing: "
            "install it (pip install socksio), or name an HTTP proxy, such as HTTPS_PROXY=http://HOST:PORT"
        ) from error
    except OSError as error:  # also ssl.SSLError
        if not (named := os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
            raise
        raise ValueError(
            f"the certificates in {named} cannot be read ({error.strerror or error}); SSL_CERT_FILE must name a file "
            "of CA certificates in PEM, or SSL_CERT_DIR a folder of them"
        ) from error


def _require_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"the server's address must look like https://host or https://host:port, not {address!r}")
    if parts.username is not None:
        raise ValueError("the server's address must not contain a user name or password")
