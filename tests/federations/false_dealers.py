"""Clients that keep every rule of a secure round but one: the shares that they deal."""

from dataclasses import replace

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.messages import Dealt
from umbel.aggregation.secagg.session import Session


class WrongDealer(SecureClient):
    """Commits to the shares that it deals, which are not those of its secrets."""

    def _deal(self, session: Session, holder: int, shares: tuple[bytes, bytes]) -> Dealt:
        of_self_mask, of_key = map(_wrong, shares)
        return super()._deal(session, holder, (of_self_mask, of_key))


class ClosedDealer(SecureClient):
    """Seals its shares so that nobody can open them."""

    def _deal(self, session: Session, holder: int, shares: tuple[bytes, bytes]) -> Dealt:
        dealt = super()._deal(session, holder, shares)
        return replace(dealt, sealed=bytes(len(dealt.sealed)))


def _wrong(share: bytes) -> bytes:
    """Not in the lowest three bits: X25519 does without these of a secret."""
    return share[:1] + bytes([share[1] ^ 1]) + share[2:]
