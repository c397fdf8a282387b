"""By whom an attempt at a round has failed: client -> why, in words. Who is named is asked last in the next attempt.

A secure round names whoever was asked and kept silent, and whoever's shares do not open or are withheld. A round that
fails by nobody's doing, an operator's order or a sum that cannot be, names nobody.
"""

from collections.abc import Collection, Iterable

from umbel.aggregation.messages import Outcome
from umbel.aggregation.phrases import some
from umbel.aggregation.round.states import Closing, Revealed
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import ClientId

_UNHEARD = "had not reported: "


def unheard(clients: Iterable[ClientId], reason: str) -> dict[ClientId, str]:
    """Who had neither reported nor declined when the round ended for this reason."""
    return dict.fromkeys(clients, f"{_UNHEARD}{reason}")


def late_for(phase: Phase, asked: Iterable[ClientId], spoke: Collection[ClientId]) -> dict[ClientId, str]:
    """Who was asked in a phase and was too late for it."""
    heard = frozenset(spoke)
    return {client: phase.late_words for client in asked if client not in heard}


def left_out_by_themselves(state: Closing) -> dict[ClientId, str]:
    """Whom the sum lacks by their own doing, not because it had enough: for them others may have refused it."""
    had_enough = state.late is Outcome.SURPLUS
    return {client: why for client, why in state.missing.items() if not (had_enough and why.startswith(_UNHEARD))}


def not_unmasked(state: Closing, agreed: Collection[ClientId], revealed: Revealed) -> tuple[str, dict[ClientId, str]]:
    """Why a sum could not be unmasked in time, where that is known (else ""), and by whom."""
    lacking, withheld = (
        {client: of[client] for client in sorted(of) if client in state.cohort}
        for of in (revealed.lacking, revealed.withheld)
    )
    found = [f"too few shares opened of those that {some([*lacking])} dealt"] if lacking else []
    found += [f"{some([*withheld])} revealed no shares of clients of whom others did"] if withheld else []
    both = {client: f"{lacking[client]}; {withheld[client]}" for client in lacking.keys() & withheld.keys()}
    silent = late_for(Phase.UNMASKING, agreed, revealed.clients)
    return "; ".join(found), {**silent, **lacking, **withheld, **both}
