"""The two secret keys of a coordinator, made at its first start: replicas share the files of both.

With the audit key it signs audit bundles. Replicas also recognise each other by it where they meet in the database: the
key to which they seal what clients have revealed (`sums/relay.py`) is signed, as

    umbel relay key 1\n<session digest, 32 bytes><public key, 32 bytes>

The digest is of one attempt at one round, so the signature is worth nothing in another. With the admin key operators
prove who they are.
"""

import base64
import binascii
import hashlib
import hmac
import platform
import secrets
import stat
from importlib.metadata import version
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import umbel
from umbel.aggregation.audit.bundle import Maker, RoundEnded, RunCreated, Sealed, bundle_of, seal
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.server import journal
from umbel.server.blobs.files import write_private_once

_ADMIN_KEY_BYTES_MIN = 32
_RELAY_PURPOSE = b"umbel relay key 1\n"


class UnfitAuditKey(Exception):
    """The key file would let others sign, or holds no key."""


class UnfitAdminKey(Exception):
    """The key file would let others in."""


class ForgedRelayKey(Exception):
    """A key to seal to that no holder of the audit key has signed for this attempt."""


class AuditKey:
    """An Ed25519 key. Replicas share one file of it, so that a run's bundles are signed by one key."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = public_key_text(self._key.public_key().public_bytes_raw())
        python = platform.python_version()
        self._maker = Maker(umbel.__version__, version("torch"), python, f"{platform.system()} {platform.machine()}")

    @classmethod
    def load(cls, path: Path) -> "AuditKey":
        """Read the key (32 bytes in base64), or make one on the first start, readable by its owner only.

        Raises `UnfitAuditKey` for what is no key, or could be read by other users of this machine.
        """
        if not path.exists():
            write_private_once(path, base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            raise UnfitAuditKey(
                f"other users of this machine can read the audit key in {path} (mode {mode:o}), and could sign audit "
                "bundles with it. If one of them may have read the key, remove the file and start once with --adopt: "
                f"the coordinator makes a new key. Otherwise run chmod 600 {path}"
            )
        try:
            seed = base64.b64decode(path.read_bytes().strip(), validate=True)
        except binascii.Error as error:
            raise UnfitAuditKey(
                f"{path} contains no audit key: it is not base64; restore the file, or remove it and start once with "
                "--adopt, which makes a new key"
            ) from error
        if len(seed) != 32:
            raise UnfitAuditKey(
                f"{path} contains no audit key: it has {len(seed)} bytes, not 32; restore the file, or remove it and "
                "start once with --adopt, which makes a new key"
            )
        return cls(seed)

    def seal(self, run: str, number: int, previous: str, facts: RunCreated | RoundEnded) -> Sealed:
        """The next bundle of a run's chain."""
        return seal(bundle_of(run, number, previous, self.public, self._maker, facts), self._key)

    def sign_relay_key(self, session: bytes, key: bytes) -> bytes:
        """Vouch to other replicas for a public key (32 bytes) in the attempt with this session digest (32 bytes)."""
        return self._key.sign(_RELAY_PURPOSE + session + key)

    def verify_relay_key(self, session: bytes, key: bytes, signature: bytes) -> None:
        """Raise `ForgedRelayKey` unless a holder of this key has vouched for that one, in this attempt."""
        try:
            self._key.public_key().verify(signature, _RELAY_PURPOSE + session + key)
        except InvalidSignature as error:
            raise ForgedRelayKey(
                "no replica has signed the key in the database with which replicas exchange clients' shares; check who "
                "else writes to the database"
            ) from error


class AdminKey:
    """The operator's key, of which only the hash is kept in memory."""

    def __init__(self, sha256: bytes) -> None:
        self._sha256 = sha256

    @classmethod
    def load(cls, path: Path) -> "AdminKey":
        """Read the key, or make one on the first start, readable by its owner only.

        Raises `UnfitAdminKey` for a key that can be guessed, or read by other users of this machine.
        """
        if not path.exists():
            write_private_once(path, secrets.token_urlsafe(32) + "\n")
            journal.admin_key_made(path)
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            raise UnfitAdminKey(
                f"other users of this machine can read the admin key in {path} (mode {mode:o}). If one of them may "
                f"have read the key, remove the file: the next start makes a new key. Otherwise run chmod 600 {path}"
            )
        key = path.read_bytes().strip()
        if len(key) < _ADMIN_KEY_BYTES_MIN:
            raise UnfitAdminKey(
                f"the admin key in {path} has {len(key)} characters, and needs at least {_ADMIN_KEY_BYTES_MIN}. "
                "Remove the file: the next start makes a new key"
            )
        return cls(hashlib.sha256(key).digest())

    def fingerprint(self, salt: str) -> str:
        """Eight hex digits by which two keys can be told apart, and from which none can be guessed."""
        return hashlib.sha256(salt.encode() + self._sha256).hexdigest()[:8]

    def is_borne_by(self, authorization: str | None) -> bool:
        """Whether this header is `Bearer` and the key."""
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        return bool(key.strip()) and hmac.compare_digest(given, self._sha256) and scheme.lower() == "bearer"
