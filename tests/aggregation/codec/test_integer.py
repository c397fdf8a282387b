"""The integer codec: what a client writes is read, the mean is right and exact, and strangers' bytes are refused."""

import math
import struct
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.federations.whole_states import next_master, state_change
from umbel.aggregation.codec.entropy.entropy import SEGMENT
from umbel.aggregation.codec.integer import IntegerCodec, in_segments
from umbel.aggregation.codec.step import first_plan, next_plan
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.errors import (
    LyingLength,
    MalformedUpdate,
    NonFiniteUpdate,
    UpdateOutOfRange,
    UpdateRefused,
    WrongCodec,
    WrongLayout,
)
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import master_of
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part, as_float32

LAYOUT = Layout.of_state({"a": torch.zeros(300), "b": torch.zeros(40, 4)})
GRID = Grid.finest(max_abs=64.0, total_weight_max=1 << 20)
PLAN = CodecPlan(Codec.INTEGER, 8.0, key=77)
CODEC = IntegerCodec(PLAN, GRID, LAYOUT)


def gaussian(seed: int, scale: float = 0.25, n_values: int = LAYOUT.n_values) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed)) * scale


def written(values: Tensor, rank: int = 0, codec: IntegerCodec = CODEC, n_piece: int = 100) -> bytes:
    return b"".join(codec.encode(lambda: iter(torch.split(values, n_piece)), rank))


def read(update: bytes, rank: int = 0, codec: IntegerCodec = CODEC, n_piece: int = 1 << 20) -> Tensor:
    rest = update[codec.header_bytes :]
    pieces = (rest[first : first + n_piece] for first in range(0, len(rest), n_piece))
    return torch.cat([part.to(torch.int64) for part in codec.integers(update[: codec.header_bytes], pieces, rank)])


def mean_of(updates: Sequence[tuple[bytes, Part]], codec: IntegerCodec = CODEC) -> Tensor:
    total = codec.new_sum()
    for update, part in updates:
        total.add([read(update, part.rank, codec)], part.weight)
    return codec.mean(total, [part for _, part in updates]).mean_slice(0, total.n_sums - 1)


@given(st.integers(0, 1000), st.integers(0, 70_000), st.integers(1, 200), st.integers(1, 500))
def test_what_is_read_is_off_by_half_a_step_at_most(seed: int, rank: int, n_written: int, n_read: int) -> None:
    values = gaussian(seed, scale=3.0)
    update = written(values, rank, n_piece=n_written)
    assert len(update) in CODEC.update_bytes
    levels = read(update, rank, n_piece=n_read)
    assert float((levels[:-1] / 8 - values).abs().max()) <= 1 / 8
    assert float((mean_of([(update, Part(5, rank))]) - values).abs().max()) <= 0.5001 / 8


@given(st.lists(st.integers(1, 1 << 12), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_the_mean_is_near_and_the_same_bits_in_any_order(weights: list[int], random: Random) -> None:
    parts = [Part(weight, rank) for rank, weight in enumerate(weights)]
    updates = [(written(gaussian(part.rank), part.rank), part) for part in parts]
    expected = sum(gaussian(part.rank).double() * part.weight for part in parts) / sum(weights)
    found = mean_of(updates)
    assert float((found - expected).abs().max()) <= 0.5001 / 8
    random.shuffle(updates)
    assert torch.equal(mean_of(updates), found)


def test_a_slice_of_the_mean_is_a_slice_of_the_whole() -> None:
    total = CODEC.new_sum()
    total.add([read(written(gaussian(1)))], 3)
    mean = CODEC.mean(total, [Part(3, 0)])
    whole = mean.mean_slice(0, LAYOUT.n_values)
    for start, stop in ((0, 1), (127, 129), (130, 131), (200, 460), (460, 460)):
        assert torch.equal(mean.mean_slice(start, stop), whole[start:stop])


def test_the_sum_measures_the_updates_root_mean_square() -> None:
    total, rms = CODEC.new_sum(), []
    for rank, weight in enumerate((1, 3)):
        values = gaussian(rank, scale=0.2 + rank)
        rms += [float(values.square().mean().sqrt())] * weight
        total.add([read(written(values, rank), rank)], weight)
    assert CODEC.update_rms(total) == pytest.approx(sum(rms) / 4, rel=0.01)


def test_a_mean_of_other_parts_than_those_in_the_sum_is_refused() -> None:
    total = CODEC.new_sum()
    total.add([read(written(gaussian(1)))], 3)
    with pytest.raises(ValueError, match="these clients have the weight 4 in all, but the sum has the weight 3"):
        CODEC.mean(total, [Part(4, 0)])
    with pytest.raises(ValueError, match="no update was added"):
        CODEC.mean(CODEC.new_sum(), []).mean_slice(0, 1)


def test_an_update_is_shortened_to_the_clip_norm() -> None:
    codec = IntegerCodec(CodecPlan(Codec.INTEGER, 64.0, 7, clip_norm=2.0), GRID, LAYOUT)
    values = gaussian(1, scale=1.0)
    found = mean_of([(written(values, codec=codec), Part(1, 0))], codec)
    assert float((found - values * 2.0 / values.norm()).abs().max()) <= 0.5001 / 64
    total = codec.new_sum()
    total.add([read(written(values, codec=codec), codec=codec)], 1)
    assert codec.update_rms(total) == pytest.approx(2.0 / math.sqrt(LAYOUT.n_values), rel=0.01)


def test_a_value_beyond_every_level_is_cut_and_the_update_is_taken() -> None:
    codec = IntegerCodec(CodecPlan(Codec.INTEGER, 2.0**12, 7), GRID, LAYOUT)
    values = gaussian(1, scale=0.01)
    values[5] = 60.0
    found = mean_of([(written(values, codec=codec), Part(1, 0))], codec)
    assert found[5] == pytest.approx(32_765 / 2**12, abs=2.0**-12)


@pytest.mark.parametrize("n_values", [0, 1, 127, SEGMENT, SEGMENT + 1])
def test_models_of_any_size(n_values: int) -> None:
    codec = IntegerCodec(PLAN, GRID, Layout.of_state({"a": torch.zeros(n_values)}))
    values = gaussian(3, n_values=n_values)
    levels = read(written(values, codec=codec, n_piece=10_000), codec=codec)
    assert levels.numel() == n_values + 1
    assert torch.all((levels[:-1] / 8 - values).abs() <= 1 / 8)


@pytest.mark.parametrize(
    ("bad", "refusal"), [(math.nan, NonFiniteUpdate), (math.inf, NonFiniteUpdate), (65.0, UpdateOutOfRange)]
)
def test_a_client_does_not_write_what_would_be_refused(bad: float, refusal: type[UpdateRefused]) -> None:
    values = gaussian(1)
    values[301] = bad
    with pytest.raises(refusal, match="value 301 of the update"):
        written(values)


GOOD = written(gaussian(1), 4)
HEAD = 64


def with_bytes(offset: int, data: bytes) -> bytes:
    return GOOD[:offset] + data + GOOD[offset + len(data) :]


@pytest.mark.parametrize(
    ("update", "refusal"),
    [
        (GOOD[:87], MalformedUpdate),
        (with_bytes(0, b"UMBM"), MalformedUpdate),
        (with_bytes(5, b"\0"), WrongCodec),
        (with_bytes(16, bytes(32)), WrongLayout),
        (with_bytes(8, struct.pack("<Q", 461)), LyingLength),
        (with_bytes(48, struct.pack("<Q", 1 << 40)), LyingLength),
        (with_bytes(HEAD, struct.pack("<f", 8.000001)), WrongCodec),
        (with_bytes(HEAD, struct.pack("<f", math.nan)), WrongCodec),
        (with_bytes(HEAD + 4, struct.pack("<f", math.nan)), UpdateOutOfRange),
        (with_bytes(HEAD + 4, struct.pack("<f", math.inf)), UpdateOutOfRange),
        (with_bytes(HEAD + 4, struct.pack("<f", -1.0)), UpdateOutOfRange),
        (with_bytes(HEAD + 4, struct.pack("<f", 1e9)), UpdateOutOfRange),
        (with_bytes(HEAD + 4, struct.pack("<f", 0.0)), UpdateOutOfRange),
        (with_bytes(HEAD + 8, struct.pack("<I", 5)), WrongCodec),
        (with_bytes(HEAD + 12, b"\x04"), MalformedUpdate),
        (with_bytes(HEAD + 24, b"\xff\xff\xff\xff"), LyingLength),
        (with_bytes(HEAD + 15, b"\x01"), MalformedUpdate),
        (GOOD[:-1], LyingLength),
        (GOOD + b"\0", LyingLength),
        (with_bytes(48, struct.pack("<Q", len(GOOD) - 65)), LyingLength),
        (with_bytes(48, struct.pack("<Q", len(GOOD) - 63)) + b"\0", LyingLength),
    ],
)
def test_each_wrong_thing_has_its_own_error(update: bytes, refusal: type[UpdateRefused]) -> None:
    with pytest.raises(UpdateRefused) as caught:
        read(update, 4)
    assert type(caught.value) is refusal
    assert str(caught.value)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_norm_that_none_can_be_is_called_that_where_nothing_is_clipped(norm: float) -> None:
    with pytest.raises(UpdateOutOfRange, match=f"states the norm {norm}; a norm must be finite and not negative$"):
        read(with_bytes(HEAD + 4, struct.pack("<f", norm)), 4)


def test_levels_beyond_the_runs_bound_are_refused() -> None:
    wide = IntegerCodec(PLAN, Grid.finest(max_abs=2000.0, total_weight_max=10), LAYOUT)
    values = gaussian(1)
    values[7] = 1000.0
    with pytest.raises(UpdateOutOfRange, match="beyond the run's max_abs"):
        read(written(values, codec=wide))


def test_a_norm_beyond_the_clip_is_refused() -> None:
    clipped = IntegerCodec(CodecPlan(Codec.INTEGER, 8.0, 77, clip_norm=1.0), GRID, LAYOUT)
    with pytest.raises(UpdateOutOfRange, match="above the run's clip_norm 1"):
        read(written(gaussian(1)), codec=clipped)


@given(st.data())
@settings(max_examples=200)
def test_changed_bytes_are_read_or_refused(data: st.DataObject) -> None:
    first, last = sorted((data.draw(st.integers(0, len(GOOD))), data.draw(st.integers(0, len(GOOD)))))
    bad = GOOD[:first] + data.draw(st.binary(max_size=30)) + GOOD[last:]
    try:
        levels = read(bad, 4)
    except UpdateRefused:
        return
    assert levels.numel() == LAYOUT.n_values + 1
    assert int(levels[:-1].abs().max()) <= 64 * 8 + 1
    assert 0 <= int(levels[-1]) * GRID.total_weight_max <= 1 << 62


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 40))
def test_pieces_of_any_lengths_become_segments(lengths: list[int], size: int) -> None:
    values = torch.arange(sum(lengths), dtype=torch.float32)
    found = [(first, part.clone()) for first, part in in_segments(iter(torch.split(values, lengths)), size)]
    assert [first for first, _ in found] == list(range(0, len(values), size))
    assert all(part.numel() == size for _, part in found[:-1])
    assert torch.equal(torch.cat([torch.zeros(0), *(part for _, part in found)]), values)


def test_counters_masks_and_index_tables_come_through_exactly() -> None:
    state = {
        "count": torch.tensor(7),
        "mask": torch.ones(70, 70, dtype=torch.bool).tril(),
        "table": torch.arange(200_000),
        "weight": torch.zeros(300),
    }
    layout = Layout.of_state(state)
    codec, master = IntegerCodec(CodecPlan(Codec.INTEGER, 2.0, 77), GRID, layout), master_of(layout, state)
    total, parts = codec.new_sum(), [Part(weight, rank) for rank, weight in enumerate((1, 2, 5))]
    for part in parts:
        local = {**state, "count": torch.tensor(7 + 16 * (1 + part.rank)), "weight": gaussian(part.rank, 1.0, 300)}
        update = written(state_change(layout, local, state), part.rank, codec, n_piece=1000)
        assert len(update) in codec.update_bytes
        total.add(codec.integers(update[: codec.header_bytes], [update[codec.header_bytes :]], part.rank), part.weight)
    made = next_master(layout, master, codec.mean(total, parts))
    assert torch.equal(made["mask"], state["mask"])
    assert torch.equal(made["table"], state["table"])
    assert int(made["count"]) == 7 + round((16 + 2 * 32 + 5 * 48) / 8)
    expected = sum(part.weight * gaussian(part.rank, 1.0, 300).double() for part in parts) / 8
    assert float((made["weight"].double() - expected).abs().max()) <= 0.2501


def test_exact_values_beyond_the_bound_are_refused() -> None:
    layout = Layout.of_state({"n": torch.tensor(0), "w": torch.zeros(5)})
    codec = IntegerCodec(PLAN, GRID, layout)
    good = written(torch.zeros(6), codec=codec)
    assert good[88:92] == bytes(4)
    for bad, refusal in ((math.nan, NonFiniteUpdate), (65.0, UpdateOutOfRange)):
        with pytest.raises(refusal):
            read(good[:88] + struct.pack("<f", bad) + good[92:], codec=codec)
    with pytest.raises(LyingLength):
        read(good[:90], codec=codec)


def test_the_largest_change_is_told_to_a_step_or_two_and_never_as_more() -> None:
    values = gaussian(1)
    values[3] = -17.0
    update = written(values)
    largest = CODEC.largest_change(update[:88], [update[88:]], 0)
    assert 17.0 - 2 / 8 <= largest <= 17.0


def test_the_largest_change_may_be_of_a_value_that_is_sent_exactly() -> None:
    """Such as a counter: a canary judges the room under `max_abs` by it."""
    start = {"n": torch.tensor(0), "w": torch.zeros(5)}
    codec = IntegerCodec(PLAN, GRID, layout := Layout.of_state(start))
    change = state_change(layout, {"n": torch.tensor(1 << 20), "w": torch.full((5,), 0.25)}, start)
    update = written(change, codec=codec)
    assert codec.largest_change(update[:88], [update[88:]], 0) == 16.0


def test_one_client_can_make_the_next_step_four_times_as_large_and_no_more() -> None:
    before = first_plan(step=0.5, norm=3.0, n_values=900, key=1, clip_norm=None)
    assert next_plan(before, step=0.5, update_rms=1e9, key=2).inverse_step == before.inverse_step / 4


@pytest.mark.parametrize("wrong", [3000.0, 1 / 3000.0])
def test_a_wrong_guess_at_the_first_norm_is_mended_by_the_rounds_that_follow(wrong: float) -> None:
    values = gaussian(5, scale=0.01)
    plan = first_plan(step=0.5, norm=wrong * float(values.norm()), n_values=values.numel(), key=1, clip_norm=None)
    for number in range(8):
        codec = IntegerCodec(plan, GRID, LAYOUT)
        total = codec.new_sum()
        total.add([read(written(values, codec=codec), codec=codec)], 1)
        plan = next_plan(plan, step=0.5, update_rms=codec.update_rms(total), key=number)
    assert 1 / plan.inverse_step == pytest.approx(0.005, rel=0.1)


def test_the_step_follows_the_measured_updates() -> None:
    first = first_plan(step=0.5, norm=3.0, n_values=900, key=1, clip_norm=None)
    assert first.inverse_step == pytest.approx(20.0)
    after = next_plan(first, step=0.5, update_rms=0.01, key=2)
    assert (after.inverse_step, after.key) == (as_float32(200.0), 2)
    for unknown in (None, 0.0):
        assert next_plan(first, step=0.5, update_rms=unknown, key=2).inverse_step == first.inverse_step


@given(st.floats(2.0**-12, 16.0), st.floats(min_value=0, allow_infinity=False))
def test_any_measurement_makes_a_plan(step: float, rms: float) -> None:
    made = next_plan(PLAN, step=step, update_rms=rms, key=3)
    assert as_float32(made.inverse_step) == made.inverse_step


@pytest.mark.parametrize(
    "changed",
    [{"inverse_step": 0.1}, {"inverse_step": 0.0}, {"inverse_step": math.nan}, {"key": -1}, {"clip_norm": 0.0}],
)
def test_a_plan_that_makes_no_sense_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        CodecPlan(**{"codec": Codec.INTEGER, "inverse_step": 8.0, "key": 1, **changed})  # type: ignore[arg-type]


def test_the_codec_of_a_plan() -> None:
    assert isinstance(codec_for(PLAN, GRID, LAYOUT), IntegerCodec)
