"""Bounds and steps that a coordinator chooses so that one sum shows what single clients have put into it.

Each test plays the coordinator: it has the sum and what it chose, and looks for the sample counts or the signs of
single clients. Next to each stands what the attack finds where a client cuts value by value, or rounds to the nearest.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.aggregation.secagg.house import Cohort, cohort, composed, gaussian, secure_plan, work_of
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, as_float32
from umbel.aggregation.secagg.numbers.composition import Composition

COUNTS = (131, 310, 474, 905, 1187)
UNIT = 128
N = 20_000
TINY = 2.0**-30


def alike(n: int) -> list[Tensor]:
    """The changes of five clients, which have something in common."""
    common = gaussian(n, 100)
    return [(0.5 * common + gaussian(n, seed)) * 1e-3 for seed in range(len(COUNTS))]


def n_clusters(values: Tensor, gap: float) -> int:
    """How many groups these are, with more than `gap` between one and the next."""
    return 1 + int((values.sort().values.diff() > gap).sum())


def sums_of(work: Cohort) -> Tensor:
    """What a coordinator makes of it: the sum of the changes, each times its weight."""
    totals = work.totals()
    return totals.mean.mean_slice(0, work.composition.layout.n_values) * totals.total_weight


def test_a_tiny_max_abs_makes_no_signs_of_an_update() -> None:
    """Cut to it value by value, each coordinate's sum would be one of the 32 sums of plus or minus the counts."""
    step = TINY * max(COUNTS) / UNIT / 5000
    composition = composed(
        secure_plan(5, UNIT), Layout((TensorSpec("w", (N,), "float32", 0),)), step=step, max_abs=TINY, clip_norm=1.0
    )
    changes = alike(N)
    signs = sum(count * change.sign() for count, change in zip(COUNTS, changes, strict=True))
    assert isinstance(signs, Tensor)
    assert n_clusters(signs, gap=8) == 32, "each tells the sign of every client's value"
    found = sums_of(cohort(composition, changes, [work_of(count) for count in COUNTS])) / TINY
    assert n_clusters(found[found.abs() < 200], gap=8) == 1
    wanted = sum(count * change / change.abs().max() for count, change in zip(COUNTS, changes, strict=True))
    assert isinstance(wanted, Tensor)
    assert torch.nn.functional.cosine_similarity(found.double(), wanted.double(), dim=0) > 0.999


def test_a_step_that_is_far_too_fine_makes_no_signs_of_an_update() -> None:
    """Cut value by value, each level's sum would be an odd number of times 32,766: its clients' votes."""
    composition = composed(secure_plan(5), Layout((TensorSpec("w", (N,), "float32", 0),)), step=1e-12)
    levels = cohort(composition, alike(N), [work_of(1)] * 5).plain_levels().to(torch.float64)
    votes = torch.round(levels / 32_766)
    assert float((levels - 32_766 * votes).abs().mean()) > 1000, "nothing stands at the bound"


BATCHES = (5, 10, 15, 29, 38)
NORMALIZED = Layout(
    (
        TensorSpec("bn.num_batches_tracked", (), "int64", 0),
        TensorSpec("bn.running_mean", (64,), "float32", 1),
        TensorSpec("w", (3000,), "float32", 65),
    )
)


def with_statistics(client: int) -> Tensor:
    change = gaussian(3065, client) * 1e-3
    change[0], change[1:65] = BATCHES[client], gaussian(64, 50 + client)
    return change


def exact_sum(step: float, counts: tuple[int, ...] = COUNTS) -> Tensor:
    """The exact values of the sum on a grid of this step, in steps."""
    grid = Grid.finest(max_abs=step * 2.0**24, total_weight_max=1 << 38)
    assert grid.step == step
    composition = Composition(
        CodecPlan(Codec.INTEGER, as_float32(400.0), 29, 1.0), secure_plan(5, UNIT), grid, 2000, NORMALIZED
    )
    changes = [with_statistics(client) for client in range(5)]
    work = cohort(composition, changes, [work_of(count) for count in counts])
    return composition.words.split(work.words())[2]


@pytest.mark.parametrize("step", [64.0, 1.0])
def test_exact_values_on_a_grid_that_is_far_too_coarse_are_no_sums_of_the_counts(step: float) -> None:
    """Rounded first and weighed then, the counter on the step of 64 would be 1,187: the largest client's samples."""
    subsets = {sum(count for place, count in enumerate(COUNTS) if bits >> place & 1) for bits in range(32)}
    counter, means = int(exact_sum(step)[0]), exact_sum(step)[1:]
    wanted = sum(count * batches for count, batches in zip(COUNTS, BATCHES, strict=True)) / step
    assert abs(counter - wanted) < 5
    assert counter not in subsets
    assert len({int(one) for one in means.tolist()} & (subsets | {-one for one in subsets})) < 16, "by chance"


def test_on_a_fine_grid_whole_numbers_are_summed_exactly() -> None:
    step = 2.0**-16
    assert int(exact_sum(step)[0]) * step == sum(
        count * batches for count, batches in zip(COUNTS, BATCHES, strict=True)
    )


def sizes_of(inverse_step: float, seed: int) -> int:
    """The size R of a sum whose clients are clipped: each is as long as it has samples."""
    composition = composed(secure_plan(5, UNIT), step=1 / inverse_step, clip_norm=1.0, sample_count_max=2000)
    changes = [gaussian(3000, 10 * seed + client) for client in range(5)]
    work = cohort(composition, changes, [work_of(count) for count in COUNTS], first_rank=5 * seed)
    return composition.words.split(work.words())[0].rms


@pytest.mark.parametrize("least", [200, 600, 1000])
def test_a_coarse_step_leaves_no_sizes_of_the_largest_clients_alone(least: int) -> None:
    """To the nearest, the size of each client with fewer samples than `least` would be 0, and of the others 1 or more:
    a coordinator that moves the step finds each count."""
    inverse_step = 0.5 / 2**24 / (least / UNIT / math.sqrt(3000))
    expected = sum(COUNTS) / least / 2
    found = [sizes_of(inverse_step, seed) for seed in range(60)]
    assert sum(found) / len(found) == pytest.approx(expected, abs=4 * 1.2 / math.sqrt(len(found)))
