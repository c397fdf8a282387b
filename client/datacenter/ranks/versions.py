"""The versions that decide which bits a training computes, and which ranks differ from the others in such facts."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import umbel


@dataclass(frozen=True, slots=True)
class Difference:
    """A rank that differs from most others in one fact. `usual_rank`: the first that has what most have."""

    rank: int
    name: str
    value: str
    usual: str
    usual_rank: int
    n_usual: int


def versions() -> dict[str, str]:
    """Those of this rank."""
    return {"umbel": umbel.__version__, "Python": platform.python_version(), "torch": str(torch.__version__)}


def differences(facts: Sequence[Mapping[str, str]]) -> list[Difference]:
    """The ranks that differ from most others, in the order of the facts. `facts`: of each rank, by name.

    If two values are equally frequent, the lower ranks count as the usual ones.
    """
    found = list[Difference]()
    for name in facts[0]:
        values = [one.get(name, "unknown") for one in facts]
        usual = max(values, key=values.count)
        found += [
            Difference(rank, name, value, usual, values.index(usual), values.count(usual))
            for rank, value in enumerate(values)
            if value != usual
        ]
    return found
