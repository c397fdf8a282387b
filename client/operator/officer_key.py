"""An officer's key, in a file on a machine of the officer's own: what signs member lists."""

import os
from collections.abc import Callable
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
from umbel.client.files import sync_directory, write_all

PASSPHRASE_CHARS_MIN = 16  # PEM files are encrypted with 2048 rounds of PBKDF2, which stretch a short one too little
_PEM_BYTES_MAX = 4096


def make_officer_key(path: Path, passphrase: str) -> Ed25519PrivateKey:
    """Make a key and write it (PEM, PKCS#8, mode 0600), encrypted unless `passphrase` is empty.

    Raises `StateError` rather than overwrite a file, `ValueError` for a passphrase that is too short, `OSError`.
    """
    if passphrase and len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise ValueError(f"a passphrase needs {PASSPHRASE_CHARS_MIN} characters or more: take four or five words")
    key = Ed25519PrivateKey.generate()
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise StateError(f"{path} is there already, and may be a key in use; name another file") from error
    with os.fdopen(fd, "wb") as file:
        write_all(file.fileno(), (pem,))
        os.fsync(file.fileno())
    sync_directory(path.parent)
    return key


def load_officer_key(path: Path, ask: Callable[[], str]) -> Ed25519PrivateKey:
    """The key in a file. `ask`: for the passphrase, if it needs one. Raises `StateError`, `OSError`."""
    if path.stat().st_mode & 0o077:
        raise StateError(
            f"{path} can be read by others; run `chmod 600 {path}`, or make a new key if it may have leaked"
        )
    with path.open("rb") as file:
        pem = file.read(_PEM_BYTES_MAX)
    try:
        passphrase = ask().encode() if b"ENCRYPTED" in pem else None
        key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{path} does not open: it is no PEM file of a private key, or the passphrase is wrong"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StateError(f"{path} is not an Ed25519 key; make one with `umbel members officer-key`")
    return key
