"""Which assignments describe no secure round that can be: each is refused for its own reason, before a key is made."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tests.client.doubles.secure_double import WARD, SecureDouble, peer_key
from umbel.aggregation.plans.assignment import Assignment, SecureOffer, assignment_id
from umbel.aggregation.plans.proximal import MuRule
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.aggregation.types import ClientId
from umbel.client.errors import CoordinatorMisbehaved
from umbel.client.policy.earlier_sums import terms_sha256
from umbel.client.wire.offers import WINDOW_S_MAX, SecureInvitation, check_offer, read_offer

DOUBLE = SecureDouble(nn.Linear(30, 10))
DOUBLE.keys[WARD] = public_key_bytes(peer_key(WARD), "a key")
OFFERED = DOUBLE.offered()


def read(assignment: Assignment) -> SecureInvitation:
    return read_offer(assignment, WARD, DOUBLE.layout)


def with_secure(change: Callable[[SecureOffer], SecureOffer]) -> Assignment:
    assert OFFERED.secure is not None
    return replace(OFFERED, secure=change(OFFERED.secure))


def with_first(name: str = "", key: str = "") -> Assignment:
    """Another name or key of who is first in the cohort."""

    def change(offer: SecureOffer) -> SecureOffer:
        (was, had), *others = offer.cohort
        return replace(offer, cohort=((name or was, key or had), *others))

    return with_secure(change)


def test_what_the_coordinator_offers_is_a_secure_round() -> None:
    assert read(OFFERED).assignment == OFFERED


def test_a_canary_has_no_sum_and_an_evaluation_has_one_without_an_update() -> None:
    with pytest.raises(CoordinatorMisbehaved, match="a round of canary has no sum to mask"):
        read(replace(OFFERED, task=Task.CANARY))
    composition = read(replace(OFFERED, task=Task.EVALUATION)).composition
    assert composition.is_measured_only
    assert composition.layout.n_values == 0


@pytest.mark.parametrize("window_s", [0.0, -1.0, math.nan, math.inf, math.nextafter(WINDOW_S_MAX, math.inf)])
def test_a_window_that_is_no_time_is_refused(window_s: float) -> None:
    with pytest.raises(CoordinatorMisbehaved, match=r"its window is \S+ s, but must be above 0 and at most 31622400 s"):
        read(with_secure(lambda offer: replace(offer, window_s=window_s)))


@pytest.mark.parametrize("window_s", [0.5, WINDOW_S_MAX])
def test_the_shortest_and_the_longest_window_are_taken(window_s: float) -> None:
    assert read(with_secure(lambda offer: replace(offer, window_s=window_s))).offer.window_s == window_s


DRAWN: dict[str, Callable[[SecureOffer], SecureOffer]] = {
    "the plan": lambda offer: replace(offer, plan=replace(offer.plan, is_proportional=True)),
    "this client's draws": lambda offer: replace(offer, draws=2),
}


@pytest.mark.parametrize("change", DRAWN.values(), ids=DRAWN.keys())
def test_no_client_is_weighed_by_how_often_it_is_said_to_be_drawn(change: Callable[[SecureOffer], SecureOffer]) -> None:
    with pytest.raises(CoordinatorMisbehaved, match="weights clients by how often they were drawn"):
        read(with_secure(change))


def test_a_plan_that_divides_by_steps_where_the_algorithm_does_not_is_refused() -> None:
    """The terms of earlier sums have the algorithm, so the plan must follow from it."""
    nova = replace(OFFERED, training=replace(OFFERED.training, algorithm="fednova", proximal_mu=0.0))
    divided = with_secure(lambda offer: replace(offer, plan=replace(offer.plan, is_normalised=True)))
    for one in (nova, divided):
        with pytest.raises(CoordinatorMisbehaved, match="whether updates are divided by the steps done"):
            read(one)
    both = read(replace(nova, secure=divided.secure))
    assert both.composition.words.is_normalised
    assert terms_sha256(both) != terms_sha256(read(OFFERED))


SCAFFOLD: dict[str, Any] = {
    "algorithm": "scaffold",
    "total_samples": 9,
    "proximal_mu": 0.0,
    "local_epochs": None,
    "local_steps": 5,
}


@pytest.mark.parametrize(
    ("changed", "minimum_work"),
    [({"local_epochs": 1, "local_steps": None}, 1.0), ({}, 0.5)],
    ids=["passes over the data", "a part of the work"],
)
def test_control_variates_that_would_show_who_has_done_other_steps_are_refused(
    changed: dict[str, Any], minimum_work: float
) -> None:
    """A coordinator could otherwise ask for two sums, of the changes and of the changes by steps, and solve for one."""

    def offered(**more: Any) -> Assignment:
        plan = with_secure(lambda offer: replace(offer, plan=replace(offer.plan, minimum_work=minimum_work)))
        return replace(plan, training=replace(plan.training, **{**SCAFFOLD, **changed, **more}))

    with pytest.raises(CoordinatorMisbehaved, match="would show the change of a client whose number of steps differs"):
        read(offered())
    with pytest.raises(CoordinatorMisbehaved, match="can show a single client's gradient"):
        read(offered(control_variate="gradient"))


def test_control_variates_of_clients_that_all_do_the_same_steps_are_masked() -> None:
    training = replace(OFFERED.training, **SCAFFOLD)
    assert read(replace(OFFERED, training=training)).assignment.training.has_control


def with_mu(number: int, mu: float, task: Task = Task.TRAINING) -> Assignment:
    """The offer of this round with a mu that is said to adapt, from 0.5 on."""
    rule = MuRule(0.5, 0.1)
    training = replace(OFFERED.training, algorithm="fedprox", proximal_mu=mu, mu_rule=rule)
    own_id = assignment_id(OFFERED.run, number, OFFERED.attempt, ClientId(WARD), task)
    return replace(OFFERED, id=own_id, round=number, task=task, training=training)


@pytest.mark.parametrize(
    ("number", "task", "least", "most"),
    [
        (1, Task.TRAINING, 0.5, 0.5),
        (2, Task.TRAINING, 0.5, 0.5),
        (2, Task.EVALUATION, 0.5, 0.6),
        (3, Task.TRAINING, 0.5, 0.6),
        (42, Task.TRAINING, 0.0, 4.5),
    ],
)
def test_a_mu_that_no_losses_lead_to_is_refused(number: int, task: Task, least: float, most: float) -> None:
    """So a coordinator that is allowed to adapt mu is not allowed to choose it."""
    for mu in (least, most):
        check_offer(with_mu(number, mu, task), OFFERED.run, ClientId(WARD), DOUBLE.layout)
    for mu in (most + 0.01, *([least - 0.01] if least else [])):
        with pytest.raises(CoordinatorMisbehaved, match=f"no losses lead to it by round {number}"):
            check_offer(with_mu(number, mu, task), OFFERED.run, ClientId(WARD), DOUBLE.layout)


def test_an_algorithm_that_needs_what_masks_hide_is_refused() -> None:
    terms = replace(OFFERED.training, algorithm="qfedavg", q=1.0, loss_max=5.0)
    with pytest.raises(CoordinatorMisbehaved, match="q-FedAvg, which needs each client's loss"):
        read(replace(OFFERED, training=terms))


def test_clients_that_are_told_other_rules_of_what_travels_have_other_contexts_and_other_terms() -> None:
    """So their signatures and masks do not fit each other, and a site notices rules that change during a run."""
    rules = (None, TensorRules({}, "ab" * 32), TensorRules({"private": ("bn.*",)}), TensorRules({"private": ("b*.*",)}))
    told = [read(replace(OFFERED, tensors=one)) for one in rules]
    assert len({one.context.config_sha256 for one in told}) == len(rules)
    assert len({terms_sha256(one) for one in told}) == len(rules)
    assert told[0].context == read(OFFERED).context


def test_no_share_of_the_work_is_asked_for() -> None:
    with pytest.raises(CoordinatorMisbehaved, match="a share of the work, which only a canary may do"):
        read(replace(OFFERED, share=0.5))


def test_a_name_that_cannot_stand_in_a_log_is_refused() -> None:
    with pytest.raises(CoordinatorMisbehaved, match="a name in the cohort"):
        read(with_first(name="peer-1\nWARNING: all is well"))


def test_a_key_has_one_spelling() -> None:
    """With two spellings, one member would pass for two where keys are compared as text."""
    assert OFFERED.secure is not None
    key = OFFERED.secure.cohort[0][1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    respelled = f"{key[:-2]}{alphabet[alphabet.index(key[-2]) + 1]}="  # of its last digit two bits stand for nothing
    assert public_key_bytes(respelled, "a key") == public_key_bytes(key, "a key")
    with pytest.raises(CoordinatorMisbehaved, match="is not in canonical base64"):
        read(with_first(key=respelled))
