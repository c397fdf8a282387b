"""What is trained to compare losses: a transformer that does not look ahead, and data in the form that it needs."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.suite.nights import at_night
from umbel.sim.bench.collective.losses import FASHION, PLAYS, LossWorkload, losses_of
from umbel.sim.bench.collective.models import Transformer, model_of
from umbel.sim.data.data_set import DataSet, SampleSet
from umbel.sim.data.load import DataSection

TEXTS = torch.arange(60, dtype=torch.uint8).reshape(6, 10)


def test_each_place_of_a_text_is_to_say_the_character_that_follows() -> None:
    some = SampleSet(TEXTS, torch.zeros(6, dtype=torch.int64))
    samples = PLAYS.samples_of(DataSet("texts", some, np.array([1, 4]), some, 60))
    assert samples.inputs.tolist() == [[*range(10, 19)], [*range(40, 49)]]
    assert samples.targets.tolist() == [[*range(11, 20)], [*range(41, 50)]]
    assert samples.inputs.dtype == samples.targets.dtype == torch.int64


def test_a_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(1)
    model, texts = Transformer(60, 32), TEXTS.long()
    other = texts.clone()
    other[:, 6:] = 5
    found, changed = model(texts), model(other)
    assert found.shape == (6, 10, 60)
    assert torch.allclose(found[:, :6], changed[:, :6], atol=1e-6)
    assert not torch.allclose(found[:, 6:], changed[:, 6:], atol=1e-2)


@pytest.mark.parametrize(("training", "n_values"), [(FASHION, 269_322), (PLAYS, 433_744)])
def test_a_model_follows_from_the_seed_and_has_the_size_that_the_report_says(
    training: LossWorkload, n_values: int
) -> None:
    one, same, other = (
        torch.cat([p.detach().reshape(-1) for p in model_of(replace(training.job, seed=seed)).parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert len(one) == n_values


def digits(data: DataSet) -> SampleSet:
    return SampleSet(data.samples.inputs.flatten(1), data.samples.targets)


def pixels(data: DataSet) -> SampleSet:
    """Digits as texts of 64 characters, their grey levels."""
    levels = (16 * data.samples.inputs.flatten(1)[:200]).long()
    return SampleSet(levels[:, :-1], levels[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "widths", "samples_of", "guessing"),
    [(FASHION, (64, 32, 10), digits, math.log(10)), *at_night((PLAYS, (80, 32), pixels, math.log(80)))],
)
def test_every_contender_learns(
    training: LossWorkload, widths: tuple[int, ...], samples_of: Callable[[DataSet], SampleSet], guessing: float
) -> None:
    """On data that need no file. `guessing`: the loss of a model that knows nothing."""
    job = replace(training.job, widths=widths, blocks=2)
    found = losses_of(replace(training, job=job, data=DataSection("digits"), samples_of=samples_of), None, (1,))
    assert [method.name for method in found] == list(job.methods)
    for method, losses in found.items():
        assert len(losses) == 1
        assert losses[0] < guessing - 0.3, method.title
