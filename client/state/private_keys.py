"""Private Ed25519 keys in PEM files (PKCS#8), which only their owner may read."""

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

_PEM_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class KeyAdvice:
    """What a person should do about a key file that cannot be used. Each completes a sentence."""

    if_leaked: str
    if_unreadable: str
    if_other_kind: str


def pem_of(key: Ed25519PrivateKey, passphrase: str = "") -> bytes:
    """The key as PEM, encrypted unless `passphrase` is empty."""
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def read_private_key(path: Path, advice: KeyAdvice, ask: Callable[[], str] | None = None) -> Ed25519PrivateKey:
    """Read a key. `ask`: for the passphrase of an encrypted one. Raises `StateError` with `advice`, or `OSError`."""
    if path.stat().st_mode & 0o077:
        raise StateError(f"{path} can be read by others; run `chmod 600 {path}`, or {advice.if_leaked}")
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
