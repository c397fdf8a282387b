"""A model's weight change and its next version as whole state dicts, made of the functions that production calls in
pieces."""

import torch
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean, ServerStep, next_pieces
from umbel.aggregation.model.state import InMemory, State, empty_state, master_dtype, published, weight_change


def state_change(layout: Layout, local: State, start: State) -> Tensor:
    """The weight change `local - start` as one float32 vector of `layout.n_values`, on the CPU."""
    change = torch.empty(layout.n_values, dtype=torch.float32)
    for spec in layout.owners():
        after, before = local[spec.name].detach().cpu(), start[spec.name].detach().cpu()
        change[spec.place] = weight_change(spec, after, before).reshape(-1)
    return change


def next_master(layout: Layout, master: State, mean: HasMean, learning_rate: float = 1.0) -> dict[str, Tensor]:
    """The next master copy: a new tensor for each owner."""
    made = empty_state(layout, master_dtype)
    for piece, values in next_pieces(layout, InMemory(master), mean, ServerStep(rate=learning_rate)):
        piece.put(InMemory(made), values)
    return made


def published_state(layout: Layout, master: State) -> dict[str, Tensor]:
    """What clients download of a master copy: owners only, in the model's own dtypes."""
    return {spec.name: published(spec, master[spec.name]) for spec in layout.owners()}
