"""Secure rounds in virtual time, with silence in every phase: the sum is the plain one to the bit, or there is none."""

from dataclasses import replace

import pytest
import torch

from tests.sim.secure.playing import PlayedRound, device_fates, play
from umbel.aggregation.round.states import Abandoned, Committed
from umbel.aggregation.secagg.messages import share_keys_bytes
from umbel.aggregation.secagg.parameters import parameters_for, survivors_min
from umbel.aggregation.secagg.turns import Phase
from umbel.sim.bench.secagg.cohort import (
    WINDOW_S,
    bits_of_sums,
    client_name,
    composition_of,
    made_contribution,
    plain_sums,
    secure_plan,
)
from umbel.sim.secure.devices import DeviceFate

WORD_PHASES = (Phase.ADVERTISE_KEYS, Phase.SHARE_KEYS, Phase.CONSISTENCY_CHECK)


def played(luck: list[DeviceFate], n_values: int = 1000) -> PlayedRound:
    plan = secure_plan(len(luck), bits=bits_of_sums(len(luck)))
    return play(plan, composition_of(plan, n_values), luck)


def require_exact(outcome: PlayedRound, n: int, n_values: int = 1000) -> None:
    """The sums are those of the plain integers of whom it names, and the words say how many these are."""
    composition = composition_of(secure_plan(n, bits=bits_of_sums(n)), n_values)
    levels, words = plain_sums(composition, [int(name[-5:]) for name in outcome.inputs])
    assert outcome.levels is not None
    assert outcome.words is not None
    assert torch.equal(outcome.levels, levels)
    assert torch.equal(outcome.words, words)
    counts, _, _, _ = composition.words.split(outcome.words)
    assert counts.clients == len(outcome.inputs)


def set_sizes(outcome: PlayedRound) -> list[int]:
    assert outcome.exchange is not None
    return [len(outcome.exchange.who(phase)) for phase in WORD_PHASES]


def test_a_round_of_fifty_in_which_some_fall_silent_in_every_phase() -> None:
    outcome = played(device_fates(50, seed=0, dropping=0.2))

    assert set_sizes(outcome) == [48, 46, 42]
    assert len(outcome.inputs) == 44
    assert not outcome.refusals
    require_exact(outcome, 50)
    assert WINDOW_S < outcome.took_s < 1.1 * WINDOW_S, "those that are silent are waited for until the window's end"


def test_a_round_in_which_everybody_stays_is_over_when_the_slowest_is() -> None:
    luck = device_fates(10, seed=1, dropping=0)
    outcome = played(luck)

    assert len(outcome.inputs) == 10
    require_exact(outcome, 10)
    assert max(one.work_s for one in luck) < outcome.took_s < max(one.work_s for one in luck) + 5


@pytest.mark.parametrize("phase", Phase)
def test_one_too_few_in_any_phase_and_nothing_is_opened(phase: Phase) -> None:
    """t is 7 of 10. Who never advertises is not counted: of those that are left, it takes two thirds again."""
    n, t = 10, 7
    n_silent = n - 2 if phase is Phase.ADVERTISE_KEYS else n - t + 1
    luck = [
        replace(one, silent_from=phase if i < n_silent else None)
        for i, one in enumerate(device_fates(n, 2, dropping=0))
    ]
    outcome = played(luck, n_values=100)

    assert isinstance(outcome.ended, Abandoned)
    assert (outcome.levels, outcome.words) == (None, None)
    assert outcome.took_s <= 1.4 * WINDOW_S + 1


@pytest.mark.parametrize("phase", list(Phase)[1:])
def test_as_few_as_the_threshold_are_enough_in_every_phase(phase: Phase) -> None:
    luck = [replace(one, silent_from=phase if i < 3 else None) for i, one in enumerate(device_fates(10, 2, dropping=0))]
    outcome = played(luck, n_values=100)

    assert isinstance(outcome.ended, Committed)
    require_exact(outcome, 10, n_values=100)


def test_the_same_seed_gives_the_same_round() -> None:
    one, same = (played(device_fates(8, seed=5, dropping=0.2), n_values=100) for _ in range(2))
    assert (one.ended, one.took_s, one.up, one.down) == (same.ended, same.took_s, same.up, same.down)


def test_bytes_are_those_of_the_messages() -> None:
    n, n_values = 6, 1000
    plan = secure_plan(n, bits=bits_of_sums(n))
    composition = composition_of(plan, n_values)
    outcome = play(plan, composition, device_fates(n, seed=0, dropping=0))

    update = 64 + composition.modular.n_bytes + 8 * composition.n_words + 64  # header, vectors, signature
    assert outcome.up[client_name(0)] == 132 + share_keys_bytes(n - 1) + update + 64 + (8 + n * 37)
    roster, inbox = 4 + 32 + n * 132, 4 + 4 * n + (n - 1) * 114
    assert outcome.down[client_name(0)] == roster + inbox + (4 + 4 * n) + (4 + 68 * n)


def test_who_is_silent_neither_sends_nor_fetches() -> None:
    silent = {0: Phase.ADVERTISE_KEYS, 1: Phase.SHARE_KEYS}
    luck = [replace(one, silent_from=silent.get(i)) for i, one in enumerate(device_fates(8, seed=0, dropping=0))]
    outcome = played(luck, n_values=100)
    assert [(outcome.up[client_name(i)], outcome.down[client_name(i)]) for i in silent] == [(0, 0), (132, 0)]
    assert isinstance(outcome.ended, Committed)


def test_what_a_client_brings_is_the_same_whenever_it_is_made() -> None:
    composition = composition_of(secure_plan(5, bits=19), 100)
    one, same, other = (made_contribution(composition, rank) for rank in (3, 3, 4))
    assert torch.equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)


@pytest.mark.nightly
def test_a_thousand_clients_of_whom_a_tenth_falls_silent() -> None:
    """The sparse graph. In each phase twenty more are gone; what is left is above what every client asks for."""
    outcome = played(device_fates(1000, seed=0, dropping=0.1))

    assert parameters_for(980).k < 979, "nobody has all others for neighbours"
    n_keys, n_shared, n_agreed = set_sizes(outcome)
    assert (n_keys, n_shared, len(outcome.inputs)) == (980, 960, 940)
    assert survivors_min(980) <= n_agreed <= 920, "once enough have signed, the slowest are not waited for"
    assert not outcome.refusals
    require_exact(outcome, 1000)
