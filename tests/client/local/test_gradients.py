"""What a run does to gradients is the same for tensors and for arrays, and for steps whose gradients nobody sees."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.client import ArrayModel, LocalPlan

SHAPES = {"dense.w": (4, 3), "dense.b": (3,), "scale": ()}
DTYPES = st.sampled_from(["float32", "float64", "float16"])


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def asks(mu: float, clip_norm: float | None, has_codec: bool, rate: float = 0.5) -> LocalPlan:
    within = {"dense.w": halved} if has_codec else {}
    return LocalPlan(proximal_mu=mu, clip_norm=clip_norm, within=within, learning_rate=rate)


PLANS = st.builds(asks, st.sampled_from([0.0, 0.25]), st.sampled_from([None, 0.1, 100.0]), st.booleans())


def drawn(seed: int, dtype: str = "float64") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


@given(PLANS, st.integers(0, 99), DTYPES)
def test_gradients_of_arrays_are_adjusted_to_the_bits_of_a_models(plan: LocalPlan, seed: int, dtype: str) -> None:
    start, weights, gradients = drawn(seed, dtype), drawn(seed + 1, dtype), drawn(seed + 2, dtype)
    model = ArrayModel(start)
    plan = plan.bound_to(model)
    found = plan.adjust_arrays(gradients, weights)
    model.set_arrays(weights)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.from_numpy(np.array(gradients[name]))
    plan.adjust_gradients(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert found[name].dtype == dtype
        assert found[name].tobytes() == parameter.grad.numpy().tobytes()


@given(PLANS, st.integers(0, 99), st.sampled_from([1e-4, 0.5, 3.0]))
def test_a_step_of_gradient_descent_is_adjusted_as_its_gradients_are(plan: LocalPlan, seed: int, rate: float) -> None:
    start, before, gradients = drawn(seed), drawn(seed + 1), drawn(seed + 2)
    plan = asks(plan.proximal_mu, plan.clip_norm, bool(plan.within), rate).bound_to(ArrayModel(start))
    after = {name: before[name] - rate * gradients[name] for name in before}
    found = plan.adjust_step(before, after)
    for name, adjusted in plan.adjust_arrays(gradients, before).items():
        np.testing.assert_allclose(found[name], before[name] - rate * adjusted, rtol=1e-9, atol=1e-12)


def test_fedprox_adds_mu_times_the_way_from_the_global_weights() -> None:
    start, weights, gradients = drawn(1), drawn(2), drawn(3)
    found = asks(0.5, None, False).bound_to(ArrayModel(start)).adjust_arrays(gradients, weights)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], gradients[name] + 0.5 * (weights[name] - start[name]), rtol=1e-12)


def test_the_first_weights_are_the_global_ones_for_a_plan_that_no_loop_has_bound() -> None:
    plan, start = asks(0.5, None, False), drawn(1)
    moved = {name: one + 2 for name, one in start.items()}
    nothing = {name: np.zeros_like(one) for name, one in start.items()}
    assert all((one == 0).all() for one in plan.adjust_arrays(nothing, start).values())
    assert all(np.allclose(one, 1.0) for one in plan.adjust_arrays(nothing, moved).values())


def test_frozen_arrays_need_no_gradient_and_integers_pass_through_a_step() -> None:
    before = {"w": np.ones(2), "frozen": np.ones(2), "n": np.array([1, 2])}
    plan = asks(0.5, 1.0, False).bound_to(ArrayModel(before))
    assert list(plan.adjust_arrays({"w": np.ones(2)}, before)) == ["w"]
    after = plan.adjust_step(before, {"w": np.zeros(2), "n": np.array([3, 4])})
    assert (sorted(after), after["n"].tolist()) == (["n", "w"], [3, 4])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_keeps_the_dtypes_of_the_arrays_after_it_also_if_those_before_were_wider(dtype: str) -> None:
    plan = asks(0.5, 1.0, False).bound_to(ArrayModel(drawn(1)))
    found = plan.adjust_step(drawn(2), drawn(3, dtype))
    assert {one.dtype.name for one in found.values()} == {dtype}


def test_a_step_of_a_plan_that_asks_nothing_is_taken_to_the_bit_and_a_rate_of_zero_moves_nothing() -> None:
    before, after = drawn(1), drawn(2)
    assert all((one == after[name]).all() for name, one in LocalPlan().adjust_step(before, after).items())
    idle = LocalPlan(learning_rate=0.0, proximal_mu=0.5)
    assert all((one == before[name]).all() for name, one in idle.adjust_step(before, before).items())
    assert idle.ignored == ()


def test_weights_and_gradients_that_are_given_stay_as_they_are() -> None:
    weights, gradients = drawn(1), drawn(2)
    asks(0.5, 0.1, True).bound_to(ArrayModel(drawn(3))).adjust_arrays(gradients, weights)
    assert all((weights[name] == drawn(1)[name]).all() for name in SHAPES)
    assert all((gradients[name] == drawn(2)[name]).all() for name in SHAPES)


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"v": np.ones(2)}, "there is a gradient of array 'v', but the weights have no array of this name"),
    ({"w": np.ones(3)}, r"the gradient of array 'w' has the shape float64\[3\], and the array float64\[2\]"),
    ({"n": np.ones(2)}, r"the gradient of array 'n' .* only floating-point arrays have one"),
]


@pytest.mark.parametrize(("gradients", "sentence"), MISFITS)
def test_a_gradient_that_is_none_of_the_weights_is_refused(gradients: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LocalPlan().adjust_arrays(gradients, {"w": np.ones(2), "n": np.array([1, 2])})
