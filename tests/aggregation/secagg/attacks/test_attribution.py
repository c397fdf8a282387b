"""Whose a level of a sum is: a coordinator that knows every client's dither can tell, where a step is coarse.

It may choose a step at which nearly all levels of all clients are zero. One that is not belongs to the client whose
dither stood next to the edge there. So it gets signs of single clients' coordinates out of a sum of many.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.house import cohort, composed, gaussian, secure_plan, work_of
from umbel.aggregation.kernels.arguments import UNIT, phase
from umbel.aggregation.kernels.kernels import dither_into
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import contribution

N_CLIENTS = 10
STEP = 100.0  # root mean squares of an update
SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def composition() -> Composition:
    return composed(secure_plan(N_CLIENTS), step=STEP)


@pytest.fixture(scope="module")
def changes() -> list[Tensor]:
    return [gaussian(3000, rank) for rank in range(N_CLIENTS)]


def attributed(composition: Composition, levels: Tensor) -> float:
    """Of the levels of clients (n, n_levels) that are not zero: the share whose owner is told by the public dither.

    What is known to it: the sum of them, and of each client its rank.
    """
    public = torch.empty(composition.n_levels, dtype=torch.int32)
    dither_into(public, composition.codec.key, 0)
    dithers = torch.stack([(public + phase(rank)) % UNIT for rank in range(N_CLIENTS)])
    total = levels.sum(0)
    nearest = torch.where(total > 0, dithers.argmax(0), dithers.argmin(0))
    alone = (levels != 0).sum(0) == 1
    assert int(alone.sum()) > 100, "there is something to tell"
    return float((nearest == (levels != 0).to(torch.int8).argmax(0))[alone].double().mean())


def by_public_dither(composition: Composition, changes: list[Tensor]) -> Tensor:
    rotated = composition.modular.rotated
    return torch.stack([torch.cat(list(rotated.levels(one, rank))) for rank, one in enumerate(changes)])


def as_contributed(composition: Composition, changes: list[Tensor]) -> Tensor:
    made = cohort(composition, changes, [work_of(1)] * N_CLIENTS)
    return torch.stack([torch.cat(list(one.levels())) for one in made.contributions])


@pytest.mark.parametrize(
    ("rounded", "least", "most"), [(by_public_dither, 0.8, 1.0), (as_contributed, 0.0, 0.2)], ids=["public", "own"]
)
def test_a_level_tells_whose_it_is_by_a_public_dither_and_not_by_a_clients_own(
    composition: Composition,
    changes: list[Tensor],
    rounded: Callable[[Composition, list[Tensor]], Tensor],
    least: float,
    most: float,
) -> None:
    """By chance it would be one in ten."""
    assert least <= attributed(composition, rounded(composition, changes)) <= most


def test_what_a_client_rounds_to_hangs_on_its_secret(composition: Composition, changes: list[Tensor]) -> None:
    def levels(secret: bytes) -> Tensor:
        made = contribution(composition, lambda: iter([changes[0].clone()]), work_of(1), secret)
        return torch.cat(list(made.levels()))

    assert torch.equal(levels(SECRET), levels(SECRET))
    assert not torch.equal(levels(SECRET), levels(bytes(32)))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_of_another_length_is_refused(composition: Composition, length: int) -> None:
    with pytest.raises(ValueError, match="a secret of 32 random bytes"):
        contribution(composition, lambda: iter([gaussian(3000, 1)]), work_of(1), bytes(length))
