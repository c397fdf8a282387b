"""Attacks on who takes part, and in what: other rosters, plans or models for some, few clients, low thresholds."""

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.attacks.adversary import (
    advertised,
    agreed,
    corrupt_signature,
    heard,
    inbox_of,
    masked,
    pair_masks_of,
    require_silent,
    revealed,
    roster_of,
    secret_vector,
    secrets_of,
    self_mask_of,
    split_view,
    without_signatures,
)
from tests.aggregation.secagg.federation import OPENING, Federation, clients_of, context_of
from umbel.aggregation.phrases import counted
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.derive import Vector
from umbel.aggregation.secagg.errors import Disagreement, ForgedMessage, MalformedMessage, SecAggError, TooFew
from umbel.aggregation.secagg.messages import AdvertiseKeys, ShareKeys
from umbel.aggregation.secagg.parameters import Parameters, parameters_for, roster_min, threshold_complete
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.types import RunId

VICTIM = 0


# --- different things for different clients ---------------------------------------------------------------------------


def test_shown_two_rosters_clients_have_nothing_in_common() -> None:
    """Every key in both is genuine; neither shares nor signatures of the one are good in the other."""
    federation, fewer = advertised(6), range(5)
    dealt = dict[int, ShareKeys]()
    for index in range(1, 6):
        message = federation.clients[index].share(federation.roster)
        dealt[index] = ShareKeys.decode(message, index, federation.session.neighbours(index))
    victim = federation.clients[VICTIM]
    victim.share(roster_of(federation, [federation.adverts[index] for index in fewer]))
    victim.hear(inbox_of(federation, VICTIM, fewer, {index: dealt[index] for index in fewer if index != VICTIM}))
    assert len(victim.complaints) == 4, "nobody's shares open"
    masked(victim)
    agreed(victim, fewer)
    with pytest.raises(ForgedMessage):
        revealed(victim, {i: corrupt_signature(federation.session, i, fewer, fewer) for i in fewer})
    require_silent(victim)


DIFFERENT: dict[str, dict[str, object]] = {
    "run": {"run": RunId("other")},
    "round": {"round": 2},
    "attempt": {"attempt": 2},
    "attempt_id": {"attempt_id": "1f" * 16},
    "model": {"model_sha256": "ac" * 32},
    "layout": {"layout_digest": "ce" * 32},
    "plan": {"config_sha256": "e0" * 32},
    "members": {"members_sha256": "01" * 32},
    "minimum": {"minimum": 4},
    "window": {"window_s": 601.0},
    "cohort": {"cohort": context_of(6).cohort},
    "opening": {"opening_commitment": hashlib.sha256(b"another").hexdigest()},
}


def singled_out(changed: dict[str, object]) -> Tensor:
    """Only the victim is asked for something else, say with a model that gives nobody else a gradient; the sum."""
    federation = Federation.of(5)
    federation.clients[VICTIM] = clients_of(replace(federation.context, **changed))[VICTIM]  # type: ignore[arg-type]
    federation.advertise()
    federation.share()
    federation.hear()
    nothing = torch.zeros(64, dtype=torch.int32)
    total = federation.mask(dict.fromkeys(range(1, 5), nothing) | {VICTIM: secret_vector(VICTIM)})
    federation.agree()
    federation.reveal().masks(Vector.LEVELS).apply(total)
    return total


@pytest.mark.parametrize("changed", DIFFERENT.values(), ids=DIFFERENT)
def test_whoever_is_asked_for_something_else_takes_no_part(changed: dict[str, object]) -> None:
    with pytest.raises((ForgedMessage, Disagreement)):
        singled_out(changed)


def test_a_model_for_the_victim_alone_would_show_its_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    without_signatures(monkeypatch)
    monkeypatch.setattr(Context, "digest", property(lambda _: bytes(32)))
    assert torch.equal(singled_out({"model_sha256": "ac" * 32}), secret_vector(VICTIM))


def test_without_signatures_there_is_still_no_sum_over_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    without_signatures(monkeypatch)
    with pytest.raises(SecAggError):
        singled_out({"model_sha256": "ac" * 32})


def mask_between(federation: Federation, index: int, other: int) -> Tensor:
    """What `index` adds for `other`: int32, 4,096 lanes."""
    secrets, session = secrets_of(federation.context, index), federation.session
    mask = torch.zeros(4096, dtype=torch.int32)
    federation.clients[index].masks(Vector.LEVELS).apply(mask)
    rest = [one for one in session.neighbours(index) if one != other]
    mask -= self_mask_of(session, index, secrets.self_mask, 4096)
    return mask - pair_masks_of(session, index, secrets.mask, rest, 4096)


def test_masks_of_one_session_cancel() -> None:
    federation = heard(4)
    assert not (mask_between(federation, 0, 1) + mask_between(federation, 1, 0)).any()


@pytest.mark.parametrize(
    "changed",
    [one for name, one in DIFFERENT.items() if name not in ("opening", "cohort")],
    ids=lambda one: next(iter(one)),
)
def test_masks_over_two_plans_do_not_cancel(changed: dict[str, object]) -> None:
    """With the same keys on both sides, as a coordinator would have it that could forge signatures."""
    left = mask_between(heard(4), 0, 1) + mask_between(heard(4, **changed), 1, 0)
    assert int((left == 0).sum()) <= 1, "a lane is zero with a chance of 2^-32"


def test_masks_over_two_rosters_do_not_cancel() -> None:
    fewer = Federation.of(4)
    fewer.advertise(without=[3])
    fewer.share()
    fewer.hear()
    left = mask_between(heard(4), 0, 1) + mask_between(fewer, 1, 0)
    assert int((left == 0).sum()) <= 1, "a lane is zero with a chance of 2^-32"


# --- few clients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_roster_of_fewer_than_three_is_refused(n: int) -> None:
    federation = advertised(4)
    with pytest.raises(TooFew, match=f"only {counted(n, 'client')} advertised keys; at least 3 are needed"):
        federation.clients[VICTIM].share(roster_of(federation, list(federation.adverts.values())[:n]))
    require_silent(federation.clients[VICTIM])


@pytest.mark.parametrize("minimum", [-1, 0, 1, 2, 5])
def test_no_plan_has_a_minimum_below_three_or_above_the_cohort(minimum: int) -> None:
    with pytest.raises(
        ValueError,
        match=f"a minimum of 3 or more, .* at most 65536 clients; this one has a minimum of {minimum} and 4 clients",
    ):
        context_of(4, minimum=minimum)


def test_a_clients_own_floor_is_above_the_coordinators_word() -> None:
    context = context_of(6, minimum=4)
    with pytest.raises(TooFew, match="only in sums of at least 5"):
        SecureClient(context, VICTIM, None, bytes, 5)  # type: ignore[arg-type]


def shrunk(minimum: int) -> Tensor:
    """Three of nine are corrupt. The coordinator leaves honest clients out until those three are most of the roster."""
    federation = Federation.of(9, minimum=minimum)
    federation.advertise(without=[2, 3, 4, 5])
    federation.share()
    federation.hear()
    return split_view(federation, VICTIM, alive=[VICTIM], dead=[1])


def test_a_roster_shrunk_below_the_minimum_is_refused() -> None:
    with pytest.raises(TooFew, match="only 5 clients advertised keys; at least 9 are needed"):
        shrunk(minimum=9)


def test_of_a_roster_shrunk_to_the_corrupt_clients_nothing_comes_out() -> None:
    """t counts with a third of those *invited*, whoever of them has come."""
    with pytest.raises(TooFew, match="only 4 clients are in the sum; at least 5 are needed"):
        shrunk(minimum=3)


def test_of_a_shrunk_roster_a_vector_would_come_out_if_t_followed_the_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "umbel.aggregation.secagg.session.parameters_for", lambda n, n_invited: Parameters(n - 1, threshold_complete(n))
    )
    monkeypatch.setattr("umbel.aggregation.secagg.session.survivors_min", lambda n, n_invited: threshold_complete(n))
    assert torch.equal(shrunk(minimum=3), secret_vector(VICTIM))


def test_a_third_of_those_invited_is_too_few_in_every_roster() -> None:
    """2t > n + c, and an honest vector beside the victim's in every sum, for all complete rosters that may go on."""
    for n_invited in range(3, 301):
        corrupt = n_invited // 3
        for n in range(roster_min(n_invited), n_invited + 1):
            t = parameters_for(n, n_invited=n_invited).t
            assert 2 * t > n + corrupt
            assert t <= n
            assert t - corrupt >= min(2, n_invited - corrupt)
        assert parameters_for(n_invited).t == threshold_complete(n_invited)


# --- low thresholds ---------------------------------------------------------------------------------------------------


def test_the_threshold_stands_against_two_views_of_who_is_alive() -> None:
    """One of four is corrupt; the three honest ones cannot be split so that both halves reach t = 3 with it."""
    with pytest.raises(TooFew, match="2 clients that hold this client's shares have signed the sum; 3 are needed"):
        split_view(heard(4), VICTIM, alive=[VICTIM], dead=[1, 2])
    with pytest.raises(TooFew, match="2 clients that hold this client's shares have signed the sum; 3 are needed"):
        split_view(heard(4), VICTIM, alive=[VICTIM, 1], dead=[2])


def test_with_a_lower_threshold_two_views_would_show_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "umbel.aggregation.secagg.session.parameters_for", lambda n, n_invited: Parameters(n - 1, n // 2)
    )
    assert torch.equal(split_view(heard(4), VICTIM, alive=[VICTIM, 1], dead=[2]), secret_vector(VICTIM))


def test_a_coordinator_cannot_say_what_the_threshold_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no message. A coordinator that reckons with another one is in another session."""
    federation = advertised(6)
    message = federation.clients[VICTIM].share(federation.roster)
    monkeypatch.setattr("umbel.aggregation.secagg.session.parameters_for", lambda n, n_invited: Parameters(n - 1, 2))
    session = federation.session
    with pytest.raises(ForgedMessage):
        session.check_shares(ShareKeys.decode(message, VICTIM, session.neighbours(VICTIM)))


# --- chosen graphs ----------------------------------------------------------------------------------------------------

N_SPARSE = 400


def adverts_of(n: int) -> dict[int, AdvertiseKeys]:
    """Made up, for a graph asks nothing of keys."""
    keys = [hashlib.sha512(b"%d" % index).digest() for index in range(n)]
    return {index: AdvertiseKeys(index, key[:32], key[32:], bytes(64)) for index, key in enumerate(keys)}


def test_neighbours_hang_on_the_opening_and_on_every_key() -> None:
    """So that neither the coordinator nor who advertises last chooses them without knowing the rest."""
    context, adverts = context_of(N_SPARSE), adverts_of(N_SPARSE)
    k = parameters_for(N_SPARSE).k
    assert k < N_SPARSE - 1
    before = set(Session(context, OPENING, adverts).neighbours(VICTIM))
    others = [
        Session(context, bytes(32), adverts),
        Session(context, OPENING, {**adverts, 7: replace(adverts[7], mask_key=bytes(32))}),
        Session(replace(context, attempt_id="00" * 16), OPENING, adverts),
    ]
    for session in others:
        n_same = len(before.intersection(session.neighbours(VICTIM)))
        assert n_same < 0.75 * k, f"by chance about {k * k / N_SPARSE:.0f} are the same"


def test_an_opening_that_was_not_committed_to_is_refused() -> None:
    federation = advertised(4)
    with pytest.raises(Disagreement, match="does not match the commitment"):
        federation.clients[VICTIM].share(roster_of(federation, federation.adverts.values(), bytes(32)))
    require_silent(federation.clients[VICTIM])


def test_a_roster_names_each_client_once() -> None:
    federation = advertised(4)
    adverts = [federation.adverts[index] for index in (0, 1, 1, 2)]
    with pytest.raises(MalformedMessage, match="each once"):
        federation.clients[VICTIM].share(roster_of(federation, adverts))
