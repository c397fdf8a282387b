"""What simulated runs make: the versions and the records of rounds that were frozen."""

from collections.abc import Iterator

import pytest
import torch

from tests.frozen.kept import frozen
from tests.frozen.simulated import PLAYS, made_by

pytestmark = [pytest.mark.bits, pytest.mark.slow]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("n_threads")
@pytest.mark.parametrize("name", PLAYS)
def test_a_simulated_run_makes_the_frozen_models_and_records(name: str) -> None:
    facts, records = made_by(PLAYS[name])
    assert facts == frozen("models.json")["simulated"][name], records


def test_every_simulated_run_is_frozen() -> None:
    """A run that is taken away from the plays would take its promise with it."""
    assert set(frozen("models.json")["simulated"]) == set(PLAYS)
