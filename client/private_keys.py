"""Private Ed25519 keys in PEM files (PKCS#8), which only their owner may read: a client's, and an officer's."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from umbel.client.errors import StateError
from umbel.client.files import flush, require_own, sync, write_atomically

PASSPHRASE_CHARS_MIN = 16  # PEM files are encrypted with 2048 rounds of PBKDF2, too few for a short passphrase
_PEM_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Advice:
    """What a person should do about a key file that cannot be used. Each completes a sentence."""

    if_leaked: str
    if_unreadable: str
    if_other_kind: str


_CLIENT = _Advice(
    if_leaked="remove its directory and enrol with a new token",
    if_unreadable="is damaged; remove its directory and enrol with a new token",
    if_other_kind="remove its directory and enrol with a new token",
)
_OFFICER = _Advice(
    if_leaked="make a new one with `umbel members officer-key`",
    if_unreadable="cannot be opened: it is not a PEM file with a private key, or the passphrase is wrong",
    if_other_kind="make one with `umbel members officer-key`",
)


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """A client's key at `path`, made on first use. Raises `StateError` for a file that others own or can read."""
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        write_atomically(path, _pem_of(made))
        return made
    require_own(path, path.stat())
    return _read(path, _CLIENT)


def make_officer_key(path: Path, passphrase: str) -> Ed25519PrivateKey:
    """Make an officer's key and write it (mode 0600), encrypted unless `passphrase` is empty.

    Raises `StateError` rather than overwrite a file, `ValueError` for a passphrase that is too short, `OSError`.
    """
    if passphrase and len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise ValueError(f"a passphrase needs {PASSPHRASE_CHARS_MIN} characters or more: take four or five words")
    key = Ed25519PrivateKey.generate()
    pem = _pem_of(key, passphrase)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise StateError(f"{path} exists already, and may be a key in use; name another file") from error
    with os.fdopen(fd, "wb") as file:
        file.write(pem)
        flush(file)
    sync(path.parent)
    return key


def load_officer_key(path: Path, ask: Callable[[], str]) -> Ed25519PrivateKey:
    """Read an officer's key. `ask`: for the passphrase, if it needs one. Raises `StateError`, `OSError`."""
    return _read(path, _OFFICER, ask)


def _pem_of(key: Ed25519PrivateKey, passphrase: str = "") -> bytes:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def _read(path: Path, advice: _Advice, ask: Callable[[], str] | None = None) -> Ed25519PrivateKey:
    if path.stat().st_mode & 0o077:
        raise StateError(
            f"other users can read the key {path}; run `chmod 600 {path}`, or, if the key may have leaked, "
            f"{advice.if_leaked}"
        )
    with path.open("rb") as file:
        pem = file.read(_PEM_BYTES_MAX)
    try:
        passphrase = ask().encode() if ask is not None and b"ENCRYPTED" in pem else None
        key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError) as error:  # TypeError: encrypted, and there is no passphrase
        raise StateError(f"{path} {advice.if_unreadable}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} is not an Ed25519 key; {advice.if_other_kind}")
    return key
