"""Ed25519 by libsodium: half of OpenSSL's time, for check-ins, of which there are thousands a second.

OpenSSL alone decides what is evidence. libsodium's equation has the cofactor in it, so whoever holds a key can make
signatures that libsodium takes and OpenSSL does not: an audit would refuse what the coordinator took. Of check-ins
nothing is kept. For everybody who does not hold the key the two take the same (RFC 8032, section 5.1.7, allows both).
"""

from cryptography.exceptions import InvalidSignature
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey


def check(public_key: bytes, signature: bytes, signed: bytes) -> None:
    """Raise `InvalidSignature` unless the holder of this key has signed this (`signatures.Check`)."""
    try:
        VerifyKey(public_key).verify(signed, signature)
    except BadSignatureError as error:
        raise InvalidSignature from error
