"""The coordinator in one secure round: who has said what, whose turn it is, and what is told to whom. Pure.

```
AdvertiseKeys -all, or time-> ShareKeys -all, or time-> MaskedInput -round closes-> ConsistencyCheck -> Unmasking
 U1: who has                   U2: who has               U3: whose vector is in     U4: who has signed
```

The round's machine (`advance.py`) holds an `Exchange` and moves it on; it decides when the round closes, and with whom.
The first two phases pass while clients train. What is stored of an exchange is here: keys, hashes and signatures, which
are public; what must not be stored is in `unmasking.py`. The opening is secret until the roster is closed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.secagg.parameters import roster_min, survivors_min
from umbel.aggregation.types import ClientId

RANDOM_BYTES = 48
KEYS_SHARE, SHARES_SHARE, AFTER_SHARE = 0.3, 0.65, 0.5
"""Of the window: by when keys and then shares must be in, and how long each phase after it may take."""
ASKED_SHARE, MODEL_SHARE = 0.5, 0.25
"""Of the window, what must be left to a client when it is asked, and when it has the model; or it takes no part."""
_GRACE = 3.0  # of the time in which enough have spoken, the others may take so much more
_GRACE_S_MIN = 0.5
_AFTER_S_MIN = 10.0  # so that those whose line was cut come back; they are waited for only while too few have spoken
_GRACE_SHARE = 0.125  # of the window, while clients train: nobody waits for the others then


def after_s(window_s: float) -> float:
    """How long each phase after the window may take, while too few have spoken."""
    return max(AFTER_SHARE * window_s, _AFTER_S_MIN)


class Phase(StrEnum):
    """Whose turn it is, named as in Bonawitz et al. 2017, figure 4."""

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
        """What clients have done in it, in words."""
        return {
            Phase.ADVERTISE_KEYS: "advertised keys",
            Phase.SHARE_KEYS: "shared their keys",
            Phase.MASKED_INPUT: "sent their masked updates",
            Phase.CONSISTENCY_CHECK: "signed who is in the sum",
            Phase.UNMASKING: "revealed shares",
        }[self]

    @property
    def late_words(self) -> str:
        """Why a client is out of the round, or has spoiled it, that was too late for this phase."""
        return f"it had not {self.done_words} in time"


def is_late(reason: str) -> bool:
    """Whether this is said of a client that was too late in a secure round, and did not decline."""
    return reason in [phase.late_words for phase in Phase]


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one client has said. `keys`: its AdvertiseKeys message, base64; `shares`: the SHA-256 of its ShareKeys
    message, hex; `agreed`: its signature of the ConsistencyCheck, base64; `refused`: why it will not sign that, in its
    own words. Empty: not yet."""

    keys: str = ""
    shares: str = ""
    agreed: str = ""
    refused: str = ""


_WORD: Mapping[Phase, str] = {
    Phase.ADVERTISE_KEYS: "keys",
    Phase.SHARE_KEYS: "shares",
    Phase.CONSISTENCY_CHECK: "agreed",
}
_NOBODY = Spoken()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One secure attempt. `attempt_id`: 16 random bytes, `opening`: 32, both hex. `ends_at`: of this phase, in
    Unix seconds; `began_at`: likewise. Inputs end with the round's window."""

    attempt_id: str
    opening: str = field(repr=False)
    phase: Phase
    began_at: float
    ends_at: float
    spoken: Mapping[ClientId, Spoken] = field(default_factory=dict[ClientId, Spoken])

    @classmethod
    def begun(cls, random: bytes, now: float, window_s: float) -> "Exchange":
        """The exchange of an attempt that opens now. `random`: 48 bytes that nobody can guess."""
        if len(random) != RANDOM_BYTES:
            raise ValueError(f"an exchange begins with {RANDOM_BYTES} random bytes, not {len(random)}")
        return cls(random[:16].hex(), random[16:].hex(), Phase.ADVERTISE_KEYS, now, now + KEYS_SHARE * window_s)

    # --- who has said what --------------------------------------------------------------------------------------------

    def said(self, client: ClientId, phase: Phase) -> str:
        """What a client has said in a phase, as `Spoken` has it; empty if nothing."""
        word: str = getattr(self.spoken.get(client, _NOBODY), _WORD[phase])
        return word

    def who(self, phase: Phase) -> tuple[ClientId, ...]:
        """Who has spoken in a phase, in the order of names: U1, U2 or U4 once it is over."""
        word = _WORD[phase]
        return tuple(sorted(client for client, spoken in self.spoken.items() if getattr(spoken, word)))

    @property
    def refused(self) -> dict[ClientId, str]:
        """Who will not sign who is in the sum -> why, in the order of names."""
        return {client: spoken.refused for client, spoken in sorted(self.spoken.items()) if spoken.refused}

    @property
    def masked(self) -> tuple[ClientId, ...]:
        """Whose masked vectors can be summed: U2, once its phase is over."""
        return () if self.phase.is_before_inputs else self.who(Phase.SHARE_KEYS)

    def hears(self, client: ClientId, phase: Phase, cohort: Iterable[ClientId]) -> bool:
        """Whether this client's word counts now. `cohort`: who was asked, or, once the round has closed, U3."""
        if phase is not self.phase or phase not in _WORD or self.said(client, phase):
            return False
        if self.spoken.get(client, _NOBODY).refused:
            return False
        return client in cohort and (phase is not Phase.SHARE_KEYS or bool(self.said(client, Phase.ADVERTISE_KEYS)))

    def with_word(self, client: ClientId, phase: Phase, word: str) -> "Exchange":
        """After a word that counts."""
        spoken = replace(self.spoken.get(client, _NOBODY), **{_WORD[phase]: word})
        return replace(self, spoken={**self.spoken, client: spoken})

    def with_refusal(self, client: ClientId, why: str) -> "Exchange":
        """After a client whose signature is asked for has said that it gives none."""
        spoken = replace(self.spoken.get(client, _NOBODY), refused=why)
        return replace(self, spoken={**self.spoken, client: spoken})

    # --- whose turn it is ---------------------------------------------------------------------------------------------

    def least(self, minimum: int, n_invited: int) -> int:
        """How many must have spoken for this phase to end well. `minimum`: of a sum, as the round's plan has it.

        `n_invited`: the cohort.
        """
        if self.phase is Phase.ADVERTISE_KEYS:
            return max(minimum, MINIMUM_LEAST, roster_min(n_invited))
        # In a sparse graph t counts neighbours: for everyone to have so many of them, nearly all must come through.
        enough = survivors_min(len(self.who(Phase.ADVERTISE_KEYS)), n_invited=n_invited)
        is_after_inputs = self.phase in (Phase.CONSISTENCY_CHECK, Phase.UNMASKING)
        return enough if is_after_inputs else max(minimum, MINIMUM_LEAST, enough)

    def is_over(self, waited_for: Iterable[ClientId], now: float) -> bool:
        """Whether this phase need wait no longer. `waited_for`: who may speak in it."""
        return now >= self.ends_at or all(self.said(client, self.phase) for client in waited_for)

    def next(self, now: float, window_s: float) -> "Exchange":
        """The phase after this one, which does not begin before it. `window_s`: the round's."""
        following = list(Phase)[list(Phase).index(self.phase) + 1]
        now = max(now, self.began_at)
        if following is Phase.SHARE_KEYS:
            ends_at = now + (SHARES_SHARE - KEYS_SHARE) * window_s
            return replace(self, phase=following, began_at=now, ends_at=ends_at)
        if following is Phase.MASKED_INPUT:
            return replace(self, phase=following)
        return replace(self, phase=following, began_at=now, ends_at=now + after_s(window_s))

    def hurried(self, now: float, window_s: float) -> "Exchange":
        """When enough have spoken: the others are not waited for much longer. `window_s`: the round's."""
        now = max(now, self.began_at)
        least = _GRACE_SHARE * window_s if self.phase.is_before_inputs else _GRACE_S_MIN
        soon = now + max(_GRACE * (now - self.began_at), least)
        return replace(self, ends_at=min(self.ends_at, soon))

    def put_off(self, seconds: float) -> "Exchange":
        """For so long nobody could be heard."""
        return replace(self, ends_at=self.ends_at + seconds)
