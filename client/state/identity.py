"""Who this client is: an Ed25519 key for each coordinator, made here, which never leaves."""

import base64
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.secagg.client import Floor, SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.trust.fingerprint import fingerprint
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.trust.signatures import Target, sign
from umbel.aggregation.types import ClientId
from umbel.client.errors import StateError
from umbel.client.files import require_own, write_atomically
from umbel.client.state.private_keys import KeyAdvice, pem_of, read_private_key
from umbel.client.state.state_dir import ENROLMENT_FILE, KEY_FILE, EnrolledAs, home_of, locked

_ADVICE = KeyAdvice(
    if_leaked="enrol anew if it may have leaked",
    if_unreadable="is damaged; remove its directory and enrol with a new token",
    if_other_kind="remove its directory and enrol with a new token",
)


class Identity:
    """A client's name and its private key."""

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

    def secure_client(self, context: Context, floor: Floor) -> SecureClient:
        """This client's party in one attempt at a secure round, with new keys."""
        return SecureClient(context, context.index_of(ClientId(self.name)), self._key, os.urandom, floor)


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """The key at `path`, made on first use with mode 0600.

    Raises `StateError` for a file that others can read, or that belongs to another user.
    """
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        write_atomically(path, pem_of(made))
        return made
    require_own(path, path.stat())
    return read_private_key(path, _ADVICE)


_ENROLMENT = TypeAdapter(EnrolledAs)


@dataclass(frozen=True, slots=True)
class OwnKey:
    """A client's public key for one coordinator."""

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
            f"there is no client's key in {state_dir} yet: it is made at the first start, or now if you pass the "
            "coordinator's address (--server, or the variable UMBEL_SERVER)"
        )
    return found


def make_own_key(state_dir: Path, server: str) -> None:
    """Make this client's key for a coordinator unless it exists, so that officers can list it before it enrols."""
    with locked(state_dir):
        home, _ = home_of(state_dir, server)
        load_or_make_key(home / KEY_FILE)


def _own_key(path: Path) -> OwnKey:
    enrolment = path.with_name(ENROLMENT_FILE)
    try:
        known = _ENROLMENT.validate_json(enrolment.read_bytes()) if enrolment.exists() else None
    except ValidationError as error:
        raise StateError(f"{enrolment} is damaged; remove it and start again") from error
    client, server = (known.client, known.server) if known is not None else ("", "")
    key = Identity(client, load_or_make_key(path)).public_key
    return OwnKey(client, server, key, fingerprint(public_key_bytes(key)), str(path.parent))
