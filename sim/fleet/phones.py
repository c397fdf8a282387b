"""How fast the lines of measured phones are: a JSON file of their means and deviations.

```json
{"e6899215-...": {"down_u": 7491.4, "down_sigma": 3369.3, "up_u": 4935.2, "up_sigma": 2767.3}, ...}
```

Kilobytes (1000 bytes) per second, mean and standard deviation of each phone's transfers both ways, as FLASH published
them (Yang et al. 2021, "Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone
Data"). A device is one of these phones; its rate in a round is log-normal with that mean and deviation, never negative.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from umbel.sim.fleet.reading import first_finding, read_bytes
from umbel.sim.fleet.traits import Trait

BYTES_MAX = 1 << 24
_RATE_MAX = 1e9
_KB = 1000.0
_Positive = Annotated[float, Field(gt=0, le=_RATE_MAX)]
_Deviation = Annotated[float, Field(ge=0, le=_RATE_MAX)]


class NotPhones(ValueError):
    """A file is not what a file of phones is; it says which file, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Phone:
    """Of one phone, in kB/s."""

    down_u: _Positive
    down_sigma: _Deviation
    up_u: _Positive
    up_sigma: _Deviation
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - what it says besides would be passed over


_PHONES = TypeAdapter(Annotated[dict[str, Phone], Field(min_length=1, max_length=100_000)])


def read_phones(path: Path) -> tuple[Phone, ...]:
    """The phones of a file, in its order. Raises `NotPhones`, and `OSError` if it cannot be read."""
    try:
        return tuple(_PHONES.validate_json(read_bytes(path, BYTES_MAX)).values())
    except ValidationError as error:
        raise NotPhones(f"{path} is not a file of phones: {first_finding(error)}") from error
    except ValueError as error:
        raise NotPhones(f"{path} is not a file of phones: {error}") from error


def phone_traits(phones: tuple[Phone, ...], seed: int) -> tuple[Trait, Trait]:
    """Bytes per second down and up."""
    down = _trait("down", seed, [(phone.down_u, phone.down_sigma) for phone in phones])
    return down, _trait("up", seed, [(phone.up_u, phone.up_sigma) for phone in phones])


def _trait(name: str, seed: int, moments: list[tuple[float, float]]) -> Trait:
    mean, deviation = np.array(moments).T * _KB
    variance = np.log1p((deviation / mean) ** 2)
    return Trait(name, seed, np.log(mean) - variance / 2, np.zeros(len(mean)), np.sqrt(variance), is_drawn=True)
