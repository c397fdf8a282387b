"""Check an assignment before anything is fetched, trained or written.

The coordinator may be hostile: names become paths, sizes become files, seconds become waits.
"""

import math
from dataclasses import dataclass

from umbel.aggregation.codec.section import require_codec
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment, SecureOffer, assignment_id
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.privacy.section import require_private_model
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.secagg.context import Context, context_of, offer_in
from umbel.aggregation.secagg.numbers.composition import Composition, composition_of
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.aggregation.types import CHANGES_MAX, SAMPLE_COUNT_MAX, SHA256, ClientId, RunId, require_slug
from umbel.client.errors import AttemptRefused, CoordinatorMisbehaved, WorkRefused

WINDOW_S_MAX = 366 * 86400.0
COUNT_MAX = 1 << 53


def model_bytes_max(layout: Layout) -> int:
    """The largest size of a model file of this layout: its values, its layout as metadata, a header of names."""
    values = sum(spec.n_bytes for spec in layout.owners())
    names = sum(len(spec.name) for spec in layout.tensors)
    # Each name and shape stands in the header and, escaped (up to 14 bytes a character), twice in the metadata.
    return values + 32 * names + 512 * len(layout.tensors) + 4096


def check_offer(offer: Assignment, run: RunId, client: ClientId, layout: Layout) -> None:
    """Raise `CoordinatorMisbehaved` for a malformed assignment or one that is not this client's."""
    # First, because they are used in names and logs.
    if not (1 <= offer.round <= COUNT_MAX and 1 <= offer.attempt <= COUNT_MAX):
        raise CoordinatorMisbehaved("the assignment's round or attempt is out of range")
    if offer.run != run or offer.id != assignment_id(run, offer.round, offer.attempt, client, offer.task):
        raise CoordinatorMisbehaved(f"assignment {offer.id[:200]!r} is not for run {run!r} and client {client!r}")
    if not (math.isfinite(offer.window_s) and 0 <= offer.window_s <= WINDOW_S_MAX):
        raise CoordinatorMisbehaved(
            f"the assignment's window is {offer.window_s} s, but must be between 0 and {WINDOW_S_MAX:.0f} s"
        )
    if not (0 <= offer.seed < 1 << 63 and 1 <= offer.sample_count_max <= SAMPLE_COUNT_MAX):
        raise CoordinatorMisbehaved("the assignment's seed or sample_count_max is out of range")
    if not 0 <= offer.model.version <= COUNT_MAX:
        raise CoordinatorMisbehaved("the assignment's model has a version that is out of range")
    if not 0 <= offer.rank < 1 << 32:
        raise CoordinatorMisbehaved(f"the assignment's rank is {offer.rank}, but must be at least 0 and below 2^32")
    if not 0 < offer.share <= 1:  # also refuses a NaN
        raise CoordinatorMisbehaved(
            f"the assignment asks for a share of {offer.share} of the work, but a share is above 0 and at most 1"
        )
    if not SHA256.fullmatch(offer.model.sha256):
        raise CoordinatorMisbehaved("the assignment's model has no SHA-256 of 64 lower-case hex digits")
    if not SHA256.fullmatch(offer.model.layout_digest):
        raise CoordinatorMisbehaved("the assignment's layout has no SHA-256 of 64 lower-case hex digits")
    size, size_max = offer.model.size_bytes, model_bytes_max(layout)
    if offer.model.layout_digest == layout.digest and not 1 <= size <= size_max:
        raise CoordinatorMisbehaved(
            f"the assignment's model has {size} bytes, but this client's model takes at most {size_max} bytes"
        )
    try:
        require_codec(offer.codec)
    except ValueError as error:
        raise CoordinatorMisbehaved(f"the assignment's codec is invalid: {error}") from error
    _check_training(offer)
    _check_changes(offer)


def _check_training(offer: Assignment) -> None:
    """Raise `CoordinatorMisbehaved` for a learning rate that is not the one of the schedule that it is said to follow,
    or a mu that no losses lead to by its rule.

    Sites compare the schedule and the rule between rounds, and not the rate and mu.
    """
    training = offer.training
    if training.rate_plan is not None and not training.rate_plan.gives(training.learning_rate, offer.round):
        raise CoordinatorMisbehaved(
            f"the assignment's learning rate is {training.learning_rate:g}, but its schedule gives "
            f"{training.rate_plan.rate(offer.round):g} in round {offer.round}"
        )
    n_before = offer.round if offer.task.follows_its_round else offer.round - 1
    if training.mu_rule is not None and not training.mu_rule.allows(training.proximal_mu, n_before):
        raise CoordinatorMisbehaved(
            f"the assignment's proximal_mu is {training.proximal_mu:g}, but from {training.mu_rule.proximal_mu:g} on, "
            f"in steps of {training.mu_rule.step:g}, no losses lead to it by round {offer.round}"
        )


def _check_changes(offer: Assignment) -> None:
    if len(offer.changes) > CHANGES_MAX:
        raise CoordinatorMisbehaved(
            f"the assignment names {len(offer.changes)} files of model changes; a client accepts at most {CHANGES_MAX}"
        )
    for change in offer.changes:
        if not (SHA256.fullmatch(change.sha256) and SHA256.fullmatch(change.from_sha256)):
            raise CoordinatorMisbehaved(
                "a file of model changes in the assignment has no SHA-256 of 64 lower-case hex digits"
            )
        if change.size_bytes < 1:
            raise CoordinatorMisbehaved(
                f"a file of model changes in the assignment has {change.size_bytes} bytes, but at least 1 is needed"
            )
    if sum(change.size_bytes for change in offer.changes) >= offer.model.size_bytes:
        raise CoordinatorMisbehaved(
            "the assignment's files of model changes are together as large as the whole model, or larger"
        )


def check_layout(offer: Assignment, layout: Layout) -> None:
    """Raise `WorkRefused` for a model that is not this client's."""
    if offer.model.layout_digest != layout.digest:
        raise WorkRefused(
            f"this client's model has layout {layout.digest[:12]}…, but the run's model has layout "
            f"{offer.model.layout_digest[:12]}…: both sides need the same version of the model's code"
        )


def check_able(offer: Assignment, sample_count: int, layout: Layout) -> None:
    """Raise `WorkRefused` for a model that is not this client's, or more samples than the run accepts."""
    check_layout(offer, layout)
    if sample_count > offer.sample_count_max:
        raise WorkRefused(
            f"this client has {sample_count} samples, but the run accepts at most {offer.sample_count_max} from one "
            "client"
        )


@dataclass(frozen=True, slots=True)
class SecureInvitation:
    """An invitation to a secure round: the context that all its clients must agree on, and what is masked."""

    client: ClientId
    assignment: Assignment
    offer: SecureOffer
    context: Context
    composition: Composition


def read_offer(assignment: Assignment, client: ClientId, layout: Layout) -> SecureInvitation:
    """Read an assignment to a secure round. Raises `CoordinatorMisbehaved` if there can be no such round."""
    try:
        offer = offer_in(assignment)
        _check(assignment, offer)
        composition = composition_of(assignment, layout)
        _check_noise(composition)
        return SecureInvitation(client, assignment, offer, context_of(assignment), composition)
    except ValueError as error:
        raise CoordinatorMisbehaved(f"the assignment describes an invalid secure round: {error}") from error


def _check(assignment: Assignment, offer: SecureOffer) -> None:
    """Raise `ValueError` for malformed names and keys, and for numbers out of range."""
    if assignment.task.tries_clients:
        raise ValueError(f"a round of {assignment.task.value} has no sum to mask")
    if not (math.isfinite(offer.window_s) and 0 < offer.window_s <= WINDOW_S_MAX):
        raise ValueError(f"its window is {offer.window_s} s, but must be above 0 and at most {WINDOW_S_MAX:.0f} s")
    if offer.plan.is_normalised != assignment.training.is_normalised:
        raise ValueError("its plan and its algorithm do not agree whether updates are divided by the steps done")
    if reason := assignment.training.why_not_masked(offer.plan.minimum_work):
        raise ValueError(reason)
    if assignment.training.fair_terms is not None:
        raise ValueError(
            "its algorithm is q-FedAvg, which needs each client's loss, and a masked update does not say it"
        )
    if offer.plan.is_proportional or offer.draws != 1:
        raise ValueError(
            "it weights clients by how often they were drawn, and only the coordinator knows the draw. The coordinator "
            "could give one client all the weight and read its update from the sum"
        )
    grid = assignment.grid
    if grid != Grid.finest(max_abs=grid.max_abs, total_weight_max=grid.total_weight_max):
        raise ValueError(
            "its grid's step is larger than max_abs and total_weight_max require, so it would only add rounding errors"
        )
    if assignment.share != 1:
        raise ValueError("it asks for a share of the work, which only a canary may do")
    for name, key in offer.cohort:
        require_slug(name, "a name in the cohort")
        if public_key_text(public_key_bytes(key, "a key in the cohort")) != key:
            raise ValueError("a key in the cohort is not in canonical base64")


def check_window(invitation: SecureInvitation, left_s: float, least: float, what: str) -> None:
    """Raise `AttemptRefused` if less than the share `least` of the round's window is left when `what` arrived.

    All clients sign the window, but the coordinator tells each client the time that is left.
    """
    window_s = invitation.offer.window_s
    if left_s < least * window_s:
        raise AttemptRefused(
            f"{what} with {max(left_s, 0.0):.3g} s left of the round's {window_s:g} s window, and this client needs at "
            f"least {least * window_s:.3g} s to do enough of the work. It skips this attempt and can take part in the "
            "next"
        )


def _check_noise(composition: Composition) -> None:
    """Raise `ValueError` for a private round whose noise is too little, or for another model."""
    if (noise := composition.secure.noise) is None:
        return
    require_private_model(composition.layout)
    if noise.n_values != composition.n_levels:
        raise ValueError(f"its noise is for {noise.n_values} levels, but an update has {composition.n_levels} levels")
    if noise.least > composition.secure.minimum:
        raise ValueError(
            f"its noise is enough only with {noise.least} clients, but the sum may have only "
            f"{composition.secure.minimum}"
        )
    if (clip := composition.codec.clip_norm) is None:
        raise ValueError("its updates have no clip_norm, so no noise can hide them")
    # By the plan alone: a bound between the lengths of updates would turn the longer ones into zeros.
    if noise.bound_squared < rounded_bound(clip * composition.codec.inverse_step, composition.n_levels):
        raise ValueError("its noise is too small for the longest updates that its clip_norm allows")
