"""From a round's mean to the next model, a piece at a time: `master + step`, with a step that the server's optimizer
makes of the mean.

Floats are added in float64 and rounded once to the master copy's dtype. The optimizer moves the *weights*: floats that
clients send, and that are no running statistics. What it remembers (its slots) lies in the master copy's file, a
float32 for each value that it moves, and beside it the number of steps so far.

Running statistics, integers and bools take their mean change; with the optimizer "sgd" it is multiplied by the rate,
too. Control variates (`algorithms/scaffold.py`) take theirs multiplied by a rate of their own. Integers take it rounded
to the nearest integer, at most 2^24, and stop at their dtype's limits. A bool takes the majority. Integers of the kind
count take the sum of all changes instead, exactly, without the rate. Tensors that clients do not send (the kind global)
stay as they are. Multiplication and addition are separate operations: a fused multiply-add would make the bits depend
on the processor.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from umbel.aggregation.algorithms.scaffold import control_rate
from umbel.aggregation.errors import ModelOverflow
from umbel.aggregation.model.layout import FLOATS, INTEGER_UNIT, PIECE_VALUES, SLOTS_PREFIX, Layout, TensorSpec
from umbel.aggregation.model.state import (
    EXACT_IN_FLOAT32,
    InMemory,
    Piece,
    Values,
    master_dtype,
    master_of,
    pieces,
    published,
    torch_dtype,
)
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.optimizers.layerwise import trust_of
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.optimizers.server_optimizer import LayerwiseRule, Moment, ServerOptimizer, Slots
from umbel.aggregation.optimizers.sgd import sgd
from umbel.aggregation.plans.training import TrainingTerms
from umbel.aggregation.stated_order import total
from umbel.aggregation.types import ROUNDS_MAX


@dataclass(frozen=True, slots=True)
class ServerStep:
    """The optimizer of the server, and its rate in this round.

    `factor`: by which the mean change of weights is multiplied first, where clients have divided theirs by their steps
    (`algorithms/fednova.py`), or multiplied them by what their loss weighs (`algorithms/qfedavg.py`).
    """

    optimizer: ServerOptimizer = field(default_factory=sgd)
    rate: float = 1.0
    factor: float = 1.0
    share: float = 1.0  # of all clients' samples, in the mean
    control_rate: float = 0.0  # of control variates

    @classmethod
    def of(
        cls,
        terms: tuple[AggregationSection, TrainingTerms],
        number: int,
        n_rounds: int,
        target: int,
        *,
        factor: float = 1.0,
        total_weight: int = 1,
    ) -> "ServerStep":
        """The step of round `number` of a run with this [aggregation], and of a round with this plan of training.

        `target`: of the round's plan. `total_weight`: of the clients in the mean.
        """
        return cls.at_rate(terms[0].rate(number, n_rounds, target), terms, factor, total_weight)

    @classmethod
    def at_rate(
        cls, rate: float, terms: tuple[AggregationSection, TrainingTerms], factor: float, total_weight: int
    ) -> "ServerStep":
        """The step with this rate of the server."""
        training = terms[1]
        share = training.share_of_all(total_weight)
        of_control = control_rate(share, training.control_scale) if training.has_control else 0.0
        return cls(optimizer_of(*terms), rate, factor, share, of_control)

    @property
    def remembers(self) -> bool:
        """Whether the next step depends on this one, so that there is a master copy of its own."""
        return bool(self.optimizer.first)


STEPS = SLOTS_PREFIX + "steps"  # the name of the number of steps so far: int64, no dimensions


def slot_name(slot: str, tensor: str) -> str:
    """The name, in a master copy's file, of what the optimizer remembers of a tensor."""
    return f"{SLOTS_PREFIX}{slot}/{tensor}"


def master_tensors(layout: Layout, optimizer: ServerOptimizer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each tensor of a master copy, with what the optimizer remembers."""
    model = {spec.name: (spec.shape, master_dtype(spec)) for spec in layout.owners()}
    slots = {name: (spec.shape, torch.float32) for name, spec, _ in _slots_of(layout, optimizer)}
    return {**model, **slots, **({STEPS: ((), torch.int64)} if optimizer.first else {})}


def empty_master(layout: Layout, optimizer: ServerOptimizer) -> dict[str, Tensor]:
    """A master copy of zeros, in memory."""
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in master_tensors(layout, optimizer).items()}


def write_first(layout: Layout, optimizer: ServerOptimizer, master: Values) -> None:
    """Write what the optimizer remembers before its first step. `master` holds zeros there."""
    for name, spec, first in _slots_of(layout, optimizer):
        if first != 0.0:
            for start in range(0, spec.n_values, PIECE_VALUES):
                n_values = min(PIECE_VALUES, spec.n_values - start)
                master.write(name, start, torch.full((n_values,), first, dtype=torch.float32))


def first_master_copy(layout: Layout, optimizer: ServerOptimizer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The master copy of a run's first model, in memory. `state`: the published model."""
    master = {**empty_master(layout, optimizer), **master_of(layout, state)}
    write_first(layout, optimizer, InMemory(master))
    return master


def _slots_of(layout: Layout, optimizer: ServerOptimizer) -> Iterator[tuple[str, TensorSpec, float]]:
    for spec in layout.owners():
        if spec.is_stepped:
            yield from ((slot_name(slot, spec.name), spec, first) for slot, first in optimizer.first.items())


class HasMean(Protocol):
    """The weighted mean of a round's updates, from which the next model is made."""

    def mean_slice(self, start: int, stop: int) -> Tensor:
        """Coordinates `start` to `stop` of the mean, in the update's layout: float64, a new tensor."""
        ...


def next_pieces(
    layout: Layout, start: Values, mean: HasMean, step: ServerStep, memory: Values | None = None
) -> Iterator[tuple[Piece, Tensor]]:
    """The next master copy, piece by piece. `layout`: of the model; `start`: the master copy that the round began with.

    `memory`: gets what the optimizer remembers, piece by piece, too; needed if it remembers anything. Raises
    `ModelOverflow` for a float that leaves its dtype's finite range, and `ValueError` for a number of steps that no run
    has.
    """
    places = {spec.name: spec.offset for spec in layout.update.owners()}
    stepping = _Stepping.begun(start, step, memory)
    for spec, its_pieces in groupby(pieces(layout), lambda one: one.spec):
        all_of_it = list(its_pieces)
        if not spec.is_sent:
            yield from ((piece, piece.of(start, master_dtype(spec))) for piece in all_of_it)
            continue
        changes = partial(_change, mean, places[spec.name])
        if spec.is_stepped:
            yield from stepping.moved(all_of_it, partial(_stretched, changes, step.factor))
            continue
        rate = step.control_rate if spec.kind == "control" else 1.0 if step.remembers else step.rate
        for piece in all_of_it:
            yield piece, _step(spec, piece.of(start, master_dtype(spec)), changes(piece), rate)


def write_next(
    layout: Layout, start: Values, mean: HasMean, step: ServerStep, public: Values, master: Values | None = None
) -> None:
    """Write the next version: to `public` what clients download, to `master` the master copy.

    `master` is None where the published file itself is the master copy. Raises as `next_pieces` does.
    """
    for piece, values in next_pieces(layout, start, mean, step, master):
        piece.put(public, published(piece.spec, values))
        if master is not None:
            piece.put(master, values)


def _change(mean: HasMean, offset: int, piece: Piece) -> Tensor:
    first = offset + piece.first
    return mean.mean_slice(first, first + piece.n_values)


def _stretched(changes: Callable[[Piece], Tensor], factor: float, piece: Piece) -> Tensor:
    change = changes(piece)
    return change if factor == 1.0 else change.mul_(factor)


@dataclass(frozen=True, slots=True)
class _Stepping:
    """One step of the optimizer over the tensors of a model. `memory`: of the next step."""

    start: Values
    step: ServerStep
    memory: Values | None
    at: Moment

    @classmethod
    def begun(cls, start: Values, step: ServerStep, memory: Values | None) -> "_Stepping":
        if not step.remembers:
            return cls(start, step, None, Moment(1, step.rate, step.share))
        assert memory is not None, "an optimizer that remembers needs a master copy"
        n = int(start.read(STEPS, torch.int64, 0, 1)) + 1
        if not 1 <= n <= ROUNDS_MAX:
            raise ValueError(f"the master copy says that {n - 1} steps were made, and a run has 0 to {ROUNDS_MAX}")
        memory.write(STEPS, 0, torch.tensor([n]))
        return cls(start, step, memory, Moment(n, step.rate, step.share))

    def moved(self, its_pieces: Sequence[Piece], changes: Callable[[Piece], Tensor]) -> Iterator[tuple[Piece, Tensor]]:
        """The next values of a tensor."""
        rule = self.step.optimizer.step
        trust = self._trust(rule, its_pieces, changes) if isinstance(rule, LayerwiseRule) else 1.0
        for piece in its_pieces:
            before, slots = piece.of(self.start, master_dtype(piece.spec)), self._slots(piece)
            change = changes(piece)
            moves = (
                rule.step(change, slots, self.at, trust)
                if isinstance(rule, LayerwiseRule)
                else rule(change, slots, self.at)
            )
            for slot, values in slots.items():
                assert self.memory is not None, "checked before"
                kept = _finite(piece.spec, values.to(torch.float32))
                self.memory.write(slot_name(slot, piece.spec.name), piece.first, kept)
            yield piece, _finite(piece.spec, moves.add_(before.to(torch.float64)).to(before.dtype))

    def _trust(self, rule: LayerwiseRule, its_pieces: Sequence[Piece], changes: Callable[[Piece], Tensor]) -> float:
        """The norms of the whole tensor: each piece by halves, and the pieces added up exactly and rounded once."""
        of_values, of_direction = list[float](), list[float]()
        for piece in its_pieces:
            values = piece.of(self.start, master_dtype(piece.spec)).to(torch.float64)
            direction = rule.direction(changes(piece), self._slots(piece), self.at)
            of_values.append(float(total(values * values)))
            of_direction.append(float(total(direction * direction)))
        return trust_of(math.sqrt(math.fsum(of_values)), math.sqrt(math.fsum(of_direction)), rule.ratio)

    def _slots(self, piece: Piece) -> Slots:
        return {
            slot: self.start.read(slot_name(slot, piece.spec.name), torch.float32, piece.first, piece.n_values).double()
            for slot in self.step.optimizer.first
        }


def _step(spec: TensorSpec, start: Tensor, change: Tensor, learning_rate: float) -> Tensor:
    """The next values of a piece. `start`: its values in the master copy, in its dtype; `change`: their mean change,
    float64, which is overwritten.
    """
    if spec.kind == "count":
        return _added(spec, start, change)
    if spec.dtype in FLOATS:
        return _finite(spec, start.to(torch.float64, copy=True).add_(change.mul_(learning_rate)).to(start.dtype))
    if spec.dtype == "bool":
        return start.to(torch.float64).add_(change.div_(INTEGER_UNIT)) >= 0.5
    most, limits = EXACT_IN_FLOAT32, torch.iinfo(torch_dtype(spec))
    before = start.to(torch.int64, copy=True)
    whole = change.div_(INTEGER_UNIT).clamp_(-most, most).round_().to(torch.int64)
    room_up = limits.max - before.clamp(min=limits.max - most)  # at most `most`, so that nothing here can wrap
    room_down = limits.min - before.clamp(max=limits.min + most)
    return before.add_(whole.clamp_(room_down, room_up)).to(torch_dtype(spec))


def _added(spec: TensorSpec, start: Tensor, change: Tensor) -> Tensor:
    """Integers plus the sum of their changes, exactly. Raises `ModelOverflow` beyond their dtype's range."""
    limits, before = torch.iinfo(torch_dtype(spec)), start.to(torch.int64)
    added = change.div_(INTEGER_UNIT).round_().to(torch.int64)
    up, down = added.clamp(min=0), added.clamp(max=0)
    if bool(((before > limits.max - up) | (before < limits.min - down)).any()):
        raise ModelOverflow(
            f"the counts in tensor {spec.name!r} would leave the range of {spec.dtype}; build the model with a wider "
            "integer dtype, such as int64"
        )
    return before.add_(added).to(torch_dtype(spec))


def _finite(spec: TensorSpec, values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ModelOverflow(
            f"tensor {spec.name!r} would leave the finite range of {str(values.dtype).removeprefix('torch.')}; "
            "the run has diverged: lower max_abs or a learning rate"
        )
    return values
