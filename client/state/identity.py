"""Who this client is: an Ed25519 key for each coordinator, made here, which never leaves."""

import base64
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.secagg.client import Floor, SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.trust.fingerprint import fingerprint
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.trust.signatures import Target, sign
from umbel.aggregation.types import ClientId
from umbel.client.errors import StateError
from umbel.client.files import require_own, write_atomically
from umbel.client.state.state_dir import ENROLMENT_FILE, KEY_FILE, EnrolledAs, home_of, locked

_PEM_BYTES_MAX = 4096


class Identity:
    """A name and the key that signs for it."""

    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        self.name = name
        self._key = key

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, key=<hidden>)"

    @property
    def public_key(self) -> str:
        """Base64 of the 32 raw bytes, as an enrolment wants it."""
        raw = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return base64.b64encode(raw).decode()

    def authorize(self, target: Target, body_sha256: bytes) -> dict[str, str]:
        """Header fields that sign this request: a fresh nonce and the time of now at every call."""
        nonce = secrets.token_urlsafe(24)
        return sign(self._key, self.name, target, body_sha256, int(time.time()), nonce).as_dict()

    def secure_client(self, context: Context, floor: Floor) -> SecureClient:
        """This client in one attempt at a secure round, in whose cohort it is; its keys are made now."""
        return SecureClient(context, context.index_of(ClientId(self.name)), self._key, os.urandom, floor)


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """The key at `path`, made on first use with mode 0600. Raises `StateError` for a file that others can read, or that
    is another user's.
    """
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        write_atomically(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made
    require_own(path, found := path.stat())
    if found.st_mode & 0o077:
        raise StateError(f"{path} can be read by others; run `chmod 600 {path}`, or enrol anew if it may have leaked")
    try:
        key = load_pem_private_key(path.read_bytes()[:_PEM_BYTES_MAX], password=None)
    except ValueError as error:
        raise StateError(f"{path} is damaged; remove its directory and enrol with a new token") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} is not an Ed25519 key; remove its directory and enrol with a new token")
    return key


_ENROLMENT = TypeAdapter(EnrolledAs)


@dataclass(frozen=True, slots=True)
class OwnKey:
    """`client`, `server`: empty before the client has enrolled. `directory`: where the private key lies."""

    client: str
    server: str
    public_key: str
    fingerprint: str
    directory: str


def own_keys(state_dir: Path) -> list[OwnKey]:
    """Every key in a state directory. Raises `StateError` if there is none, or one is damaged."""
    found = [_own_key(path) for path in sorted(state_dir.glob(f"*/{KEY_FILE}"))]
    if not found:
        raise StateError(
            f"there is no client's key in {state_dir} yet: it is made at the first start, or now if you pass the "
            "coordinator's address (--server, or the variable UMBEL_SERVER)"
        )
    return found


def make_own_key(state_dir: Path, server: str) -> None:
    """Make this client's key for a coordinator, unless it is there: it can be listed before the client enrols."""
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
