"""The context: what all clients of a secure round must agree on before the first message.

The context's digest is in every signature and, through the session's digest (`derive.py`), in every key and every
sealed share. A client makes the context itself, from its assignment. So if a coordinator gives two clients different
assignments, each refuses the other's signatures, and their masks do not cancel.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from umbel.aggregation.canonical import canonical
from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.secagg.errors import Disagreement
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.types import COHORT_MAX, ClientId, RunId, require_sha256, require_slug

PROTOCOL: Literal["umbel-secagg/1"] = "umbel-secagg/1"
_COMMON = ("training", "codec", "grid", "sample_count_max", "task", "share")  # of an assignment


@dataclass(frozen=True)  # no slots: the digest is cached, because each signature needs it
class Context:
    """One attempt at a secure round."""

    run: RunId
    round: int
    attempt: int
    attempt_id: str  # 128 random bits, hex
    model_sha256: str
    layout_digest: str
    config_sha256: str  # of all that a client does with the model (`context_of`)
    members_sha256: str  # of the consortium's member list; empty without one
    cohort: tuple[tuple[ClientId, str], ...]  # names and identity keys (base64), in the order of the names
    minimum: int  # the fewest clients in a sum
    opening_commitment: str  # SHA-256 of 32 bytes that the coordinator has drawn for the graph, hex
    window_s: float  # of the round
    protocol: Literal["umbel-secagg/1"] = PROTOCOL

    def __post_init__(self) -> None:
        require_slug(self.run, "run")
        for name in ("model_sha256", "layout_digest", "config_sha256", "opening_commitment"):
            require_sha256(getattr(self, name), name)
        if self.members_sha256:
            require_sha256(self.members_sha256, "members_sha256")
        if len(self.attempt_id) != 32 or not set(self.attempt_id) <= set("0123456789abcdef"):
            raise ValueError("attempt_id must be 32 hexadecimal digits")
        if not 0 < self.window_s < math.inf:
            raise ValueError(f"window_s must be a positive number of seconds, not {self.window_s!r:.40}")
        for name, key in self.cohort:
            require_slug(name, "a client's name")
            if public_key_text(public_key_bytes(key, f"the identity key of {name}")) != key:
                # Base64 has four spellings of 32 bytes, so one client could pose as two.
                raise ValueError(f"the identity key of {name} must be in canonical base64")
        names = [name for name, _ in self.cohort]
        if names != sorted(set(names)):
            raise ValueError("a cohort must list each client once, sorted by name")
        if len({key for _, key in self.cohort}) < len(self.cohort):
            raise ValueError("two clients of the cohort have the same identity key")
        if not MINIMUM_LEAST <= self.minimum <= len(self.cohort) <= COHORT_MAX:
            raise ValueError(
                f"a secure round needs a minimum of {MINIMUM_LEAST} or more, at least as many clients as its minimum, "
                f"and at most {COHORT_MAX} clients; this one has a minimum of {self.minimum} and {len(self.cohort)} "
                "clients"
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON: 32 bytes."""
        return hashlib.sha256(canonical(self).encode()).digest()

    def index_of(self, client: ClientId) -> int:
        """A client's place in the cohort. Raises `ValueError` for a client that is not in it."""
        return self.names.index(client)

    @cached_property
    def names(self) -> tuple[ClientId, ...]:
        return tuple(name for name, _ in self.cohort)


def offer_in(assignment: Assignment) -> SecureOffer:
    """The assignment's secure offer. Raises `Disagreement` if it has none."""
    if not assignment.secure:
        raise Disagreement("this assignment asks for an update without masks, which the coordinator could read")
    return assignment.secure


def context_of(assignment: Assignment) -> Context:
    """The context of a client with this assignment. Raises `Disagreement`, and `ValueError` for an impossible round."""
    offer = offer_in(assignment)
    asked = {name: getattr(assignment, name) for name in _COMMON} | {"secure": offer.plan}
    if assignment.tensors is not None:  # not else, so that the context of other runs stays the same
        asked["tensors"] = assignment.tensors
    return Context(
        run=assignment.run,
        round=assignment.round,
        attempt=assignment.attempt,
        attempt_id=offer.attempt_id,
        model_sha256=assignment.model.sha256,
        layout_digest=assignment.model.layout_digest,
        config_sha256=hashlib.sha256(canonical(asked).encode()).hexdigest(),
        members_sha256=offer.members_sha256,
        cohort=tuple((ClientId(name), key) for name, key in offer.cohort),
        minimum=offer.plan.minimum,
        opening_commitment=offer.opening_commitment,
        window_s=offer.window_s,
    )
