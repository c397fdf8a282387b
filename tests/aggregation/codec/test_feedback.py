"""Error feedback: nothing is lost for good; state of another version is dropped; deep gradient compression's laws."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy
from tests.suite.nights import at_night
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.feedback import Residual, send
from umbel.aggregation.codec.section import warm_up_share
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.codec.vectors.buckets import Sign, Ternary
from umbel.aggregation.codec.vectors.codec import VectorCodec
from umbel.aggregation.codec.vectors.sparse import TopK
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid

CONTEXT = context_of(500)
LOSSY: list[VectorCodec] = [Sign(), TopK(0.05), Ternary(2.5)]


@pytest.mark.parametrize("codec", LOSSY, ids=["sign", "topk", "ternary, clipped"])
def test_what_was_sent_and_what_is_left_are_all_changes(codec: VectorCodec) -> None:
    sent, changed, left = torch.zeros(500), torch.zeros(500), None
    for version in range(20):
        change = heavy(500, version)
        made = send(codec, change, context_of(500, version), version, left)
        sent, changed, left = sent + decoded(codec, made.pieces, context_of(500, version)), changed + change, made.left
        torch.testing.assert_close(sent + left.values, changed, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 10), st.integers(0, 20))
def test_state_of_any_but_the_version_before_is_dropped(version: int, later: int) -> None:
    before = send(Sign(), gaussian(500), CONTEXT, version, None).left
    after = send(Sign(), gaussian(500, 1), CONTEXT, version + later, before).left
    fresh = send(Sign(), gaussian(500, 1), CONTEXT, version + later, None).left
    assert after.version == version + later
    assert torch.equal(after.values, fresh.values) == (later != 1)


def test_state_of_a_model_of_another_size_is_dropped() -> None:
    before = Residual(4, gaussian(3))
    assert torch.equal(
        send(Sign(), gaussian(500), CONTEXT, 5, before).left.values,
        send(Sign(), gaussian(500), CONTEXT, 5, None).left.values,
    )


def test_nothing_given_is_changed() -> None:
    change, before = gaussian(500), Residual(0, gaussian(500, 1), gaussian(500, 2))
    copies = [change.clone(), before.values.clone()]
    send(TopK(0.1), change, CONTEXT, 1, before)
    send(TopK(0.1), change, CONTEXT, 1, before, 0.5)
    assert torch.equal(change, copies[0])
    assert torch.equal(before.values, copies[1])


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Sign(), *at_night(TopK(0.02))], ids=["sign", "topk"])
def test_a_biased_codec_reaches_the_optimum_with_feedback_and_not_without(codec: VectorCodec) -> None:
    """Gradient descent on |x - t|^2 / 2 with a decreasing step, sixteen coordinates larger than the rest."""
    target = gaussian(500)
    target[:16] *= 10

    def distance(keeps: bool) -> float:
        at, left = torch.zeros(500), None
        for version in range(1000):
            step = 0.05 if version < 500 else 0.01
            made = send(codec, (target - at) * step, CONTEXT, version, left)
            at, left = at + decoded(codec, made.pieces, CONTEXT), made.left if keeps else None
        return float((at - target).norm() / target.norm())

    assert distance(keeps=True) < 0.01
    assert distance(keeps=False) > 0.15


def test_what_is_not_finite_is_refused_before_it_spoils_the_state() -> None:
    with pytest.raises(ValueError, match="NaN"):
        send(Sign(), torch.full((500,), float("nan")), CONTEXT, 1, None)


@given(st.integers(0, 1 << 40), st.booleans())
def test_state_comes_back_from_its_tensors(version: int, has_velocity: bool) -> None:
    state = Residual(version, gaussian(9), gaussian(9, 1) if has_velocity else None)
    back = Residual.from_tensors(state.to_tensors())
    assert back.version == version
    assert torch.equal(back.values, state.values)
    assert (back.velocity is None) == (state.velocity is None)


GOOD = {"version": torch.tensor(3), "residual": gaussian(4), "velocity": gaussian(4)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": torch.tensor(-1)},
        {"version": torch.tensor([3])},
        {"version": torch.tensor(3.0)},
        {"residual": gaussian(4).double()},
        {"residual": gaussian(4).view(2, 2)},
        {"residual": torch.tensor([1.0, 2.0, 3.0, float("nan")])},
        {"velocity": gaussian(5)},
        {"other": gaussian(4)},
    ],
)
def test_other_tensors_are_no_state(wrong: dict[str, torch.Tensor]) -> None:
    assert Residual.from_tensors(GOOD).version == 3
    with pytest.raises(ValueError, match="not a state of error feedback"):
        Residual.from_tensors({**GOOD, **wrong})


def test_the_version_alone_is_no_state() -> None:
    with pytest.raises(ValueError, match="not a state"):
        Residual.from_tensors({"version": torch.tensor(3)})


@given(st.floats(0, 0.95), st.integers(0, 50))
@settings(max_examples=30)
def test_momentum_is_corrected_as_the_paper_says(momentum: float, seed: int) -> None:
    """Against the plain recursion, coordinate by coordinate."""
    codec, left = TopK(0.1, Precision.FLOAT32), None
    u, v = torch.zeros(500), torch.zeros(500)
    for version in range(5):
        change = heavy(500, seed + version)
        u = momentum * u + change
        v = v + u
        made = send(codec, change, CONTEXT, version, left, momentum)
        found, left = decoded(codec, made.pieces, CONTEXT), made.left
        is_sent = found != 0
        assert int(is_sent.sum()) == 50
        torch.testing.assert_close(found[is_sent], v[is_sent])
        u, v = torch.where(is_sent, 0.0, u), torch.where(is_sent, 0.0, v)
        assert left.velocity is not None
        torch.testing.assert_close(left.velocity, u)
        torch.testing.assert_close(left.values, v)


def test_without_momentum_it_is_error_feedback() -> None:
    before = Residual(0, gaussian(500, 1))
    plain = send(TopK(0.1), gaussian(500), CONTEXT, 1, before)
    corrected = send(TopK(0.1), gaussian(500), CONTEXT, 1, before, 0.0)
    assert plain.pieces == corrected.pieces
    assert torch.equal(plain.left.values, corrected.left.values)


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_changes_are_clipped(momentum: float | None) -> None:
    plan = CodecPlan(Codec.TOPK, clip_norm=2.0, feedback=True, momentum=momentum)
    grid = Grid.finest(max_abs=64.0, total_weight_max=1 << 20)
    codec = VectorUpdateCodec(plan, grid, CONTEXT.layout)
    for change, norm in ((gaussian(500), 2.0), (gaussian(500) * 1e-3, float(gaussian(500).norm()) * 1e-3)):
        fed = codec.encode_fed(partial(iter, [change]), 0, 1, None)
        sent = torch.cat([*codec.integers(fed.pieces[0], fed.pieces[1:], 0)]) * grid.step
        assert float((sent + fed.left.values).norm()) == pytest.approx(norm, rel=1e-5)


def test_the_share_warms_up() -> None:
    sparsity = [round(100 * (1 - warm_up_share(n)), 4) for n in range(7)]
    assert sparsity == [75.0, 93.75, 98.4375, 99.6, 99.9, 99.9, 99.9]
    assert [warm_up_share(n, rounds_a_stage=2) for n in range(4)] == [0.25, 0.25, 0.0625, 0.0625]
