"""Enrol with a coordinator, once, with a one-time token; later starts read the stored enrolment."""

import hashlib
import logging
import re
import socket
import time
from collections.abc import Mapping

from umbel.aggregation.messages import Enrolment
from umbel.aggregation.types import require_slug
from umbel.client.errors import NotEnrolled, StateError
from umbel.client.state.home import Home
from umbel.client.state.identity import Identity
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.transport import Patience, patiently

CLOCK_WARNING_S = 60.0
log = logging.getLogger("umbel.client")


def identify(store: Home, name: str | None, token: str | None) -> Identity:
    """This client's identity, enrolled or not yet. Raises `NotEnrolled` if that needs a token, and `StateError` if
    it needs another directory.
    """
    known = store.enrolled_name()
    if known is not None:
        if name is not None and name != known:
            raise StateError(
                f"this state directory is enrolled as {known!r}, not {name!r}; name another directory with --state"
            )
        return store.identity(known)
    if not token:
        raise NotEnrolled(_not_enrolled(store))
    if name is not None:
        require_slug(name, "name")
    return store.identity(name or _default_name(store))


def ensure_enrolled(
    coordinator: CoordinatorClient,
    store: Home,
    identity: Identity,
    token: str | None,
    labels: Mapping[str, str],
    patience: Patience | None = None,
) -> None:
    """Enrol unless that is done. After a kill the next start repeats the same enrolment with the same key."""
    if store.enrolled_name() is not None or not token:
        return
    enrolment = Enrolment(token.strip(), identity.name, identity.public_key, labels)
    enrolled = patiently(lambda: coordinator.enrol(enrolment), patience or Patience())
    store.remember_enrolment(identity.name)
    log.info("enrolled as %s", identity.name)
    if abs(ahead_s := time.time() - enrolled.server_time) > CLOCK_WARNING_S:
        log.warning(
            "this machine's clock differs from the coordinator's by %+.0f s; set the clock, or the coordinator will "
            "refuse this client's requests",
            ahead_s,
        )


def _not_enrolled(store: Home) -> str:
    elsewhere = [known for known in store.enrolled_elsewhere() if known.server]
    if not elsewhere:
        return "this client is not enrolled yet; pass the one-time token from the coordinator's operator (--token)"
    known = " and ".join(f"{enrolled.client!r} with {enrolled.server}" for enrolled in elsewhere)
    return (
        f"this state directory is enrolled as {known}, not with {store.server_url}. "
        f"If both addresses belong to one coordinator, name both: --server {elsewhere[0].server},{store.server_url}. "
        "Otherwise pass a one-time token of the new coordinator (--token)"
    )


def _default_name(store: Home) -> str:
    """The host's name and six digits of the key, so that two clients on one host have different names."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower().partition(".")[0]).strip("-")[:40] or "client"
    key = hashlib.sha256(store.identity(host).public_key.encode()).hexdigest()
    return f"{host}-{key[:6]}"
