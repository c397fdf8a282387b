"""State dicts as one vector and back: dtypes, ties, buffers, hostile JSON, and the master copy."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.federations.whole_states import next_master, published_state, state_change
from umbel.aggregation.errors import LayoutError, ModelOverflow
from umbel.aggregation.model.layout import N_VALUES_MAX, Layout, TensorSpec
from umbel.aggregation.model.state import master_of
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.types import RunId
from umbel.aggregation.update.grid import GridAccumulator

GRID = Grid.finest(max_abs=64.0, total_weight_max=1 << 20)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


class TiedModel(nn.Module):
    """A language model in small: the output layer is the embedding, and a BatchNorm keeps counters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def total_of(change: Tensor, weight: int = 1, grid: Grid = GRID) -> GridAccumulator:
    total = GridAccumulator(change.numel(), grid)
    total.fold_vector(change, weight)
    return total


def round_trip(start: dict[str, Tensor], local: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model becomes when its only client moves it from `start` to `local`."""
    layout = Layout.of_state(start)
    return published_state(
        layout, next_master(layout, master_of(layout, start), total_of(state_change(layout, local, start)))
    )


# --- laying out -------------------------------------------------------------------------------------------------------


def test_tensors_stand_in_the_order_of_their_names_whatever_the_dict_says() -> None:
    state = {"b": torch.zeros(2), "a": torch.zeros(2, 3), "B": torch.zeros(()), "é": torch.zeros(1)}
    layout = Layout.of_state(state)
    assert [(spec.name, spec.offset) for spec in layout.tensors] == [("B", 0), ("a", 1), ("b", 7), ("é", 9)]
    assert layout.n_values == 10
    assert Layout.of_state(dict(reversed(state.items()))).digest == layout.digest


def test_parameters_registered_in_another_order_make_the_same_layout() -> None:
    one, two = nn.Module(), nn.Module()
    for module, names in ((one, "xy"), (two, "yx")):
        for name in names:
            module.register_parameter(name, nn.Parameter(torch.zeros(2)))
    assert Layout.of_state(one.state_dict()) == Layout.of_state(two.state_dict())


def test_tied_weights_take_one_place() -> None:
    layout = Layout.of_state(TiedModel().state_dict())
    ties = {spec.name: spec.tied_to for spec in layout.tensors if spec.tied_to}
    assert ties == {"head.weight": "embedding.weight"}
    assert layout.n_values == 15 + 4 * 3 + 1  # embedding; weight, bias, mean, variance; the counter


def test_views_of_one_storage_with_other_shapes_are_tensors_of_their_own() -> None:
    base = torch.arange(6.0)
    square = torch.arange(4.0).view(2, 2)
    state = {"flat": base, "matrix": base.view(2, 3), "head": base[:1], "square": square, "turned": square.t()}
    assert all(spec.tied_to is None for spec in Layout.of_state(state).tensors)
    moved = {name: tensor + 1 for name, tensor in state.items()}
    assert all(torch.equal(tensor, moved[name]) for name, tensor in round_trip(state, moved).items())


def test_empty_tensors_are_never_tied_and_hold_nothing() -> None:
    layout = Layout.of_state({"a": torch.zeros(0), "b": torch.zeros(0), "c": torch.zeros(2, 0), "d": torch.zeros(())})
    assert [spec.tied_to for spec in layout.tensors] == [None] * 4
    assert layout.n_values == 1


def test_a_model_without_tensors_has_a_layout() -> None:
    layout = Layout.of_state({})
    assert (layout.n_values, layout.to_json(), state_change(layout, {}, {}).numel()) == (0, "[]", 0)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (torch.zeros(1, dtype=torch.complex64), "complex64, which cannot be averaged"),
        (torch.zeros(1).to(torch.float8_e4m3fn), "float8_e4m3fn, which cannot be averaged"),
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3).to_sparse(), "sparse"),
        ({"version": 1}, "is a dict, not a tensor"),
    ],
)
def test_what_has_no_mean_is_refused(entry: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.of_state({"x": entry})


# --- the digest -------------------------------------------------------------------------------------------------------


def test_the_digest_never_changes() -> None:
    layout = Layout.of_state({"w": torch.zeros(2, 1), "n": torch.zeros((), dtype=torch.int64)})
    assert layout.to_json() == '[["n",[],"int64",0,null],["w",[2,1],"float32",1,null]]'
    assert layout.digest == "2bec82a72ce91b66b86f188d96956a208f4c38f08d552584e3a808b33d27d919"


CHANGES: list[tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
    ("tensor 'b' is missing", lambda state: {"a": state["a"]}),
    ("tensor 'c' is not in the model", lambda state: {**state, "c": torch.zeros(1)}),
    ("tensor 'a' is float32\\[3, 2\\], not float32\\[2, 3\\]", lambda state: {**state, "a": torch.zeros(3, 2)}),
    ("tensor 'a' is float32\\[6\\]", lambda state: {**state, "a": torch.zeros(6)}),
    ("tensor 'b' is float16\\[2, 3\\]", lambda state: {**state, "b": state["b"].half()}),
    ("tied differently", lambda state: {**state, "b": state["a"]}),
]


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_every_change_is_named_and_changes_the_digest(
    words: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    layout = Layout.of_state(state)
    assert Layout.of_state(change(state)).digest != layout.digest
    with pytest.raises(LayoutError, match=f"this file does not fit the model: .*{words}"):
        layout.require(change(state), "this file")
    layout.require(state, "this file")


# --- JSON -------------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    names = sorted(draw(st.sets(st.text(max_size=6), max_size=6)))
    dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool"])
    specs: list[TensorSpec] = []
    offset = 0
    for name in names:
        owners = [spec for spec in specs if spec.tied_to is None]
        is_tied: bool = draw(st.booleans())
        if owners and is_tied:
            owner = draw(st.sampled_from(owners))
            spec = replace(owner, name=name, offset=offset, tied_to=owner.name)
        else:
            spec = TensorSpec(name, tuple(draw(st.lists(st.integers(0, 9), max_size=3))), draw(dtypes), offset)
        specs.append(spec)
        offset += spec.n_values
    return Layout(tuple(specs))


@given(layouts())
def test_json_round_trips(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["float32", "int8"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
ROWS = st.tuples(JSON_VALUES, JSON_VALUES, JSON_VALUES, JSON_VALUES, JSON_VALUES).map(list)


@given(st.text() | JSON_VALUES.map(json.dumps) | st.lists(ROWS, max_size=4).map(json.dumps))
def test_hostile_json_is_a_layout_or_a_layout_error(text: str) -> None:
    try:
        layout = Layout.from_json(text)
    except LayoutError:
        return
    assert layout.to_json() == text


@given(layouts(), st.data())
def test_a_layout_with_one_character_changed_is_another_or_refused(layout: Layout, data: st.DataObject) -> None:
    text = layout.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('[]",0129-.eE tfnu{}:\\')) + text[at + 1 :]
    with contextlib.suppress(LayoutError):
        assert Layout.from_json(changed).to_json() == changed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        '"a"',
        "[" * 100_000,
        '[["a",[1e999],"float32",0,null]]',
        '[["a",[1.0],"float32",0,null]]',
        '[["a",[true],"float32",0,null]]',
        '[["a",[-1],"float32",0,null]]',
        '[["a","12","float32",0,null]]',
        '[["a",[],["x"],0,null]]',
        '[["a",[],"float8",0,null]]',
        '[[["a"],[],"float32",0,null]]',
        '[["a",[],"float32",false,null]]',
        '[["a",[],"float32",1,null]]',
        '[["a",[],"float32",0,""]]',
        '[["a",[],"float32",0,"a"]]',
        '[["a",[],"float32",0,"b"],["b",[],"float32",0,null]]',
        '[["a",[],"float32",0,null],["b",[2],"float32",1,"a"]]',
        '[["a",[],"float32",0,null],["b",[],"int8",1,"a"]]',
        '[["a",[],"float32",0,null],["b",[],"float32",1,"a"],["c",[],"float32",1,"b"]]',
        '[["b",[],"float32",0,null],["a",[],"float32",1,null]]',
        '[["a",[],"float32",0,null],["a",[],"float32",1,null]]',
        '[["a",[],"float32",0,null]] ',
        '[["a", [],"float32",0,null]]',
        '[["é",[],"float32",0,null]]',
        f'[["a",[{N_VALUES_MAX + 1}],"float32",0,null]]',
        f'[["a",[{N_VALUES_MAX},2],"float32",0,null]]',
        '[["a",[1180591620717411303424],"float32",0,null]]',
        f'[["a",{"[" + ",".join("1" * 65) + "]"},"float32",0,null]]',
    ],
)
def test_what_to_json_never_writes_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="invalid layout"):
        Layout.from_json(text)


# --- the vector -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_tensor_comes_back_as_its_client_left_it(dtype: torch.dtype) -> None:
    start = {"x": torch.tensor([[0.5, -1.0], [2.0, 0.0]], dtype=dtype)}
    local = {"x": torch.tensor([[0.75, -1.5], [2.0, -0.25]], dtype=dtype)}
    after = round_trip(start, local)["x"]
    assert after.dtype == dtype
    assert torch.equal(after, local["x"])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_tensor_comes_back_as_its_client_left_it(dtype: torch.dtype) -> None:
    start, local = {"x": torch.tensor([1, 100, 7], dtype=dtype)}, {"x": torch.tensor([127, 0, 8], dtype=dtype)}
    after = round_trip(start, local)["x"]
    assert after.dtype == dtype
    assert torch.equal(after, local["x"])


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_an_integer_change_is_exact_or_refused(start: int, local: int) -> None:
    states = [{"n": torch.tensor(value, dtype=torch.int64)} for value in (start, local)]
    layout = Layout.of_state(states[0])
    if abs(local - start) > 1 << 24:
        with pytest.raises(LayoutError, match="'n' changed by more than 2"):
            state_change(layout, states[1], states[0])
    else:
        assert state_change(layout, states[1], states[0]).item() == (local - start) / 65536


def test_a_change_that_wraps_around_is_refused() -> None:
    low, high = ({"n": torch.tensor(value)} for value in (-(1 << 63), (1 << 63) - 1))
    with pytest.raises(LayoutError, match="changed by more"):
        state_change(Layout.of_state(low), high, low)  # the difference is -1 modulo 2^64


def test_bools_take_the_majority() -> None:
    start = {"x": torch.tensor([True, True, False, False])}
    layout = Layout.of_state(start)
    total = GridAccumulator(4, GRID)
    for local, weight in (([True, False, True, False], 2), ([True, False, False, True], 1)):
        total.fold_vector(state_change(layout, {"x": torch.tensor(local)}, start), weight)
    assert next_master(layout, start, total)["x"].tolist() == [True, False, True, False]


def test_a_batch_norm_takes_thousands_of_steps_under_the_default_bound() -> None:
    plan = RoundPlan(RunId("r"), 1, 1, 100, 1, 1.3, 1.0, Weighting.SAMPLES, 1 << 20, max_abs=64.0, seed=0)
    start, local = nn.BatchNorm1d(2).state_dict(), nn.BatchNorm1d(2).state_dict()
    local["num_batches_tracked"] = torch.tensor(1_000_000)
    layout = Layout.of_state(start)
    after = next_master(layout, start, total_of(state_change(layout, local, start), 7, plan.grid))
    assert after["num_batches_tracked"].item() == 1_000_000


def test_integer_buffers_take_the_rounded_mean_and_saturate() -> None:
    start = {"n": torch.tensor([250, 10, 10, 10], dtype=torch.uint8)}
    layout = Layout.of_state(start)
    total = GridAccumulator(4, GRID)
    total.fold_vector(torch.tensor([10.0, 1.0, 2.0, 0.0]) / 65536, 1)
    total.fold_vector(torch.tensor([10.0, 0.0, 1.0, 1.0]) / 65536, 2)
    assert next_master(layout, start, total)["n"].tolist() == [255, 10, 11, 11]


def test_tied_weights_and_buffers_survive_a_round() -> None:
    start, local = TiedModel(), TiedModel()
    local.train()
    local.norm(torch.randn(4, 3))
    after = round_trip(start.state_dict(), local.state_dict())
    layout = Layout.of_state(start.state_dict())
    full = layout.full_state(after)
    TiedModel().load_state_dict(full)
    assert full["head.weight"] is full["embedding.weight"]
    assert full["norm.num_batches_tracked"].item() == 1
    for name, tensor in local.state_dict().items():
        torch.testing.assert_close(full[name], tensor, rtol=0, atol=1e-6)


def test_a_trained_copy_whose_ties_were_cut_still_subtracts() -> None:
    start = TiedModel().state_dict()
    local = {name: tensor.clone() for name, tensor in start.items()}
    assert not state_change(Layout.of_state(start), local, start).any()


def test_values_that_do_not_lie_in_a_row_are_read_in_order() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    start, local = {"x": torch.zeros(3, 2), "y": torch.zeros(4)}, {"x": matrix.t(), "y": torch.ones(1).expand(4)}
    change = state_change(Layout.of_state(start), local, start)
    assert change.tolist() == [0, 3, 1, 4, 2, 5, 1, 1, 1, 1]
    assert master_of(Layout.of_state(local), local)["x"].is_contiguous()


# --- the master copy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_below_half_a_unit_of_half_precision_add_up(dtype: torch.dtype) -> None:
    start = {"x": torch.ones(1, dtype=dtype)}
    layout = Layout.of_state(start)
    tiny = torch.full((1,), 2.0**-14)  # half precision near 1 has steps of 2^-10 (float16) or 2^-7 (bfloat16)
    assert (start["x"] + tiny.to(dtype)).item() == 1.0
    master = master_of(layout, start)
    for _ in range(1 << 10):
        master = next_master(layout, master, total_of(tiny))
    assert master["x"].dtype == torch.float32
    assert published_state(layout, master)["x"].dtype == dtype
    assert published_state(layout, master)["x"].item() == 1.0 + 2.0**-4
    assert not layout.is_full_precision


def test_without_half_precision_the_master_copy_is_what_is_published() -> None:
    state = {"x": torch.randn(3), "y": torch.randn(3).double(), "n": torch.tensor(3)}
    layout = Layout.of_state(state)
    assert layout.is_full_precision
    master = master_of(layout, state)
    assert all(torch.equal(published_state(layout, master)[name], tensor) for name, tensor in state.items())


def test_the_master_copy_is_a_copy() -> None:
    state = {"x": torch.zeros(3)}
    master = master_of(Layout.of_state(state), state)
    state["x"].fill_(9)
    assert not master["x"].any()


def test_adding_a_mean_leaves_the_old_master_as_it_was() -> None:
    master = {"x": torch.zeros(2)}
    after = next_master(Layout.of_state(master), master, total_of(torch.ones(2)), learning_rate=0.5)
    assert (master["x"].tolist(), after["x"].tolist()) == ([0, 0], [0.5, 0.5])


@given(st.lists(st.floats(-64, 64, width=32), min_size=1, max_size=5), st.integers(1, 1000), st.floats(0.125, 2))
def test_the_step_is_the_formula_rounded_once(values: list[float], weight: int, learning_rate: float) -> None:
    start = torch.linspace(-1, 1, len(values))
    layout = Layout.of_state({"x": start})
    total = total_of(torch.tensor(values), weight)
    mean = total.mean_slice(0, len(values))
    expected = torch.tensor([float(s) + float(m) * learning_rate for s, m in zip(start, mean, strict=True)]).float()
    assert torch.equal(next_master(layout, {"x": start}, total, learning_rate)["x"], expected)


# --- the edges of the numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_half_precision_cannot_hold_is_published_finite_and_kept_true(dtype: torch.dtype, sign: float) -> None:
    greatest = torch.finfo(dtype).max
    state = {"weight": torch.tensor([sign * greatest, 0.0], dtype=dtype)}
    layout = Layout.of_state(state)
    start = master_of(layout, state)
    start["weight"][0] += sign * greatest * 0.003  # beyond half precision, within float32
    master = next_master(layout, start, total_of(torch.zeros(2)))
    assert abs(master["weight"][0].item()) > greatest
    assert published_state(layout, master)["weight"].tolist() == [sign * greatest, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_out_of_the_finite_range_makes_no_model(dtype: torch.dtype) -> None:
    state = {"weight": torch.tensor([0.0, 3.3e38], dtype=dtype)}
    layout = Layout.of_state(state)
    with pytest.raises(ModelOverflow, match="'weight' would leave the finite range of float32"):
        next_master(layout, master_of(layout, state), total_of(torch.full((2,), 64.0)), learning_rate=1e38)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_stops_at_its_limits(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    state = {"counter": torch.tensor([limits.max, limits.min, limits.max - 1, limits.min + 1], dtype=dtype)}
    layout = Layout.of_state(state)
    change = torch.tensor([1.0, -1.0, 7.0, -7.0]) * 2.0**-16
    assert next_master(layout, state, total_of(change))["counter"].tolist() == [limits.max, limits.min] * 2


def test_no_integer_moves_by_more_than_2_to_the_24_whatever_max_abs_allows() -> None:
    state = {"counter": torch.tensor([5, 5])}
    layout = Layout.of_state(state)
    grid = Grid.finest(max_abs=2.0**64, total_weight_max=1)
    total = total_of(torch.tensor([2.0**64, -(2.0**64)]), grid=grid)
    assert next_master(layout, state, total)["counter"].tolist() == [5 + (1 << 24), 5 - (1 << 24)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.bool])
def test_the_master_copy_that_a_step_begins_with_stays_as_it_was(dtype: torch.dtype) -> None:
    start = {"x": torch.tensor([0, 1, 0, 1]).to(dtype)}
    before = start["x"].clone()
    after = next_master(
        Layout.of_state(start), start, total_of(torch.full((4,), 1.0 / 65536 if dtype.is_floating_point else 1.0))
    )
    assert torch.equal(start["x"], before)
    assert after["x"].data_ptr() != start["x"].data_ptr()
