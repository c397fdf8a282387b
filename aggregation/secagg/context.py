"""What all members of a secure round must agree on before any of them says a thing: hashed once, and bound everywhere.

Its digest is in every signature, and by way of the session's (`derive.py`) in every key and every sealed share. A
client makes the context itself, of what it is asked to do: so where a coordinator asks two clients for different
things, the one's signatures fail with the other, and their masks do not cancel.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from umbel.aggregation.canonical import canonical
from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.types import COHORT_MAX, ClientId, RunId, require_sha256, require_slug

PROTOCOL: Literal["umbel-secagg/1"] = "umbel-secagg/1"


@dataclass(frozen=True)  # no slots: its digest is worked out once, and asked for with each signature
class Context:
    """One attempt at a secure round.

    `attempt_id`: 128 random bits, hex. `config_sha256`: of all that a client is asked to do with the model
    (`agreement.py`). `members_sha256`: of the consortium's member list, empty without one. `cohort`: names and identity
    keys (base64), in the order of the names. `minimum`: fewest clients in a sum. `opening_commitment`: SHA-256 of 32
    bytes that the coordinator has drawn for the graph, hex. `window_s`: of the round.
    """

    run: RunId
    round: int
    attempt: int
    attempt_id: str
    model_sha256: str
    layout_digest: str
    config_sha256: str
    members_sha256: str
    cohort: tuple[tuple[ClientId, str], ...]
    minimum: int
    opening_commitment: str
    window_s: float
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
                # Base64 has four spellings of 32 bytes: with two of them one member could stand for two.
                raise ValueError(f"the identity key of {name} must be in base64's one canonical spelling")
        names = [name for name, _ in self.cohort]
        if names != sorted(set(names)):
            raise ValueError("a cohort lists each name once, in the order of the names")
        if len({key for _, key in self.cohort}) < len(self.cohort):
            raise ValueError("two members of the cohort have the same identity key")
        if not MINIMUM_LEAST <= self.minimum <= len(self.cohort) <= COHORT_MAX:
            raise ValueError(
                f"a secure round has {MINIMUM_LEAST} to {COHORT_MAX} clients and a minimum among them, not "
                f"{len(self.cohort)} with a minimum of {self.minimum}"
            )

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON: 32 bytes."""
        return hashlib.sha256(canonical(self).encode()).digest()

    def index_of(self, client: ClientId) -> int:
        """A client's place in the cohort. Raises `ValueError` for one that is not in it."""
        return self.names.index(client)

    @cached_property
    def names(self) -> tuple[ClientId, ...]:
        return tuple(name for name, _ in self.cohort)
