"""A client that is asked again, for something else, out of turn, or with what was said in another attempt."""

from itertools import product
from typing import Any

import pytest

from tests.aggregation.secagg.attacks.adversary import (
    advertised,
    heard,
    masked,
    require_silent,
)
from tests.aggregation.secagg.federation import Federation, clients_of, context_of
from tests.aggregation.secagg.told import STEPS, VICTIM, Told, told
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.errors import Disagreement, MalformedMessage, OutOfTurn, SecAggError
from umbel.aggregation.secagg.messages import (
    encode_agreements,
    encode_indices,
)


def otherwise(so_far: Told, step: str) -> bytes:
    """Another message that would be good, had it come first."""
    federation = so_far.federation
    fewer = {index: federation.adverts[index] for index in range(4)}
    four = (0, 1, 2, 3)
    match step:
        case "share":
            return Federation(federation.context, adverts=fewer).roster
        case "hear":
            dealt = {index: federation.dealt[index] for index in four}
            return Federation(federation.context, adverts=federation.adverts, dealt=dealt).inbox(VICTIM)
        case "sign_input":
            return bytes([1]) * 32
        case "agree":
            return encode_indices(four)
        case _:
            return encode_agreements({index: federation.agreed[index] for index in four})


@pytest.mark.parametrize("until", STEPS)
def test_the_same_again_has_the_same_answer_and_nothing_else(until: str) -> None:
    """Lost answers are asked for, in whatever order; a vector is not signed again once its masks are gone."""
    so_far = told(until)
    for step, data in so_far.said.items():
        if not (step == "sign_input" and until == "reveal"):
            assert getattr(so_far.victim, step)(data) == so_far.answers[step]


@pytest.mark.parametrize(
    ("step", "until"), [(s, u) for s, u in product(STEPS, STEPS) if STEPS.index(s) <= STEPS.index(u)]
)
def test_something_else_in_its_place_ends_the_round(step: str, until: str) -> None:
    """A second roster, inbox, vector, sum or set of signatures, at whatever time it comes."""
    so_far = told(until)
    refusal = OutOfTurn if (step, until) == ("sign_input", "reveal") else Disagreement
    with pytest.raises(refusal):
        getattr(so_far.victim, step)(otherwise(so_far, step))
    if refusal is Disagreement:
        require_silent(so_far.victim)
        with pytest.raises(OutOfTurn):
            getattr(so_far.victim, step)(so_far.said[step])


def come_as_far_as(step: str) -> SecureClient:
    """A client whose turn it is to take this step."""
    return advertised(5).clients[VICTIM] if step == STEPS[0] else told(STEPS[STEPS.index(step) - 1]).victim


@pytest.mark.parametrize(
    ("turn", "step"), [(t, s) for t, s in product(STEPS, STEPS) if STEPS.index(t) < STEPS.index(s)]
)
def test_no_step_can_be_left_out(turn: str, step: str) -> None:
    message = told().said[step]
    with pytest.raises(OutOfTurn):
        getattr(come_as_far_as(turn), step)(message)


SENT = [step for step in STEPS if step != "sign_input"]  # which takes a digest that the client makes itself


@pytest.mark.parametrize(("turn", "other"), [(t, o) for t, o in product(SENT, SENT) if t != o])
def test_a_message_of_one_step_is_none_of_another(turn: str, other: str) -> None:
    client = come_as_far_as(turn)
    with pytest.raises((MalformedMessage, Disagreement)):
        getattr(client, turn)(told().said[other])
    require_silent(client)


@pytest.mark.parametrize(
    "changed", [{"attempt": 2}, {"round": 2}, {"attempt_id": "1f" * 16}], ids=lambda of: next(iter(of))
)
def test_no_message_of_another_attempt_is_good_in_this_one(changed: dict[str, Any]) -> None:
    """Even if the client's randomness repeated itself: its keys are the same in both."""
    whole = told()
    context = context_of(5, **changed)
    with pytest.raises(SecAggError):
        clients_of(context)[VICTIM].share(whole.said["share"])

    now = heard(5, **changed)
    before = whole.federation
    assert now.adverts[1].mask_key == before.adverts[1].mask_key
    with pytest.raises(SecAggError, match="not signed"):
        now.session.check_shares(before.dealt[1])
    for client in now.clients.values():
        masked(client)
        client.agree(whole.said["agree"])  # a set is only a set; what counts is who has signed it
    with pytest.raises(SecAggError, match="not signed"):
        now.clients[VICTIM].reveal(whole.said["reveal"])
