"""A mask that the cohort shares: what is trained, what is sent, and the error of a sketch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, gaussian, heavy, passed, payload_of, relative_error
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.codec import Sketching
from umbel.aggregation.codec.vectors.mask import RandomMask


@given(st.integers(0, 3000), st.integers(1, 50), st.integers(0, 99))
def test_what_was_trained_within_the_mask_comes_back_as_it_is(n_values: int, every: int, key: int) -> None:
    codec, context = RandomMask(every, Sketching.STRUCTURED), context_of(n_values, key)
    trained = torch.cat([mask.view(-1) for mask in codec.trained(context).values()])
    values = torch.where(trained, heavy(n_values), 0.0)
    assert torch.equal(passed(codec, values, context), values)
    assert torch.equal(passed(codec, heavy(n_values), context), values)  # of any other change, the part within


def test_masks_have_the_shapes_of_the_tensors() -> None:
    context = context_of(1000)
    masks = RandomMask(4).trained(context)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {"a.weight": (12, 41), "b.bias": (508,)}
    assert sum(int(mask.sum()) for mask in masks.values()) == 250


def test_a_cohort_shares_its_mask_and_a_round_has_its_own() -> None:
    codec = RandomMask(10)
    assert torch.equal(codec.chosen(context_of(5000, 1, 3)), codec.chosen(context_of(5000, 1, 4)))
    assert not torch.equal(codec.chosen(context_of(5000, 1)), codec.chosen(context_of(5000, 2)))


@pytest.mark.parametrize("every", [2, 10])
def test_the_error_of_a_sketch_is_that_of_theory(every: int) -> None:
    values = gaussian(1 << 18)
    error = relative_error(passed(RandomMask(every), values, context_of(1 << 18)), values)
    assert error == pytest.approx(every - 1, rel=0.02)


@pytest.mark.parametrize(("precision", "bits"), [(Precision.FLOAT32, 3.2), (Precision.BFLOAT16, 1.6)])
def test_a_tenth_of_the_coordinates_takes_a_tenth_of_the_bytes(precision: Precision, bits: float) -> None:
    payload = payload_of(RandomMask(10, precision=precision), gaussian(100_000), context_of(100_000))
    assert len(payload) * 8 / 100_000 == bits


def test_only_exact_values_are_linear_and_only_a_sketch_of_them_unbiased() -> None:
    assert RandomMask().is_linear
    assert RandomMask().is_unbiased
    assert not RandomMask(precision=Precision.BFLOAT16).is_linear
    assert not RandomMask(mode=Sketching.STRUCTURED).is_unbiased


@pytest.mark.parametrize("every", [0, (1 << 20) + 1])
def test_other_masks_are_refused(every: int) -> None:
    with pytest.raises(ValueError, match="every"):
        RandomMask(every)


def test_a_gradient_is_masked_where_it_is() -> None:
    """Torch's "meta" device takes no operand from the processor, as a GPU takes none."""
    context = context_of(1000)
    projections = RandomMask(4).projections(context)
    gradients = {name: torch.ones(mask.shape, device="meta") for name, mask in RandomMask(4).trained(context).items()}
    assert {projections[name](gradient).device.type for name, gradient in gradients.items()} == {"meta"}
