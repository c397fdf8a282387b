"""Whether an assignment asks for a secure round that can be, checked before a key is made; `offer.py` has the rest."""

import math
from dataclasses import dataclass

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.secagg.agreement import composition_of, context_of, offer_in
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.types import ClientId, require_slug
from umbel.client.errors import AttemptRefused, CoordinatorMisbehaved
from umbel.client.rounds.offers import WINDOW_S_MAX


@dataclass(frozen=True, slots=True)
class Asked:
    """A secure round as it is asked for: what all its members must agree on, and the numbers that are masked."""

    client: ClientId
    assignment: Assignment
    offer: SecureOffer
    context: Context
    composition: Composition


def read_offer(assignment: Assignment, client: ClientId, layout: Layout) -> Asked:
    """Raise `CoordinatorMisbehaved` for an assignment that no secure round can have."""
    try:
        offer = offer_in(assignment)
        _check(assignment, offer)
        composition = composition_of(assignment, layout)
        _check_noise(composition)
        return Asked(client, assignment, offer, context_of(assignment), composition)
    except ValueError as error:
        raise CoordinatorMisbehaved(f"the assignment describes an invalid secure round: {error}") from error


def _check(assignment: Assignment, offer: SecureOffer) -> None:
    """Raise `ValueError` for names that cannot stand in a log, keys that nobody has, and numbers out of range."""
    if not assignment.task.makes_model:
        raise ValueError(f"a round of {assignment.task.value} has no sum to mask")
    if not (math.isfinite(offer.window_s) and 0 < offer.window_s <= WINDOW_S_MAX):
        raise ValueError("its window is out of range")
    if offer.plan.is_proportional or offer.draws != 1:
        raise ValueError(
            "it weighs clients by how often they were drawn, which is the coordinator's word for each of them: one "
            "could be given all the weight, and its update read from the sum"
        )
    grid = assignment.grid
    if grid != Grid.finest(max_abs=grid.max_abs, total_weight_max=grid.total_weight_max):
        raise ValueError(
            "its grid has not the finest step that its max_abs and total_weight_max leave, so it would only add noise"
        )
    if assignment.share != 1:
        raise ValueError("it asks for a share of the work, which only a canary does")
    for name, key in offer.cohort:
        require_slug(name, "a name in the cohort")
        if public_key_text(public_key_bytes(key, "a key in the cohort")) != key:
            raise ValueError("a key in the cohort is not the base64 that its bytes have")


def check_window(asked: Asked, left_s: float, least: float, what: str) -> None:
    """Raise `AttemptRefused` if less than a share, `least`, of the round's window is left. `what`: arrived so late.

    The window is in the context that all sign; what is left of it is the coordinator's word to each client alone.
    """
    window_s = asked.offer.window_s
    if left_s < least * window_s:
        raise AttemptRefused(
            f"{what} with {max(left_s, 0.0):.3g} s left of the round's {window_s:g} s window, and this client needs at "
            f"least {least * window_s:.3g} s to do enough of the work. It skips this attempt and can take part in the "
            "next"
        )


def _check_noise(composition: Composition) -> None:
    """Raise `ValueError` for a private round whose noise is not for this model, or too little."""
    if (noise := composition.secure.noise) is None:
        return
    require_private_model(composition.layout)
    if noise.n_values != composition.n_levels:
        raise ValueError(f"its noise is for {noise.n_values} levels, and an update has {composition.n_levels}")
    if noise.least > composition.secure.minimum:
        raise ValueError("its noise counts on more clients than must be in the sum")
    if (clip := composition.codec.clip_norm) is None:
        raise ValueError("its updates have no clip_norm, so its noise covers none of them")
    # Of the plan alone: a bound that some updates fit in and others do not would leave zeros of those that do not.
    if noise.bound_squared < rounded_bound(clip * composition.codec.inverse_step, composition.n_levels):
        raise ValueError("its noise is for shorter updates than its clip_norm leaves")
