"""What both ends of a secure round make its integers with: the plans, and what follows from them for a model.

Two vectors are masked. The *levels*: the weighted change of all coded tensors, rotated and rounded, modulo 2^bits. The
*words*: what must be added up exactly, modulo 2^64 (`words.py`): counts, metrics, and the values of tensors that no
codec may round (`codec/exact.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from umbel.aggregation.codec.exact import ExactPlaces
from umbel.aggregation.codec.modular import Modular
from umbel.aggregation.codec.rotated import Rotated
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.secagg.numbers.words import Words


@dataclass(frozen=True)
class Composition:
    """The numbers of one round and model. `grid`: of the exact values, with room for the sum of all weights.

    `sample_count_max`: what one client's samples count at most. Raises `ValueError` for plans whose words could wrap.
    """

    codec: CodecPlan
    secure: SecurePlan
    grid: Grid
    sample_count_max: int
    layout: Layout

    def __post_init__(self) -> None:
        if self.codec.codec is not Codec.INTEGER:
            raise ValueError(f"only integers are masked; {self.codec.codec.name.lower()} has none")
        one_client = 1 if self.secure.is_proportional else self.sample_count_max
        if self.grid.total_weight_max < self.secure.clients_max * one_client:
            raise ValueError("the weights of this cohort could exceed the grid's total_weight_max")
        _ = self.words  # refuses counts that could wrap

    @cached_property
    def modular(self) -> Modular:
        """The levels. The client has clipped before it weighs, so nothing is clipped on the way."""
        rotated = Rotated(CodecPlan(Codec.INTEGER, self.codec.inverse_step, self.codec.key), self.layout.n_values)
        return Modular(rotated, self.secure.bits)

    @cached_property
    def exact(self) -> ExactPlaces:
        return ExactPlaces(self.layout)

    @cached_property
    def words(self) -> Words:
        names = self.secure.metrics, self.secure.evaluation
        return Words(*names, self.exact.n_values, self.secure.clients_max, self.sample_count_max)

    @property
    def n_levels(self) -> int:
        """How many levels a client sends, in `secure.bits` each."""
        return self.modular.rotated.n_levels

    @property
    def n_words(self) -> int:
        """How many words, in eight bytes each."""
        return self.words.n_words
