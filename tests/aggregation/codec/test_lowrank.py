"""Low rank: what was made within the span comes back, what was not is projected or sketched with the known error."""

import pytest
import torch

from tests.aggregation.codec.cases import gaussian, passed, payload_of, relative_error
from umbel.aggregation.codec.codec import Context, Mode
from umbel.aggregation.codec.lowrank import LowRank
from umbel.aggregation.layout import Layout

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
CONTEXT = Context(LAYOUT, 11)
SPECS = {spec.name: spec for spec in LAYOUT.tensors}


def factor_of(codec: LowRank, name: str, context: Context = CONTEXT) -> torch.Tensor:
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


def test_columns_of_the_factor_are_orthogonal_and_of_one_length() -> None:
    factor = factor_of(LowRank(6), "linear")
    torch.testing.assert_close(factor.T @ factor, torch.eye(6) * 128 / 6, rtol=0, atol=1e-3)


def test_a_cohort_shares_its_factors_and_tensors_and_rounds_have_their_own() -> None:
    codec, factor = LowRank(4), factor_of(LowRank(4), "linear")
    assert torch.equal(factor, factor_of(codec, "linear", Context(LAYOUT, 11, 5)))
    assert not torch.equal(factor, factor_of(codec, "linear", Context(LAYOUT, 12)))
    assert not torch.equal(factor[:32], factor_of(codec, "conv"))


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
    span = torch.linalg.qr(factor_of(codec, "linear")).Q
    torch.testing.assert_close(found, span @ span.T @ values[spec.place].view(128, 50), rtol=1e-4, atol=1e-4)
    assert relative_error(found.reshape(-1), values[spec.place]) == pytest.approx(1 - 8 / 128, rel=0.02)


def test_the_error_of_a_sketch_is_that_of_theory() -> None:
    spec, codec = SPECS["linear"], LowRank(8, Mode.SKETCHED)
    values = torch.zeros(LAYOUT.n_values)
    values[spec.place] = gaussian(spec.n_values)
    errors = [relative_error(passed(codec, values, Context(LAYOUT, key)), values) for key in range(50)]
    assert sum(errors) / 50 == pytest.approx(128 / 8 - 1, rel=0.05)


@pytest.mark.parametrize("rank", [0, (1 << 12) + 1])
def test_other_ranks_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        LowRank(rank)
