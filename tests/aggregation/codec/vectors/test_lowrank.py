"""Low rank: what was made within the span comes back, what was not is projected or sketched with the known error."""

import numpy as np
import pytest
import torch

from tests.aggregation.codec.cases import gaussian, passed, payload_of, relative_error
from umbel.aggregation.codec.vectors.codec import CodecContext, Sketching
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.model.layout import Layout

LAYOUT = Layout.of_state(
    {
        "conv": torch.zeros(32, 8, 3, 3),
        "few rows": torch.zeros(4, 100),
        "linear": torch.zeros(128, 50),
        "no columns": torch.zeros(64, 0),
        "no rows": torch.zeros(0, 64),
        "scalar": torch.zeros(()),
        "vector": torch.zeros(300),
    }
)
CONTEXT = CodecContext(LAYOUT, 11)
SPECS = {spec.name: spec for spec in LAYOUT.tensors}


def factor_of(codec: LowRank, name: str, context: CodecContext = CONTEXT) -> torch.Tensor:
    factor = codec.factor(SPECS[name], context)
    assert factor is not None
    return factor


def test_vectors_and_small_matrices_are_sent_whole() -> None:
    codec, values = LowRank(4), gaussian(LAYOUT.n_values)
    assert {name for name, spec in SPECS.items() if codec.factor(spec, CONTEXT) is not None} == {"conv", "linear"}
    found = passed(codec, values, CONTEXT)
    for name in ("few rows", "scalar", "vector"):
        assert torch.equal(found[SPECS[name].place], values[SPECS[name].place])
    assert len(payload_of(codec, values, CONTEXT)) == 4 * (4 * 72 + 400 + 4 * 50 + 1 + 300)


def test_the_factor_is_odd_multiples_of_a_unit_even_about_zero() -> None:
    """What float32 holds exactly: so that no library rounds it."""
    units = factor_of(LowRank(6), "conv").double() * 2**24
    assert torch.equal(units, units.round())
    assert (units % 2 == 1).all()
    assert float(units.abs().max()) < 2**24
    for key in range(100):
        drawn = factor_of(LowRank(100), "linear", CodecContext(LAYOUT, key))
        assert abs(float(drawn.mean())) < 5 * 3**-0.5 / 12_800**0.5
        assert float(drawn.square().mean()) == pytest.approx(1 / 3, abs=5 * 0.3 / 12_800**0.5)


def test_a_cohort_shares_its_factors_and_tensors_and_rounds_have_their_own() -> None:
    codec, factor = LowRank(4), factor_of(LowRank(4), "linear")
    assert torch.equal(factor, factor_of(codec, "linear", CodecContext(LAYOUT, 11, 5)))
    assert not torch.equal(factor, factor_of(codec, "linear", CodecContext(LAYOUT, 12)))
    assert not torch.equal(factor[:32], factor_of(codec, "conv"))


@pytest.mark.parametrize("mode", Sketching)
@pytest.mark.parametrize("rank", [1, 4, 31])
def test_the_product_is_the_sum_of_its_columns_in_their_order(mode: Sketching, rank: int) -> None:
    """By hand, from what was sent: each product rounded to float32, and then each sum."""
    codec, spec, values = LowRank(rank, mode), SPECS["conv"], gaussian(LAYOUT.n_values)
    sent = torch.frombuffer(bytearray(payload_of(codec, values, CONTEXT)), dtype=torch.float32)[: rank * 72]
    factor, expected = factor_of(codec, "conv").numpy(), np.zeros((32, 72), np.float32)
    for row, column in np.ndindex(32, 72):
        products = [np.float32(factor[row, i] * sent[72 * i + column].numpy()) for i in range(rank)]
        for product in products:
            expected[row, column] = np.float32(expected[row, column] + product)
    assert np.array_equal(passed(codec, values, CONTEXT)[spec.place].view(32, 72).numpy(), expected)


def test_a_change_within_the_span_comes_back() -> None:
    codec, values = LowRank(4), gaussian(LAYOUT.n_values)
    for name in ("conv", "linear"):
        spec = SPECS[name]
        trained = gaussian(spec.n_values // spec.shape[0] * 4, 3).view(4, -1)
        values[spec.place] = (factor_of(codec, name) @ trained).view(-1)
    torch.testing.assert_close(passed(codec, values, CONTEXT), values, rtol=1e-4, atol=1e-5)


def test_of_any_other_change_the_projection_comes_back() -> None:
    spec, codec = SPECS["linear"], LowRank(8)
    values = torch.zeros(LAYOUT.n_values)
    values[spec.place] = gaussian(spec.n_values)
    found = passed(codec, values, CONTEXT)[spec.place].view(128, 50)
    factor = factor_of(codec, "linear").double()
    projected = factor @ torch.linalg.lstsq(factor, values[spec.place].view(128, 50).double()).solution
    torch.testing.assert_close(found.double(), projected, rtol=1e-4, atol=1e-4)
    assert relative_error(found.reshape(-1), values[spec.place]) == pytest.approx(1 - 8 / 128, rel=0.02)


def test_the_error_of_a_sketch_is_that_of_theory() -> None:
    spec, codec = SPECS["linear"], LowRank(8, Sketching.SKETCHED)
    values = torch.zeros(LAYOUT.n_values)
    values[spec.place] = gaussian(spec.n_values)
    errors = [relative_error(passed(codec, values, CodecContext(LAYOUT, key)), values) for key in range(50)]
    assert sum(errors) / 50 == pytest.approx(128 / 8 - 1, rel=0.05)


@pytest.mark.parametrize("rank", [1, 12, 31])
def test_the_error_of_a_projection_is_that_of_theory_for_each_change(rank: int) -> None:
    """A change of one row, and so of one direction, over many keys: the span prefers none."""
    layout, n_keys = Layout.of_state({"matrix": torch.zeros(32, 4)}), 400
    values = torch.zeros(layout.n_values)
    values.view(32, 4)[5] = gaussian(4)
    codec = LowRank(rank)
    errors = [relative_error(passed(codec, values, CodecContext(layout, key)), values) for key in range(n_keys)]
    deviation = torch.tensor(errors, dtype=torch.float64).std() / n_keys**0.5
    assert abs(sum(errors) / n_keys - (1 - rank / 32)) < 5 * float(deviation)


@pytest.mark.parametrize("rank", [0, (1 << 12) + 1])
def test_other_ranks_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        LowRank(rank)
