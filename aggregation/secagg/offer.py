"""What an assignment says of a secure round: all that a client needs to make the context that it will sign."""

from dataclasses import dataclass

from umbel.aggregation.secagg.numbers.plan import SecurePlan


@dataclass(frozen=True, slots=True)
class SecureOffer:
    """Beside what every assignment has. `cohort`: names and identity keys (base64), in the order of the names.

    `window_s`: of the round, not what is left of it. `draws`: how often this client was drawn, which is public. The
    rest: `context.py`.
    """

    attempt_id: str
    opening_commitment: str
    cohort: tuple[tuple[str, str], ...]
    members_sha256: str
    window_s: float
    plan: SecurePlan
    draws: int = 1
