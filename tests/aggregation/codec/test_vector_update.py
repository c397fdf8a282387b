"""Updates of vector codecs: framed, read on the grid, summed exactly; refused when hostile; fed back what was left."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import CASES, gaussian, heavy
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.codec.vector_update import VectorUpdateCodec
from umbel.aggregation.codec.vectors.codec import CodecContext
from umbel.aggregation.codec.vectors.registry import CODECS
from umbel.aggregation.errors import NonFiniteUpdate, UpdateOutOfRange, UpdateRefused
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part

N_VALUES = 5 + 24 * 40 + 300
LAYOUT = Layout(
    (
        TensorSpec("count", (5,), "int64", 0),
        TensorSpec("hidden.weight", (24, 40), "float32", 5),
        TensorSpec("out.weight", (300,), "bfloat16", 965),
    )
)
GRID = Grid.finest(max_abs=64.0, total_weight_max=1000)
COUNTS = torch.tensor([1.0, 2.0, 0.0, -3.0, 2.0**24]) * 2.0**-16 / 8
EVERY = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())


def change_of(seed: int = 0, scale: float = 0.01) -> torch.Tensor:
    values = heavy(N_VALUES, seed) * scale
    values[:5] = COUNTS
    return values


def in_pieces(values: torch.Tensor, size: int = 111) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: iter(torch.split(values.clone(), size))


def plan_of(codec: Codec, **how: object) -> CodecPlan:
    return CodecPlan(codec, key=5, **how)  # type: ignore[arg-type]  # a test's own words


def read(plan: CodecPlan, update: bytes, rank: int = 0, size: int = 64) -> torch.Tensor:
    codec = codec_for(plan, GRID, LAYOUT)
    body = update[codec.header_bytes :]
    pieces = (body[first : first + size] for first in range(0, len(body), size))
    whole = torch.cat(list(codec.integers(update[: codec.header_bytes], pieces, rank)))
    return whole.to(torch.float64) * GRID.step


@EVERY
def test_an_update_is_read_as_its_codec_means_it_and_counters_exactly(codec: Codec) -> None:
    plan, change = plan_of(codec), change_of()
    made = codec_for(plan, GRID, LAYOUT)
    update = b"".join(made.encode(in_pieces(change), 3))
    assert len(update) in made.update_bytes
    found = read(plan, update, rank=3)
    assert torch.equal(found[:5], COUNTS.double())
    assert float(found[5:] @ change[5:].double()) > 0
    if codec in (Codec.PLANES, Codec.EDEN):
        assert float((found - change).norm()) < 0.2 * float(change.norm())


@EVERY
def test_the_sum_is_that_of_the_updates_in_any_order(codec: Codec) -> None:
    plan = plan_of(codec)
    made = codec_for(plan, GRID, LAYOUT)
    updates = [b"".join(made.encode(in_pieces(change_of(rank)), rank)) for rank in range(3)]
    sums = list[torch.Tensor]()
    for order in itertools.permutations(range(3)):
        total = made.new_sum()
        for rank in order:
            body = [updates[rank][made.header_bytes :]]
            total.add(made.integers(updates[rank][: made.header_bytes], body, rank), rank + 1)
        sums.append(made.mean(total, [Part(rank + 1, rank) for rank in range(3)]).mean_slice(0, N_VALUES))
    assert all(torch.equal(one, sums[0]) for one in sums)
    expected = sum(read(plan, update, rank) * (rank + 1) for rank, update in enumerate(updates)) / 6
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(sums[0], expected)


@EVERY
def test_bytes_that_were_changed_are_read_or_refused_and_nothing_else(codec: Codec) -> None:
    plan = plan_of(codec)
    made = codec_for(plan, GRID, LAYOUT)
    update = b"".join(made.encode(in_pieces(change_of()), 0))
    draw = torch.Generator().manual_seed(1)
    for _ in range(60):
        bad = bytearray(update)
        bad[int(torch.randint(len(update), (), generator=draw))] ^= int(torch.randint(1, 256, (), generator=draw))
        with suppress(UpdateRefused):
            assert float(read(plan, bytes(bad)).abs().max()) <= GRID.max_abs
    for bad_length in (update[:-1], update + b"\0", update[:70], update[:10], b""):
        with pytest.raises(UpdateRefused):
            read(plan, bad_length)


@EVERY
def test_what_cannot_stand_on_the_grid_is_refused_before_it_is_sent(codec: Codec) -> None:
    made = codec_for(plan_of(codec), GRID, LAYOUT)
    for bad, refusal in ((float("nan"), NonFiniteUpdate), (65.0, UpdateOutOfRange)):
        change = change_of()
        change[700] = bad
        with pytest.raises(refusal, match="value 700 of the update"):
            list(made.encode(in_pieces(change), 0))


def test_a_codec_that_overshoots_is_found_out_by_its_own_client() -> None:
    made = codec_for(plan_of(Codec.MASK, parameters={"every": 100}), GRID, LAYOUT)
    change = torch.ones(N_VALUES)
    change[:5] = 0
    with pytest.raises(UpdateOutOfRange, match="beyond the grid's max_abs"):
        list(made.encode(in_pieces(change), 0))


@EVERY
def test_a_longer_change_is_shortened(codec: Codec) -> None:
    change = change_of()
    norm = float(change[5:].norm())
    plain = b"".join(codec_for(plan_of(codec), GRID, LAYOUT).encode(in_pieces(change), 0))
    short = b"".join(codec_for(plan_of(codec, clip_norm=norm / 4), GRID, LAYOUT).encode(in_pieces(change), 0))
    ratio = float(read(plan_of(codec), short)[5:].norm() / read(plan_of(codec), plain)[5:].norm())
    assert ratio == pytest.approx(0.25, rel=0.01)
    assert torch.equal(read(plan_of(codec), short)[:5], COUNTS.double())


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(Codec.SIGN, feedback=True),
        plan_of(Codec.TOPK, feedback=True),
        plan_of(Codec.PLANES, feedback=True, parameters={"precision": "bfloat16"}),
        plan_of(Codec.MASK, feedback=True, parameters={"mode": "structured"}),
        plan_of(Codec.LOWRANK, feedback=True),
    ],
    ids=lambda plan: plan.codec.name.lower(),
)
def test_all_that_was_sent_and_what_is_left_add_up_to_all_changes(plan: CodecPlan) -> None:
    made = VectorUpdateCodec(plan, GRID, LAYOUT)
    left, sent, changes = None, torch.zeros(N_VALUES).double(), torch.zeros(N_VALUES).double()
    for version in range(6):
        change = change_of(version)
        fed = made.encode_fed(in_pieces(change), 2, version, left)
        left = fed.left
        sent += read(plan, b"".join(fed.pieces), rank=2)
        changes += change
    assert left is not None
    assert left.version == 5
    torch.testing.assert_close((sent + left.values)[5:], changes[5:], rtol=0, atol=1e-5)
    assert torch.equal(sent[:5], 6 * COUNTS.double())
    assert not left.values[:5].any()


def test_momentum_is_corrected_as_deep_gradient_compression_does() -> None:
    plan = plan_of(Codec.TOPK, feedback=True, momentum=0.9, parameters={"share": 0.01, "precision": "float32"})
    made, change = VectorUpdateCodec(plan, GRID, LAYOUT), change_of()
    first = made.encode_fed(in_pieces(change), 0, 0, None)
    second = made.encode_fed(in_pieces(torch.zeros(N_VALUES)), 0, 1, first.left)
    waiting = first.left.values != 0
    found = read(plan, b"".join(second.pieces))
    moved = (found != 0) & waiting
    assert int(moved.sum()) == round(0.01 * N_VALUES)
    torch.testing.assert_close(found[moved], 1.9 * change[moved].double(), rtol=1e-5, atol=1e-8)


@EVERY
def test_running_statistics_do_not_drown_the_weights(codec: Codec) -> None:
    """BatchNorm's move by orders of magnitude more than weights, and are float tensors as these are."""
    names = ("0.running_mean", "0.running_var", "1.weight")
    layout = Layout(tuple(TensorSpec(name, (30, 10), "float32", 300 * i) for i, name in enumerate(names)))
    change = torch.cat((gaussian(600) * 10, gaussian(300, 2) * 1e-3))
    made = codec_for(plan_of(codec, clip_norm=1.0), GRID, layout)
    update = b"".join(made.encode(in_pieces(change), 0))
    found = torch.cat(list(made.integers(update[:64], [update[64:]], 0))).double() * GRID.step
    torch.testing.assert_close(found[:600], change[:600].double(), rtol=0, atol=GRID.step)
    weights = change[600:].double()
    assert float(found[600:] @ weights) > 0.05 * float(weights.square().sum()), "the weights are there"
    assert float(found[600:].norm()) < 20 * float(change[600:].norm())


@pytest.mark.parametrize("codec", [Codec.EDEN, Codec.SIGN, Codec.TERNARY, Codec.LOWRANK])
def test_a_length_that_follows_from_the_plan_is_the_only_one(codec: Codec) -> None:
    made = codec_for(plan_of(codec), GRID, LAYOUT)
    assert len(made.update_bytes) == 1
    assert len(b"".join(made.encode(in_pieces(change_of()), 0))) == made.update_bytes[0]


@given(st.integers(0, 50))
def test_gradients_are_taken_to_what_can_be_sent(seed: int) -> None:
    for parameters, codec in (({"mode": "structured", "every": 7}, Codec.MASK), ({"rank": 3}, Codec.LOWRANK)):
        plan = plan_of(codec, parameters=parameters)
        made = VectorUpdateCodec(plan, GRID, LAYOUT)
        change = torch.zeros(N_VALUES)
        gradient = gaussian(24 * 40, seed).view(24, 40)
        within = made.within()
        change[5:965] = within["hidden.weight"](gradient).reshape(-1) * 0.01
        found = read(plan, b"".join(made.encode(in_pieces(change), 0)))
        torch.testing.assert_close(found, change.double(), rtol=1e-3, atol=1e-5)
        assert float(change.norm()) > 0


def test_other_codecs_leave_gradients_as_they_are() -> None:
    for codec in CODECS:
        if codec is not Codec.LOWRANK:
            assert VectorUpdateCodec(plan_of(codec), GRID, LAYOUT).within() == {}
    fed = plan_of(Codec.LOWRANK, feedback=True)
    assert VectorUpdateCodec(fed, GRID, LAYOUT).within() == {}, "what cannot be sent now is sent later"


def test_a_contraction_never_moves_away() -> None:
    for name, codec in CASES.items():
        values = heavy(3000)
        layout = Layout((TensorSpec("w", (30, 100), "float32", 0),))
        for rank in range(5):
            context = CodecContext(layout, 9, rank)
            found = torch.cat(list(codec.decode(codec.encode(values, context), context)))
            if codec.is_contraction:
                assert float((found - values).norm()) <= float(values.norm()) * (1 + 1e-6), name
