"""Shakespeare's roles as sequences: after each character of a text, which one follows?

Used by `fedopt.toml`, `fedopt-rates.toml` and `sampling-shakespeare.toml`. UMBEL_DATA names the folder with
shakespeare_lines.tsv.gz; a missing file is fetched into it. Roles, training lines and test lines are those of
`data.name = "shakespeare"`, which has a sample with one target for each character. Here a text of 80 characters is one
sample with 80 targets, as in Reddi et al. 2021 (arXiv:2003.00295, section 4), so a target costs 80 times less.
"""

import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from umbel.sim.data.data_set import DataError, DataSet, SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.sets.arrays import of_other_targets
from umbel.sim.data.sets.fetch import SOURCES, have
from umbel.sim.data.sets.shakespeare import CHARACTERS, WINDOW, load_shakespeare

EMBEDDED = 8


def load() -> DataSet:
    """The roles of the file in the folder UMBEL_DATA. Raises `DataError` if that is not set."""
    folder = os.environ.get("UMBEL_DATA")
    if not folder:
        raise DataError("set UMBEL_DATA to the folder of shakespeare_lines.tsv.gz; a missing file is fetched into it")
    return in_sequences(load_shakespeare(have(SOURCES["shakespeare"], Path(folder))))


def in_sequences(data: DataSet) -> DataSet:
    """The same roles with inputs uint8 (n, 80) and targets int64 (n, 80): the character after each of the input.

    Texts do not overlap. The last characters of a role that do not fill a text are left out.
    """
    roles = data.natural
    assert roles is not None, "its clients are roles"
    groups = [*chain.from_iterable(map(repeat, roles.names, map(len, map(_firsts, roles.shards))))]
    train, test = (_texts(data.samples, parts) for parts in (roles.shards, roles.holdouts))
    return of_other_targets(*train, test=test, groups=np.array(groups), group_kind="role")


def _firsts(windows: Indices) -> Indices:
    """Every 80th of the overlapping windows of a role's text."""
    return windows[::WINDOW]


def _texts(samples: SampleSet, parts: Sequence[Indices]) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.concatenate([_firsts(windows) for windows in parts]))
    inputs = samples.inputs[rows]
    return inputs, torch.cat([inputs[:, 1:].long(), samples.targets[rows, None]], 1)


class CharacterLstm(nn.Module):
    """8 numbers for each character, recurrent layers, and after each character logits of the next."""

    def __init__(self, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), EMBEDDED)
        self.recurrent = nn.LSTM(EMBEDDED, width, num_layers=layers, batch_first=True)
        self.out = nn.Linear(width, len(CHARACTERS))

    def forward(self, texts: Tensor) -> Tensor:
        """(n, length) numbers of characters, of any whole type -> (n, length, characters) logits."""
        states, _ = self.recurrent(self.embedding(texts.long()))
        logits: Tensor = self.out(states)
        return logits
