"""How many samples each client gets, and dealing that many to it whatever they are: IID data, quantity skew.

Every client gets the least that is asked for; the samples beyond that are shared out

    equal         in equal parts
    log-normal    as exp(sigma * z_k), z_k ~ N(0, 1)
    power-law     as x_k, P(x_k > x) = x^-exponent for x >= 1: the smaller the exponent, the heavier the tail
    dirichlet     by a multinomial draw with shares ~ Dir(alpha): Li, Diao, Chen and He 2021, "Federated Learning on
                  Non-IID Data Silos: An Experimental Study" (arXiv:2102.02079), quantity skew
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from umbel.aggregation.types import require_within
from umbel.sim.data.partition.partition import Indices, shards_of

Floats: TypeAlias = npt.NDArray[np.float64]
Law: TypeAlias = Literal["equal", "log-normal", "power-law", "dirichlet"]

SIGMA_MAX = 10.0
EXPONENT_MIN, EXPONENT_MAX = 0.1, 100.0
ALPHA_MIN, ALPHA_MAX = 1e-6, 1e9
_OPTIONS: Mapping[Law, tuple[str, float, float]] = {
    "log-normal": ("sigma", 0.0, SIGMA_MAX),
    "power-law": ("exponent", EXPONENT_MIN, EXPONENT_MAX),
    "dirichlet": ("alpha", ALPHA_MIN, ALPHA_MAX),
}


@dataclass(frozen=True, slots=True)
class SizesSection:
    """How unequal clients are in size: a `law`, and the one number that belongs to it.

    `sigma`: of log-normal, 0 is equal; `exponent`: of the power law's tail, smaller is more unequal; `alpha`: of
    dirichlet, smaller is more unequal.
    """

    law: Law = "equal"
    sigma: float | None = None
    exponent: float | None = None
    alpha: float | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        for law, (name, least, most) in _OPTIONS.items():
            value = getattr(self, name)
            if law == self.law and value is None:
                raise ValueError(f'sizes with law = "{law}" need {name}; set it beside the law')
            if law != self.law and value is not None:
                raise ValueError(f'{name} is of sizes with law = "{law}", not of law = "{self.law}"; leave it out')
            if value is not None:
                require_within(value, name, least, most)


def require_enough(n_samples: int, n_clients: int, least: int) -> None:
    """Raise `ValueError` if there are too few samples for `least` each."""
    if n_samples < n_clients * least:
        raise ValueError(
            f"{n_samples} samples are too few for {n_clients} clients with at least {least} each; "
            "take fewer clients, or ask for fewer samples of each"
        )


def drawn_sizes(n_samples: int, n_clients: int, least: int, law: SizesSection, rng: np.random.Generator) -> Indices:
    """Sizes of the clients, in no order unless they are equal; they sum to `n_samples`.

    Raises `ValueError` if there are too few samples for `least` each.
    """
    require_enough(n_samples, n_clients, least)
    n_free = n_samples - n_clients * least
    if law.sigma is not None:
        free = _apportioned(n_free, np.exp(law.sigma * rng.standard_normal(n_clients)))
    elif law.exponent is not None:
        free = _apportioned(n_free, (1 - rng.random(n_clients)) ** (-1 / law.exponent))
    elif law.alpha is not None:
        free = rng.multinomial(n_free, dirichlet(np.full(n_clients, law.alpha), rng)).astype(np.int64)
    else:
        free = _apportioned(n_free, np.ones(n_clients))
    return least + free


def iid_partition(sizes: Indices, rng: np.random.Generator) -> tuple[Indices, ...]:
    """All of the sum of `sizes` samples, so many to each client, drawn evenly."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return shards_of(rng.permutation(owners), len(sizes))


def dirichlet(concentration: Floats, rng: np.random.Generator) -> Floats:
    """A draw that survives tiny concentrations, where every gamma variate may underflow to zero."""
    draw = rng.dirichlet(concentration)
    if 0 < draw.sum() < np.inf:
        return draw
    one_hot = np.zeros(len(concentration))
    one_hot[rng.choice(len(concentration), p=concentration / concentration.sum())] = 1.0
    return one_hot


def _apportioned(n_samples: int, parts: Floats) -> Indices:
    """`n_samples` shared out in the ratio of `parts`, by largest remainder, the first of equal ones first."""
    exact = n_samples * (parts / parts.sum())
    sizes: Indices = np.floor(exact).astype(np.int64)
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: n_samples - int(sizes.sum())]] += 1
    return sizes
