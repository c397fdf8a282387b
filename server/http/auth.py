"""Authentication: devices by HTTP message signatures (`aggregation/trust/signatures.py`), operators by the admin key.

A device's signature is verified and its nonce stored before its body is read. The body is hashed as it comes.
"""

import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from umbel.aggregation.errors import MalformedSignature
from umbel.aggregation.messages import Enrolment
from umbel.aggregation.trust.signatures import Check, Claims, SignedHeaders, Target, parse
from umbel.aggregation.types import ClientId
from umbel.server.devices.admission import Signed
from umbel.server.devices.enrolments import Enrolling
from umbel.server.http.limits import mark_verified
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.store.keys import AdminKey
from umbel.server.store.waiters import Waiting


@dataclass(frozen=True, slots=True)
class VerifiedDevice:
    """A client whose request was verified and admitted. `body_sha256`: the hash that the body must have (32 bytes)."""

    client: ClientId
    body_sha256: bytes


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that signed a request. The request may be a replay, so nothing may change until it is admitted."""

    client: ClientId
    claims: Claims
    _at: float
    _scope: Scope
    _services: Services

    async def admit(self, waiting: Waiting | None = None) -> None:
        """Store the request's nonce, and with it its change of the waiting room.

        Raises `ReplayedNonce`, or `Refused` if the client was revoked meanwhile.
        """
        await self._services.registry.admit(Signed(self.claims, self._at, waiting))
        self._services.heard.note(self.client)
        mark_verified(self._scope)


def require_admin(key: AdminKey, authorization: str | None) -> None:
    """Raise `Refused` unless the request bears the admin key."""
    if not key.is_borne_by(authorization):
        detail = (
            "the admin key is missing or wrong: send the header Authorization: Bearer KEY, with the key in admin.key"
        )
        raise Refused("admin-key-refused", detail, {"WWW-Authenticate": "Bearer"})


def claims_of(request: Request) -> Claims:
    """What a request's signature claims. Raises `MalformedSignature`."""
    found = {b"content-digest": "", b"signature-input": "", b"signature": ""}
    for name, value in request.scope["headers"]:
        if name in found:
            if found[name]:  # a proxy might check one, and this coordinator the other
                raise MalformedSignature(f"the header {name.decode()} was sent twice; send it once")
            found[name] = value.decode("latin-1")
    return parse(SignedHeaders(found[b"content-digest"], found[b"signature-input"], found[b"signature"]))


def target_of(request: Request) -> Target:
    """The signed part of the request line, as it was sent."""
    path, query = request.scope["raw_path"], request.scope["query_string"]
    return Target(request.method, path.decode("latin-1"), query.decode("latin-1"))


async def verify_device(request: Request, services: Services) -> VerifiedDevice:
    """Verify a signed request by its headers, and admit it. Raises `Refused` or a `SignatureRefused`."""
    caller = await caller_of(request, services)
    await caller.admit()
    return VerifiedDevice(caller.client, caller.claims.body_sha256)


async def caller_of(request: Request, services: Services, check: Check | None = None) -> Caller:
    """Verify a signed request by its headers, without admitting it. `check`: as in `Claims.verify`.

    Raises `Refused` or a `SignatureRefused`.
    """
    claims = claims_of(request)
    now = services.clock.now()
    client = await services.registry.signer(claims, target_of(request), now, check)
    request.state.client = client.id  # for the log, if the request is refused later
    return Caller(ClientId(client.id), claims, now, request.scope, services)


def libsodium_check(public_key: bytes, signature: bytes, signed: bytes) -> None:
    """Raise `InvalidSignature` unless the holder of this key has signed this (`signatures.Check`).

    libsodium takes half of OpenSSL's time, so it verifies check-ins, which come in thousands a second and are not kept.
    OpenSSL alone decides about evidence: libsodium's equation has the cofactor in it, so the holder of a key can make
    signatures that libsodium accepts and OpenSSL does not. An audit would refuse what the coordinator accepted. Without
    the key nobody can (RFC 8032, section 5.1.7, allows both equations).
    """
    try:
        VerifyKey(public_key).verify(signed, signature)
    except BadSignatureError as error:
        raise InvalidSignature from error


async def enrol(request: Request, services: Services, enrolment: Enrolment, is_counted_on: bool) -> None:
    """Enrol a client whose request is signed with the key in its body. The body's digest must be checked already.

    `is_counted_on`: a run's coverage names the client.
    """
    claims = claims_of(request)
    if claims.key_id != enrolment.client:
        raise Refused("malformed-request", "the signature's `keyid` must be the client's name in the body")
    now = services.clock.now()
    claims.verify(enrolment.public_key_bytes, target_of(request), now)
    await services.registry.enrolments.enrol(Enrolling(enrolment, claims, now, is_counted_on))


async def checked_pieces(
    request: Request, sha256: bytes, on_piece: Callable[[], None] = lambda: None
) -> AsyncIterator[bytes]:
    """A body in pieces as they come. Raises `Refused` at its end unless it hashes to `sha256`.

    `on_piece`: called for each of them.
    """
    sha = hashlib.sha256()
    async for piece in request.stream():
        on_piece()
        sha.update(piece)
        yield piece
    require_digest(sha.digest(), sha256)


async def read_body(request: Request, sha256: bytes) -> bytes:
    """A whole small body, which `limits.py` has capped."""
    first = await request.receive()
    if first["type"] == "http.request" and not first.get("more_body"):  # most come in one piece
        body: bytes = first["body"]
        require_digest(hashlib.sha256(body).digest(), sha256)
        return body
    pieces = checked_pieces(Request(request.scope, _resumed(first, request.receive)), sha256)
    return b"".join([piece async for piece in pieces])


def require_digest(found: bytes, claimed: bytes) -> None:
    """Raise `Refused` unless a body's SHA-256 is the one that was signed."""
    if not hmac.compare_digest(found, claimed):
        raise Refused("wrong-digest", "the body's SHA-256 is not the one in Content-Digest; send the request again")


def _resumed(first: Message, receive: Receive) -> Receive:
    """`receive`, preceded by a message that was received already."""
    ahead = [first]

    async def resumed() -> Message:
        return ahead.pop() if ahead else await receive()

    return resumed
