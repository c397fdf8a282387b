"""An officer's key, which signs member lists, in a file on a machine of the officer's own."""

import os
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.client.errors import StateError
from umbel.client.files import sync_directory, write_all
from umbel.client.state.private_keys import KeyAdvice, pem_of, read_private_key

PASSPHRASE_CHARS_MIN = 16  # PEM files are encrypted with 2048 rounds of PBKDF2, too few for a short passphrase
_ADVICE = KeyAdvice(
    if_leaked="make a new key if it may have leaked",
    if_unreadable="does not open: it is no PEM file of a private key, or the passphrase is wrong",
    if_other_kind="make one with `umbel members officer-key`",
)


def make_officer_key(path: Path, passphrase: str) -> Ed25519PrivateKey:
    """Make a key and write it (PEM, PKCS#8, mode 0600), encrypted unless `passphrase` is empty.

    Raises `StateError` rather than overwrite a file, `ValueError` for a passphrase that is too short, `OSError`.
    """
    if passphrase and len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise ValueError(f"a passphrase needs {PASSPHRASE_CHARS_MIN} characters or more: take four or five words")
    key = Ed25519PrivateKey.generate()
    pem = pem_of(key, passphrase)
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
    """Read an officer's key. `ask`: for the passphrase, if it needs one. Raises `StateError`, `OSError`."""
    return read_private_key(path, _ADVICE, ask)
