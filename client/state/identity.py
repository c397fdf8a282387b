"""Who this client is: an Ed25519 key for each coordinator, made here, which never leaves."""

import base64
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.trust.public_keys import fingerprint, public_key_bytes
from umbel.aggregation.trust.signatures import Target, sign
from umbel.aggregation.types import ClientId
from umbel.client.errors import StateError
from umbel.client.private_keys import load_or_make_key
from umbel.client.state.state_dir import KEY_FILE, enrolment_in, home_of, key_file_of, locked


class Identity:
    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        self.name = name
        self._key = key

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, key=<hidden>)"

    @property
    def public_key(self) -> str:
        """Base64 of the 32 raw bytes, as in an enrolment."""
        raw = self._key.public_key().public_bytes_raw()
        return base64.b64encode(raw).decode()

    def authorize(self, target: Target, body_sha256: bytes) -> dict[str, str]:
        """Header fields that sign a request, with a fresh nonce and the present time."""
        nonce = secrets.token_urlsafe(24)
        return sign(self._key, self.name, target, body_sha256, int(time.time()), nonce).as_dict()

    def secure_client(self, context: Context, minimum_cohort: int) -> SecureClient:
        """This client's party in one attempt at a secure round, with new keys."""
        return SecureClient(context, context.index_of(ClientId(self.name)), self._key, os.urandom, minimum_cohort)


@dataclass(frozen=True, slots=True)
class OwnKey:
    client: str  # empty before the client has enrolled, as is the server
    server: str
    public_key: str
    fingerprint: str
    directory: str  # of the private key


def own_keys(state_dir: Path) -> list[OwnKey]:
    """All keys in a state directory. Raises `StateError` if there is none, or one is damaged."""
    found = [_own_key(path) for path in sorted(state_dir.glob(f"*/{KEY_FILE}"))]
    if not found:
        raise StateError(
            f"there is no client key in {state_dir} yet. The client makes one at its first start. To make it now, pass "
            "the coordinator's address (--server, or the variable UMBEL_SERVER)"
        )
    return found


def enrolled_identity(state_dir: Path, server: str) -> Identity | None:
    """Who this client is at the coordinator `URL[,URL...]`; None if it is not enrolled there. Makes nothing.

    Raises `StateError` for a damaged enrolment or key, `OSError`.
    """
    key_file = key_file_of(state_dir, server)
    known = enrolment_in(key_file.parent).read()
    return Identity(known.client, load_or_make_key(key_file)) if known is not None and key_file.exists() else None


def make_own_key(state_dir: Path, server: str) -> None:
    """Make this client's key for a coordinator unless it exists, so that officers can list it before it enrols.

    Raises `StateError` if a key must be made while another client process holds the state directory.
    """
    if key_file_of(state_dir, server).exists():
        return  # so that a site can show its key while its client runs
    with locked(state_dir, "end it and run this command again, to make the key"):
        home, _ = home_of(state_dir, server)
        load_or_make_key(home / KEY_FILE)


def _own_key(path: Path) -> OwnKey:
    known = enrolment_in(path.parent).read()
    client, server = (known.client, known.server) if known is not None else ("", "")
    key = Identity(client, load_or_make_key(path)).public_key
    return OwnKey(client, server, key, fingerprint(public_key_bytes(key)), str(path.parent))
