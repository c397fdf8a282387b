"""From what a client is asked to the context that it signs: the same for every member, or their masks do not cancel."""

import hashlib

from umbel.aggregation.canonical import canonical
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.errors import Disagreement
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.types import ClientId

_COMMON = ("training", "codec", "grid", "sample_count_max", "task", "share")


def offer_in(assignment: Assignment) -> SecureOffer:
    """What it says of a secure round. Raises `Disagreement` for one that says nothing of it."""
    if assignment.secure is None:
        raise Disagreement("this assignment asks for an update that anybody can read")
    return assignment.secure


def context_of(assignment: Assignment) -> Context:
    """What is agreed on by doing this assignment. Raises `Disagreement`, and `ValueError` for what no round can be."""
    offer = offer_in(assignment)
    asked = {name: getattr(assignment, name) for name in _COMMON} | {"secure": offer.plan}
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


def composition_of(assignment: Assignment, layout: Layout) -> Composition:
    """The numbers that are masked. Raises `ValueError` for plans that could wrap, `Disagreement`."""
    plan = offer_in(assignment).plan
    return Composition(assignment.codec, plan, assignment.grid, assignment.sample_count_max, layout)
