"""Changes: the published model follows its master copy, who has the version before has the next; lies are told."""

import math
import struct
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.codec.entropy import entropy, frame
from umbel.aggregation.codec.entropy.coded_levels import Coding, Knowledge, LevelsCoder
from umbel.aggregation.codec.entropy.entropy_kernels import N_CLASSES
from umbel.aggregation.downlink.change import HEAD_BYTES, ChangeHead, ChangeWriter, apply_change
from umbel.aggregation.downlink.publishing import Spread
from umbel.aggregation.errors import LyingLength, MalformedUpdate, UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import InMemory, master_dtype, master_of, pieces, torch_dtype
from umbel.aggregation.types import LEVEL_MAX
from umbel.aggregation.update.wire import HEADER_BYTES, change_header

State = dict[str, Tensor]


def model(seed: int = 0, n_values: int = 1000) -> State:
    """Every kind of tensor, the first of them with so many values."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "a.float32": torch.randn(n_values, generator=rng),
        "b.bfloat16": torch.randn(50, 7, generator=rng).to(torch.bfloat16),
        "c.float16": torch.randn(300, generator=rng).to(torch.float16),
        "d.float64": torch.randn(200, generator=rng, dtype=torch.float64),
        "e.mask": torch.rand(40, generator=rng) < 0.5,
        "f.counter": torch.tensor(7),
        "g.empty": torch.zeros(0, 3),
        "h.bytes": torch.randint(0, 256, (9,), generator=rng, dtype=torch.uint8),
    }


LAYOUT = Layout.of_state(model())


def step_of(layout: Layout, master: State, public: State, in_rms: float = 1.0) -> float:
    spread, new, old = Spread(), InMemory(master), InMemory(public)
    for piece in pieces(layout):
        spread.add(piece.spec, piece.of(new, master_dtype(piece.spec)), piece.of(old, torch_dtype(piece.spec)))
    return spread.step(in_rms)


def written(layout: Layout, step: float, master: State, public: State) -> bytes:
    """A change; `public` is moved."""
    writer = ChangeWriter(layout, step, InMemory(master), InMemory(public))
    body = b"".join(writer.body())
    return writer.head() + body


def applied(layout: Layout, change: bytes, public: State, pieces: Iterable[bytes] | None = None) -> State:
    apply_change(layout, [change] if pieces is None else pieces, len(change), InMemory(public))
    return public


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(one: State, other: State) -> bool:
    return all(
        torch.equal(one[name].view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)) for name in one
    )


def stepped(master: State, seed: int, scale: float = 0.01) -> State:
    """A master copy some training later."""
    rng, after = torch.Generator().manual_seed(seed), State()
    for name, tensor in master.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=rng, dtype=torch.float64)
            after[name] = tensor.double().add(noise * scale).to(tensor.dtype)
        elif tensor.dtype == torch.bool:
            after[name] = tensor ^ (torch.rand(tensor.shape, generator=rng) < 0.1)
        else:
            after[name] = tensor + 3
    return after


@given(st.integers(0, 10), st.sampled_from([0.25, 1.0, 2.0]), st.integers(1, 5000))
def test_who_has_the_version_before_makes_the_same_model(seed: int, in_rms: float, size: int) -> None:
    public, master = model(seed), stepped(master_of(LAYOUT, model(seed)), seed + 1)
    mine, step = copied(public), step_of(LAYOUT, master, public, in_rms)
    change = written(LAYOUT, step, master, public)
    cut = [change[first : first + size] for first in range(0, len(change), size)]
    assert same(applied(LAYOUT, change, mine, cut), public)


def test_a_model_of_several_segments() -> None:
    public = model(n_values=2 * entropy.SEGMENT + 1000)
    layout, mine = Layout.of_state(public), copied(public)
    master = stepped(master_of(layout, public), 1)
    change = written(layout, step_of(layout, master, public), master, public)
    assert same(applied(layout, change, mine), public)
    assert len(change) < sum(tensor.nbytes for tensor in public.values()) / 12


@given(st.integers(0, 10), st.sampled_from([0.1, 1.0, 2.0]))
def test_what_is_published_is_half_a_step_from_its_master_at_most(seed: int, in_rms: float) -> None:
    public, master = model(seed), stepped(master_of(LAYOUT, model(seed)), seed + 1)
    step = step_of(LAYOUT, master, public, in_rms)
    written(LAYOUT, step, master, public)
    for spec in LAYOUT.owners():
        now, goal = public[spec.name], master[spec.name]
        if not spec.is_coded:
            assert torch.equal(now, goal)
            continue
        unit = torch.finfo(torch_dtype(spec)).eps * goal.double().abs().add(step) + torch.finfo(torch_dtype(spec)).tiny
        off = (now.double() - goal.double()).abs()
        assert bool((off <= 0.5001 * step + unit).all()), spec.name


def test_the_step_is_the_root_mean_square_of_what_is_to_move() -> None:
    before, after = {"w": torch.zeros(10_000)}, {"w": torch.randn(10_000, generator=torch.Generator().manual_seed(1))}
    layout = Layout.of_state(before)
    rms = float(after["w"].double().square().mean().sqrt())
    assert step_of(layout, after, before, 0.5) == pytest.approx(0.5 * rms, rel=0.005)
    order, reverse = Spread(), Spread()
    spec = layout.tensors[0]
    for part in after["w"].split(100):
        order.add(spec, part, torch.zeros(100))
    for part in reversed(after["w"].split(1000)):
        reverse.add(spec, part, torch.zeros(1000))
    assert order.step(1.0) == reverse.step(1.0) == step_of(layout, after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_left_behind_does_not_pile_up(dtype: torch.dtype) -> None:
    """Over 50 rounds of steps in one direction, each of a tenth of a step of the change: error feedback."""
    rng = torch.Generator().manual_seed(0)
    public = {"w": torch.randn(3000, generator=rng).to(dtype)}
    layout = Layout.of_state(public)
    master, off = master_of(layout, public), list[float]()
    direction = 1e-3 * torch.rand(3000, generator=rng)
    for _ in range(50):
        master = {"w": master["w"] + direction + 1e-2 * torch.randn(3000, generator=rng) * (torch.rand(3000) < 0.05)}
        step = step_of(layout, master, public)
        written(layout, step, master, public)
        unit = float(master["w"].abs().max()) * torch.finfo(dtype).eps
        off.append(float((public["w"].double() - master["w"].double()).abs().max()) / (step + unit))
    assert max(off) <= 0.51


def test_nothing_to_move_is_a_change_that_moves_nothing() -> None:
    public = model()
    before, master = copied(public), master_of(LAYOUT, public)
    step = step_of(LAYOUT, master, public)
    assert step == 2.0**-100
    change = written(LAYOUT, step, master, public)
    assert len(change) < 300
    assert same(public, before)
    assert same(applied(LAYOUT, change, copied(before)), before)


@pytest.mark.parametrize("state", [{"n": torch.tensor(3)}, {"w": torch.zeros(0)}, {"x": torch.tensor(1.5)}])
def test_the_smallest_models(state: State) -> None:
    layout = Layout.of_state(state)
    before, master = copied(state), stepped(master_of(layout, state), 1)
    change = written(layout, step_of(layout, master, state), master, state)
    assert same(applied(layout, change, before), state)


def test_values_at_the_ends_of_their_range_stay_finite_and_come_closer() -> None:
    top = torch.finfo(torch.float32).max
    public = {"w": torch.tensor([-top, top, 0.0, 1.0]), "h": torch.tensor([-65504.0, 1.0]).to(torch.float16)}
    layout = Layout.of_state(public)
    master = {"w": torch.tensor([top, -top, top, 1.0]), "h": torch.tensor([1e30, -1e30])}
    for _ in range(3):
        before = copied(public)
        change = written(layout, step_of(layout, master, public, 2.0), master, public)
        assert same(applied(layout, change, before), public)
        assert all(bool(tensor.isfinite().all()) for tensor in public.values())


def test_a_lone_large_value_is_cut_and_comes_later() -> None:
    public, master = {"w": torch.zeros(100)}, {"w": torch.zeros(100)}
    master["w"][77], step, layout = 1.0, 2.0**-16, Layout.of_state(public)
    written(layout, step, master, public)
    assert float(public["w"][77]) == LEVEL_MAX * step
    written(layout, step, master, public)
    written(layout, step, master, public)
    assert torch.equal(public["w"], master["w"])


def a_change(state: State | None = None) -> tuple[Layout, State, bytes]:
    public = state or {"a": torch.zeros(3000), "m": torch.tensor([True, False]), "n": torch.tensor(5)}
    layout = Layout.of_state(public)
    master = stepped(master_of(layout, public), 3)
    return layout, copied(public), written(layout, step_of(layout, master, public), master, public)


def put(change: bytes, offset: int, data: bytes) -> bytes:
    return change[:offset] + data + change[offset + len(data) :]


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, b"UMBX"),
        (5, b"\x01"),
        (8, struct.pack("<Q", 1)),
        (20, b"\x00\x00\x00\x00"),
        (48, struct.pack("<Q", 1 << 60)),
        (56, b"\x01"),
        (64, struct.pack("<f", 0.0)),
        (64, struct.pack("<f", math.nan)),
        (64, struct.pack("<f", math.inf)),
        (64, struct.pack("<f", -1.0)),
        (64, struct.pack("<f", 2.0**101)),
        (68, b"\x02"),
        (68, b"\x03"),
        (68, b"\x04"),
        (69, b"\x01"),
        (80, struct.pack("<Q", 1 << 62)),
        (80, struct.pack("<Q", 0)),
        (80, struct.pack("<Q", 5)),
        (88, b"\x00\x00\x00\x00"),
    ],
)
def test_a_change_with_a_lie_in_it_is_refused(offset: int, data: bytes) -> None:
    layout, public, change = a_change()
    assert put(change, offset, data) != change
    with pytest.raises((MalformedUpdate, LyingLength)):
        applied(layout, put(change, offset, data), public)


def test_a_change_that_is_cut_or_goes_on_is_refused() -> None:
    layout, public, change = a_change()
    for length in (0, 1, HEADER_BYTES, HEAD_BYTES, len(change) - 1):
        with pytest.raises(UpdateRefused):
            applied(layout, change[:length], copied(public))
    with pytest.raises(UpdateRefused):
        applied(layout, change + b"\x00", copied(public))
    with pytest.raises(LyingLength):
        apply_change(layout, [change, b"\x00"], len(change), InMemory(copied(public)))


def test_a_change_of_another_model_is_refused() -> None:
    _, _, change = a_change()
    other = {"a": torch.zeros(3001)}
    with pytest.raises(MalformedUpdate, match="does not fit its length or the model's layout"):
        applied(Layout.of_state(other), change, other)


def test_a_bool_stays_a_bool() -> None:
    public = {"m": torch.tensor([True, False, True])}
    layout = Layout.of_state(public)
    exact = b"".join(frame.compress([bytes([2, 0, 0])], 3))
    coding = Coding(Knowledge.NOTHING, (1,) * N_CLASSES)
    levels = b"".join(LevelsCoder(layout).write([torch.zeros(3, dtype=torch.int32)], coding, torch.empty(0), None))
    head = ChangeHead(1.0, coding, len(exact)).encode()
    change = change_header(layout, len(head + exact + levels)) + head + exact + levels
    with pytest.raises(MalformedUpdate, match="neither 0 nor 1"):
        applied(layout, change, public)
