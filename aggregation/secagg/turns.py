"""The phases of a secure round, and each client's messages in them, as the round's state stores them. Pure.

```
AdvertiseKeys -all, or time-> ShareKeys -all, or time-> MaskedInput -round closes-> ConsistencyCheck -> Unmasking
 U1: sent keys                 U2: sent shares           U3: in the sum              U4: signed
```

The round's machine (`round/machine.py`) holds an `Exchange` and advances it; it decides when the round closes, and with
which clients. The first two phases pass while clients train. An exchange has only what may be stored: keys, hashes and
signatures, which are public. Revealed shares are in `unmasking.py`. The opening is secret until the roster is closed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.secagg.parameters import roster_min, survivors_min
from umbel.aggregation.types import ClientId

RANDOM_BYTES = 48
KEYS_SHARE, SHARES_SHARE, AFTER_SHARE = 0.3, 0.65, 0.5
"""Shares of the window: the deadlines of keys and of shares, and the time of each phase after the window."""
ASKED_SHARE, MODEL_SHARE = 0.5, 0.25
"""Shares of the window that a client must have left when it is asked, and when it has the model, to take part."""
_GRACE = 3.0  # once enough have answered, the others get this many times the time that took
_GRACE_S_MIN = 0.5
_AFTER_S_MIN = 10.0  # time to reconnect; it is only used while too few have answered
_GRACE_SHARE = 0.125  # of the window, while clients train, when waiting costs nothing


def after_s(window_s: float) -> float:
    """The longest time of each phase after the window."""
    return max(AFTER_SHARE * window_s, _AFTER_S_MIN)


class Phase(StrEnum):
    """The phases, named as in Bonawitz et al. 2017, figure 4."""

    ADVERTISE_KEYS = "advertise-keys"
    SHARE_KEYS = "share-keys"
    MASKED_INPUT = "masked-input"
    CONSISTENCY_CHECK = "consistency-check"
    UNMASKING = "unmasking"

    @property
    def is_before_inputs(self) -> bool:
        return self in (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS)

    @property
    def done_words(self) -> str:
        """What clients have done in this phase, in words."""
        return {
            Phase.ADVERTISE_KEYS: "advertised keys",
            Phase.SHARE_KEYS: "shared their keys",
            Phase.MASKED_INPUT: "sent their masked updates",
            Phase.CONSISTENCY_CHECK: "signed who is in the sum",
            Phase.UNMASKING: "revealed shares",
        }[self]

    @property
    def late_words(self) -> str:
        """The reason that is recorded for a client that missed this phase."""
        return f"it had not {self.done_words} in time"


def is_late(reason: str) -> bool:
    """Whether this reason is recorded for clients that missed a phase of a secure round."""
    return reason in [phase.late_words for phase in Phase]


@dataclass(frozen=True, slots=True)
class Spoken:
    """One client's messages; an empty text is none."""

    keys: str = ""  # its AdvertiseKeys message, base64
    shares: str = ""  # the SHA-256 of its ShareKeys message, hex
    agreed: str = ""  # its signature of the ConsistencyCheck, base64
    refused: str = ""  # why it does not sign that, in its own words


_WORD: Mapping[Phase, str] = {
    Phase.ADVERTISE_KEYS: "keys",
    Phase.SHARE_KEYS: "shares",
    Phase.CONSISTENCY_CHECK: "agreed",
}
_NOBODY = Spoken()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of one secure attempt, and its phase."""

    attempt_id: str  # 16 random bytes, hex
    opening: str = field(repr=False)  # 32 random bytes, hex
    phase: Phase
    began_at: float  # the phase's beginning, in Unix seconds
    ends_at: float  # its end; the phase of masked inputs ends with the round's window instead
    spoken: Mapping[ClientId, Spoken] = field(default_factory=dict[ClientId, Spoken])

    @classmethod
    def begun(cls, random: bytes, now: float, window_s: float) -> "Exchange":
        """The exchange of an attempt that opens now. `random`: 48 unguessable bytes."""
        if len(random) != RANDOM_BYTES:
            raise ValueError(f"an exchange must begin with {RANDOM_BYTES} random bytes, not {len(random)}")
        return cls(random[:16].hex(), random[16:].hex(), Phase.ADVERTISE_KEYS, now, now + KEYS_SHARE * window_s)

    # --- messages -----------------------------------------------------------------------------------------------------

    def said(self, client: ClientId, phase: Phase) -> str:
        """A client's message in a phase, as in `Spoken`; empty if there is none."""
        word: str = getattr(self.spoken.get(client, _NOBODY), _WORD[phase])
        return word

    def who(self, phase: Phase) -> tuple[ClientId, ...]:
        """The clients with a message in a phase, sorted by name: U1, U2 or U4 once the phase is over."""
        word = _WORD[phase]
        return tuple(sorted(client for client, spoken in self.spoken.items() if getattr(spoken, word)))

    @property
    def refused(self) -> dict[ClientId, str]:
        """The reason of each client that does not sign the list of clients in the sum, in the order of names."""
        return {client: spoken.refused for client, spoken in sorted(self.spoken.items()) if spoken.refused}

    @property
    def masked(self) -> tuple[ClientId, ...]:
        """The clients whose masked vectors can be summed: U2, once its phase is over."""
        return () if self.phase.is_before_inputs else self.who(Phase.SHARE_KEYS)

    def hears(self, client: ClientId, phase: Phase, cohort: Iterable[ClientId]) -> bool:
        """Whether this client's message counts now. `cohort`: the clients asked; once the round has closed, U3."""
        if phase is not self.phase or phase not in _WORD or self.said(client, phase):
            return False
        if self.spoken.get(client, _NOBODY).refused:
            return False
        return client in cohort and (phase is not Phase.SHARE_KEYS or bool(self.said(client, Phase.ADVERTISE_KEYS)))

    def with_word(self, client: ClientId, phase: Phase, word: str) -> "Exchange":
        """A copy with a client's message."""
        spoken = replace(self.spoken.get(client, _NOBODY), **{_WORD[phase]: word})
        return replace(self, spoken={**self.spoken, client: spoken})

    def with_refusal(self, client: ClientId, why: str) -> "Exchange":
        """A copy in which a client has refused its signature."""
        spoken = replace(self.spoken.get(client, _NOBODY), refused=why)
        return replace(self, spoken={**self.spoken, client: spoken})

    # --- phases -------------------------------------------------------------------------------------------------------

    def least(self, minimum: int, n_invited: int) -> int:
        """The fewest messages that end this phase well. `minimum`: of the round's plan. `n_invited`: the cohort."""
        if self.phase is Phase.ADVERTISE_KEYS:
            return max(minimum, MINIMUM_LEAST, roster_min(n_invited))
        # In a sparse graph t counts neighbours: nearly all clients must stay, for each to have t of them.
        enough = survivors_min(len(self.who(Phase.ADVERTISE_KEYS)), n_invited=n_invited)
        is_after_inputs = self.phase in (Phase.CONSISTENCY_CHECK, Phase.UNMASKING)
        return enough if is_after_inputs else max(minimum, MINIMUM_LEAST, enough)

    def is_over(self, waited_for: Iterable[ClientId], now: float) -> bool:
        """Whether this phase ends. `waited_for`: the clients that may still send a message in it."""
        return now >= self.ends_at or all(self.said(client, self.phase) for client in waited_for)

    def next(self, now: float, window_s: float) -> "Exchange":
        """A copy in the phase after this one. `window_s`: the round's."""
        following = list(Phase)[list(Phase).index(self.phase) + 1]
        now = max(now, self.began_at)
        if following is Phase.SHARE_KEYS:
            ends_at = now + (SHARES_SHARE - KEYS_SHARE) * window_s
            return replace(self, phase=following, began_at=now, ends_at=ends_at)
        if following is Phase.MASKED_INPUT:
            return replace(self, phase=following)
        return replace(self, phase=following, began_at=now, ends_at=now + after_s(window_s))

    def hurried(self, now: float, window_s: float) -> "Exchange":
        """A copy that ends soon, because enough clients have answered. `window_s`: the round's."""
        now = max(now, self.began_at)
        least = _GRACE_SHARE * window_s if self.phase.is_before_inputs else _GRACE_S_MIN
        soon = now + max(_GRACE * (now - self.began_at), least)
        return replace(self, ends_at=min(self.ends_at, soon))

    def ended(self, now: float) -> "Exchange":
        """A copy whose phase is over, because the others are silent."""
        return replace(self, ends_at=min(self.ends_at, max(now, self.began_at)))

    def put_off(self, seconds: float) -> "Exchange":
        """A copy whose end is this much later, because no message could arrive."""
        return replace(self, ends_at=self.ends_at + seconds)
