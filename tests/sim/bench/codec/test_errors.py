"""What `umbel bench codec` measures, on few values: near theory, better than EDEN where it should be."""

import pytest
import torch

from umbel.aggregation.codec.vectors.eden import Eden
from umbel.sim.bench.codec.bench import (
    AT_ENTROPY,
    EDEN,
    FIXED_WIDTH,
    N_CLIENTS,
    PROMISED,
    entropy_coded,
    fixed_width_error,
    gaussian,
    gaussian_rows,
    mean_by,
    mean_by_integers,
    real_layout,
    real_updates,
    shannon,
    vector_codec,
)

VALUES = gaussian(1 << 18)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_errors_of_gaussian_values_are_those_of_theory(bits: int) -> None:
    assert fixed_width_error(VALUES, bits) == pytest.approx(FIXED_WIDTH[bits], rel=0.02)
    coded = entropy_coded(VALUES, bits)
    assert coded.error == pytest.approx(AT_ENTROPY[bits], rel=0.02)
    assert bits <= coded.bits <= 1.07 * bits
    assert vector_codec(Eden(bits), VALUES, "EDEN").error == pytest.approx(EDEN[bits], rel=0.02)


def test_theory_lies_between_the_bounds() -> None:
    for bits in AT_ENTROPY:
        assert shannon(bits) < AT_ENTROPY[bits] < FIXED_WIDTH[bits]
        assert 2.0 ** (-2 * bits) < EDEN[bits] < FIXED_WIDTH[bits]


@pytest.mark.slow
def test_beside_ours_stand_theory_shannons_bound_and_edens_published_error() -> None:
    rows = gaussian_rows(gaussian(1 << 16))  # of fewer, the entropy of 8 bits is taken for less than it is
    for against, n_rows in (("theory", 16), ("Shannon's bound", 8), ("published", 8)):
        assert sum(row.against == against for row in rows) == n_rows, against
    assert all(row.ours > row.theirs for row in rows if row.against == "Shannon's bound")


@pytest.mark.nightly
@pytest.mark.slow
def test_of_real_updates_the_integer_codec_loses_less_in_fewer_bits_than_eden() -> None:
    updates = real_updates()
    assert len(updates) == N_CLIENTS
    assert all(update.shape == (301_066,) and bool(update.isfinite().all()) for update in updates)
    directions = torch.stack([update / update.norm() for update in updates])
    assert float((directions @ directions.T).mean()) < 0.3, "clients differ"
    ours, eden = mean_by_integers(updates, 0.5), mean_by(Eden(3), updates, "EDEN")
    assert ours.bits < 0.75 * eden.bits
    assert ours.error < 0.75 * eden.error


@pytest.mark.slow
@pytest.mark.parametrize(("step", "bits"), [(0.12, 2.5), (0.21, 2.0)])
def test_the_mean_of_real_updates_is_as_good_as_promised_with_room(step: float, bits: float) -> None:
    found = mean_by_integers(real_updates(), step, real_layout())
    assert found.bits <= bits
    assert found.error <= PROMISED[bits][0] / 4


@pytest.mark.slow
def test_knowing_rows_and_columns_saves_a_quarter_of_the_bits_of_real_updates() -> None:
    known, flat = mean_by_integers(real_updates(), 0.5, real_layout()), mean_by_integers(real_updates(), 0.5)
    assert known.error == pytest.approx(flat.error, rel=0.05)
    assert known.bits < 0.76 * flat.bits
