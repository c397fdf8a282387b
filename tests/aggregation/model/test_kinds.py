"""Kinds of tensors in layouts: what travels up, what stays as it is, and what a run can have."""

import hashlib
import json
import struct
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.downlink.change import ChangeWriter, apply_change
from umbel.aggregation.downlink.publishing import write_next_master
from umbel.aggregation.errors import LayoutError, ModelOverflow, WrongLayout
from umbel.aggregation.model.artifact import decode_model, encode_model
from umbel.aggregation.model.base import base_sha256
from umbel.aggregation.model.kinds import require_fitting
from umbel.aggregation.model.layout import INTEGER_UNIT, Layout
from umbel.aggregation.model.next_model import ServerStep, write_next
from umbel.aggregation.model.state import InMemory, empty_state, master_dtype, master_of, torch_dtype
from umbel.aggregation.model.statistics import careful_of_statistics
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part
from umbel.aggregation.plans.tensors import KINDS_HELD, TensorKind, TensorRules
from umbel.aggregation.update.grid import GridAccumulator

GRID = Grid.finest(max_abs=64.0, total_weight_max=1 << 10)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
KINDS = st.sampled_from([kind for kind in get_args(TensorKind) if kind != "control"])  # which follows from the others


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, TensorKind]]:
    """Tensors of some dtypes, with a kind each; only integers are counts."""
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=3), min_size=1, max_size=6, unique=True))
    state = {
        name: torch.arange(draw(st.integers(0, 4)), dtype=draw(st.sampled_from(DTYPES))) + i
        for i, name in enumerate(names)
    }
    kinds: dict[str, TensorKind] = {name: draw(KINDS) for name in names}
    return state, {n: "mean" if k == "count" and state[n].is_floating_point() else k for n, k in kinds.items()}


@given(states())
def test_a_layout_has_the_tensors_that_the_coordinator_has_and_its_json_round_trips(
    given_: tuple[dict[str, Tensor], dict[str, TensorKind]],
) -> None:
    state, kinds = given_
    layout = Layout.of_state(state, kinds.__getitem__)
    assert {spec.name: spec.kind for spec in layout.tensors} == {n: k for n, k in kinds.items() if k in KINDS_HELD}
    assert Layout.from_json(layout.to_json()) == layout
    assert [len(row) for row in json.loads(layout.to_json())] == [5 + (s.kind != "mean") for s in layout.tensors]


@given(states())
def test_the_layout_of_updates_is_that_of_the_tensors_that_are_sent(
    given_: tuple[dict[str, Tensor], dict[str, TensorKind]],
) -> None:
    state, kinds = given_
    layout = Layout.of_state(state, kinds.__getitem__)
    sent = {name: value for name, value in state.items() if kinds[name] in ("mean", "count")}
    assert layout.update == Layout.of_state(sent, kinds.__getitem__)
    assert layout.update.update is layout.update
    assert (layout.update is layout) == ("global" not in kinds.values())


@given(states())
def test_a_layout_with_control_variates_has_one_for_each_tensor_that_the_server_moves(
    given_: tuple[dict[str, Tensor], dict[str, TensorKind]],
) -> None:
    state, kinds = given_
    layout = Layout.of_state(state, kinds.__getitem__)
    whole = layout.with_control
    control = {spec.controls: spec for spec in whole.tensors if spec.kind == "control"}
    assert control.keys() == {spec.name for spec in layout.owners() if spec.is_stepped}
    assert all((one.shape, one.dtype) == (state[str(name)].shape, "float32") for name, one in control.items())
    assert all(one.is_sent and one.is_coded and not one.is_stepped for one in control.values())
    assert whole.model == layout
    assert (whole.with_control, whole.has_control) == (whole, bool(control))
    assert Layout.from_json(whole.to_json()) == whole


def test_kinds_change_the_digest_and_are_named_in_a_difference() -> None:
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    kinds: dict[str, TensorKind] = {"a": "mean", "b": "global"}
    plain, frozen = Layout.of_state(state), Layout.of_state(state, kinds.__getitem__)
    assert plain.digest != frozen.digest
    assert plain.difference(frozen) == "tensor 'b' has the kind global, not mean"
    frozen.require(state, "a state dict, which knows no kinds,")


def test_tied_tensors_have_one_kind() -> None:
    shared = torch.zeros(2)
    kinds: dict[str, TensorKind] = {"a": "mean", "b": "private"}
    with pytest.raises(LayoutError, match=r"'a' and 'b' are tied .* have the kinds mean and private: give both names"):
        Layout.of_state({"a": shared, "b": shared}, kinds.__getitem__)
    kinds = {"a": "private", "b": "private"}
    assert Layout.of_state({"a": shared, "b": shared}, kinds.__getitem__).tensors == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["a", [], "float32", 0, None, "mean"], "may have a kind"),
        (["a", [], "float32", 0, None, "private"], "may have a kind"),
        (["a", [], "float32", 0, None, "base"], "may have a kind"),
        (["a", [], "float32", 0, None, None], "may have a kind"),
        (["a", [], "float32", 0, None, ["global"]], "may have a kind"),
        (["a", [], "float32", 0, None, {"global": 1}], "may have a kind"),
        (["a", [], "float32", 0, None, "global", "global"], "may have a kind"),
    ],
)
def test_a_hostile_row_is_refused(row: list[object], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.from_json(json.dumps([row], separators=(",", ":")))


def test_a_tied_row_of_another_kind_is_refused() -> None:
    text = '[["a",[],"float32",0,null,"global"],["b",[],"float32",1,"a"]]'
    with pytest.raises(LayoutError, match=r"'a' and 'b' are tied"):
        Layout.from_json(text)


# --- the next model ---------------------------------------------------------------------------------------------------

MIXED: dict[str, TensorKind] = {"a": "global", "b": "mean", "c": "global", "d": "mean"}


def mixed_state(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(5, 3, generator=draw) for name in "abd"} | {"c": torch.tensor([4, 5])}
    state["d"] = state["d"].bfloat16()
    return state


@pytest.mark.parametrize("codec", [Codec.FLOAT32, Codec.INTEGER])
def test_a_global_tensor_stays_and_the_others_move_as_in_a_model_without_it(codec: Codec) -> None:
    state, plan = mixed_state(), CodecPlan(codec, inverse_step=64.0 if codec is Codec.INTEGER else 0.0)
    whole = Layout.of_state(state, MIXED.__getitem__)
    part = Layout.of_state({name: state[name] for name in "bd"})
    change = torch.linspace(-1, 1, part.n_values)
    made = []
    for layout in (whole, part):
        reader = codec_for(plan, GRID, layout)
        update = b"".join(bytes(piece) for piece in reader.encode(lambda: iter([change.clone()]), 0))
        total, head = reader.new_sum(), reader.header_bytes
        total.add(reader.integers(update[:head], [update[head:]], 0), 3)
        public, master = empty_state(layout, torch_dtype), empty_state(layout, master_dtype)
        before = InMemory(master_of(layout, {spec.name: state[spec.name] for spec in layout.owners()}))
        write_next(
            layout, before, reader.mean(total, [Part(3, 0)]), ServerStep(rate=0.5), InMemory(public), InMemory(master)
        )
        made.append((public, master))
    (public, master), (public_part, master_part) = made
    assert all(torch.equal(public[name], state[name]) and torch.equal(master[name], state[name]) for name in "ac")
    assert all(torch.equal(public[n], public_part[n]) and torch.equal(master[n], master_part[n]) for n in "bd")
    assert not torch.equal(public["b"], state["b"])


def test_an_update_of_the_whole_model_is_refused_where_only_a_part_is_sent() -> None:
    state = mixed_state()
    whole, part = Layout.of_state(state), Layout.of_state(state, MIXED.__getitem__)
    sender, reader = codec_for(CodecPlan(), GRID, whole), codec_for(CodecPlan(), GRID, part)
    update = b"".join(bytes(piece) for piece in sender.encode(lambda: iter([torch.zeros(whole.n_values)]), 0))
    with pytest.raises(WrongLayout):
        list(reader.integers(update[:64], [update[64:]], 0))


def test_a_change_that_clients_download_leaves_global_tensors_and_its_step_follows_the_others() -> None:
    state = mixed_state()
    whole, part = Layout.of_state(state, MIXED.__getitem__), Layout.of_state({name: state[name] for name in "bd"})
    change, steps = torch.linspace(-1, 1, part.n_values), list[float]()
    for layout in (whole, part):
        total = GridAccumulator(part.n_values, GRID)
        total.fold_vector(change, 1)
        owned = {spec.name: state[spec.name].clone() for spec in layout.owners()}
        master, public = InMemory(empty_state(layout, master_dtype)), InMemory(owned)
        start = InMemory(master_of(layout, owned))
        steps.append(write_next_master(layout, start, total, ServerStep(), master, public, 0.5))
        writer = ChangeWriter(layout, steps[-1], master, public)
        body = b"".join(writer.body())
        fetched = {spec.name: state[spec.name].clone() for spec in layout.owners()}
        apply_change(layout, [writer.head() + body], len(writer.head() + body), InMemory(fetched))
        assert all(torch.equal(fetched[name], owned[name]) for name in fetched), "a client makes the same model"
        assert all(torch.equal(fetched[name], state[name]) for name in "ac" if name in fetched)
        assert not torch.equal(fetched["b"], state["b"])
    assert steps[0] == steps[1]


def test_a_model_file_keeps_the_kinds() -> None:
    layout = Layout.of_state(mixed_state(), MIXED.__getitem__)
    found, state = decode_model(encode_model(mixed_state(), layout))
    assert found == layout
    assert encode_model(state, found) == encode_model(mixed_state(), layout)


# --- integers that add up ---------------------------------------------------------------------------------------------

COUNTS: dict[str, TensorKind] = {"a": "mean", "b": "count", "c": "mean", "d": "count"}


def counting_state() -> dict[str, Tensor]:
    return {
        "a": torch.ones(7),
        "b": torch.tensor([5, -3, 1 << 40]),
        "c": torch.tensor(9),
        "d": torch.zeros(2, dtype=torch.int32),
    }


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Codec.FLOAT32, Codec.INTEGER]),
    st.lists(
        st.tuples(st.integers(1, 1000), st.lists(st.integers(-(1 << 22), 1 << 22), min_size=5, max_size=5)),
        min_size=1,
        max_size=6,
    ),
)
def test_counts_are_added_up_exactly_and_all_else_is_averaged(
    codec: Codec, clients: list[tuple[int, list[int]]]
) -> None:
    """In any codec, any weights, and through partial sums: beside Python's own integers."""
    state, grid = counting_state(), Grid.finest(max_abs=64.0, total_weight_max=6000)
    layout = Layout.of_state(state, COUNTS.__getitem__)
    reader = codec_for(CodecPlan(codec, inverse_step=64.0 if codec is Codec.INTEGER else 0.0), grid, layout)
    halves, parts = [reader.new_sum(), reader.new_sum()], list[Part]()
    for rank, (weight, counted) in enumerate(clients):
        change = torch.zeros(layout.n_values)
        change[7:10], change[11:13] = torch.tensor(counted[:3]) * INTEGER_UNIT, torch.tensor(counted[3:]) * INTEGER_UNIT
        change[10] = rank * INTEGER_UNIT
        update = b"".join(bytes(piece) for piece in reader.encode(partial(iter, [change]), rank))
        head = reader.header_bytes
        halves[rank % 2].add(reader.integers(update[:head], [update[head:]], rank), weight)
        parts.append(Part(weight, rank))
    total, other = halves
    total.merge_sums([other.sums], other.total_weight, other.n_folded)
    public, master = empty_state(layout, torch_dtype), empty_state(layout, master_dtype)
    write_next(
        layout, InMemory(state), reader.mean(total, parts), ServerStep(rate=0.5), InMemory(public), InMemory(master)
    )
    added = [sum(counted[i] for _, counted in clients) for i in range(5)]
    assert public["b"].tolist() == [before + more for before, more in zip([5, -3, 1 << 40], added[:3], strict=True)]
    assert public["d"].tolist() == added[3:]
    weights = [weight for weight, _ in clients]
    mean = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    assert abs(int(public["c"]) - 9 - mean) <= 0.51


def test_counts_beyond_their_dtype_stop_the_run_with_a_remedy() -> None:
    state = {"d": torch.tensor([(1 << 31) - 2], dtype=torch.int32)}
    layout = Layout.of_state(state, lambda _name: "count")
    total = codec_for(CodecPlan(), GRID, layout).new_sum()
    total.add([torch.tensor([round(2 * INTEGER_UNIT / GRID.step)])], 5)
    reader, public = codec_for(CodecPlan(), GRID, layout), InMemory(empty_state(layout, torch_dtype))
    with pytest.raises(ModelOverflow, match=r"counts in tensor 'd' would leave the range of int32; .* wider"):
        write_next(layout, InMemory(state), reader.mean(total, []), ServerStep(), public)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_only_integers_are_counts(dtype: torch.dtype) -> None:
    kind: dict[str, TensorKind] = {"a": "count"}
    with pytest.raises(LayoutError, match=r"'a' has the kind count, but the dtype .* only integers are added up"):
        Layout.of_state({"a": torch.zeros(1, dtype=dtype)}, kind.__getitem__)


# --- what a run can have ----------------------------------------------------------------------------------------------


def layout_of(**kinds: TensorKind) -> Layout:
    return Layout.of_state({name: torch.zeros(2) for name in kinds}, kinds.__getitem__)


@pytest.mark.parametrize(
    ("rules", "layout", "words"),
    [
        (TensorRules({"private": ("b",)}), layout_of(a="mean", b="mean"), "'b' is private by .* must not leave a site"),
        (
            TensorRules({"global": ("b",)}),
            layout_of(a="mean", b="mean"),
            "'b' has the kind global in .* the kind mean in",
        ),
        (TensorRules({"global": ("c",)}), layout_of(a="mean"), "the pattern 'c' in .* matches no tensor of the model"),
        (TensorRules({"base": ("b",)}), layout_of(a="mean"), "has no base_sha256, .* `umbel model init` prints it"),
        (TensorRules({"global": ("a",)}), layout_of(a="global"), "there is nothing to train"),
        (TensorRules({"global": ("a",), "private": ("a",)}), layout_of(a="global", b="mean"), "is in two lists"),
        (None, Layout.of_state({}), "there is nothing to train"),
    ],
)
def test_a_run_that_cannot_be_is_refused(rules: TensorRules | None, layout: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        require_fitting(rules, layout, 2.0**-20)


@pytest.mark.parametrize(
    ("rules", "layout"),
    [
        (None, layout_of(a="mean")),
        (None, layout_of(a="mean", b="global")),  # the clients' code declares it
        (TensorRules({"private": ("b",)}), layout_of(a="mean")),
        (TensorRules({"base": ("b",)}, "ab" * 32), layout_of(a="mean", c="global")),
    ],
)
def test_a_run_that_can_be_is_accepted(rules: TensorRules | None, layout: Layout) -> None:
    require_fitting(rules, layout, 2.0**-20)


def test_counts_need_a_grid_that_holds_them_exactly() -> None:
    layout = Layout.of_state({"a": torch.zeros(2, dtype=torch.int64)}, lambda _name: "count")
    require_fitting(None, layout, INTEGER_UNIT)
    with pytest.raises(LayoutError, match=r"too coarse to add up counts exactly .* lower max_abs or sample_count_max"):
        require_fitting(None, layout, 2 * INTEGER_UNIT)


# --- the base ---------------------------------------------------------------------------------------------------------

BASE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}


def test_the_hash_of_a_base_never_changes() -> None:
    values = {"b": struct.pack("<HH", 0x3FC0, 0x8000), "w": struct.pack("<6f", *range(6))}
    heads = {"b": b'["b",[2],"bfloat16"]', "w": b'["w",[2,3],"float32"]'}
    text = b"".join(struct.pack("<Q", len(heads[name])) + heads[name] + values[name] for name in "bw")
    assert base_sha256(BASE) == hashlib.sha256(text).hexdigest()
    assert base_sha256(BASE) == "3ae5307b3e139bcd7c7a9a129021e37022c90cc1ac82095a12c8fdd1b42c0a12"


@pytest.mark.parametrize(
    "other",
    [
        BASE | {"w": BASE["w"].reshape(3, 2)},
        BASE | {"b": -BASE["b"]},
        BASE | {"b": BASE["b"].view(torch.float16)},
        {"v": BASE["w"], "b": BASE["b"]},
        {"w": BASE["w"]},
        BASE | {"c": torch.zeros(0)},
    ],
)
def test_names_shapes_dtypes_and_values_all_change_the_hash_of_a_base(other: dict[str, Tensor]) -> None:
    assert base_sha256(other) != base_sha256(BASE)


@settings(max_examples=20)
@given(st.permutations(["w", "b"]))
def test_order_and_strides_do_not_change_the_hash_of_a_base(order: list[str]) -> None:
    turned = {"w": BASE["w"].t().contiguous().t(), "b": BASE["b"]}
    assert base_sha256({name: turned[name] for name in order}) == base_sha256(BASE)


# --- running statistics -----------------------------------------------------------------------------------------------


def test_averaged_statistics_are_warned_of_and_more_so_beside_private_weights() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    everything = careful_of_statistics(Layout.of_state(state), None)
    assert everything.startswith(
        "the running statistics 1.running_mean, 1.running_var are averaged over clients. Where"
    )
    rules = TensorRules({"private": ("1.weight", "1.bias")})
    layout = Layout.of_state(state, lambda name: rules.kind_of(name) or "mean")
    assert "are averaged, but the weights of their layers are private" in careful_of_statistics(layout, rules)
    rules = TensorRules({"private": ("1.*",)})
    assert careful_of_statistics(Layout.of_state(state, lambda name: rules.kind_of(name) or "mean"), rules) == ""
    assert careful_of_statistics(Layout.of_state(nn.GroupNorm(1, 2).state_dict()), None) == ""
