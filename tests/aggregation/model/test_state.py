"""A model in pieces: every value once, in order, however it is cut; the values that no codec rounds, likewise."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.model.layout import PIECE_VALUES, Layout, TensorSpec
from umbel.aggregation.model.state import ExactPlaces, InMemory, Piece, pieces, segments


def layout_of(sizes: list[int]) -> Layout:
    return Layout.of_state({f"t{i:03}": torch.zeros(size) for i, size in enumerate(sizes)})


def places(found: list[Piece]) -> list[int]:
    return [piece.spec.offset + piece.first + i for piece in found for i in range(piece.n_values)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 60))
def test_segments_hold_every_value_once_in_the_order_of_the_vector(sizes: list[int], size: int) -> None:
    layout = layout_of(sizes)
    found = list(segments(layout, size))
    assert [place for segment in found for place in places(segment)] == list(range(layout.n_values))
    lengths = [sum(piece.n_values for piece in segment) for segment in found]
    assert all(length == size for length in lengths[:-1])
    assert all(0 < length <= size for length in lengths[-1:])


def test_pieces_are_short_and_hold_every_value_once() -> None:
    layout = layout_of([3, 2 * PIECE_VALUES + 5, 0, PIECE_VALUES])
    found = list(pieces(layout))
    assert max(piece.n_values for piece in found) == PIECE_VALUES
    assert places(found) == list(range(layout.n_values))


def test_a_piece_is_read_and_written_where_it_stands() -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(True)}
    values, spec = InMemory(state), Layout.of_state(state).tensors[0]
    piece = Piece(spec, 2, 3)
    read = piece.of(values, torch.float32)
    assert read.tolist() == [2, 3, 4]
    read.zero_()
    assert state["a"].tolist() == [[0, 1, 2], [3, 4, 5]], "what was read is a copy"
    values.write("a", 2, read)
    assert state["a"].tolist() == [[0, 1, 0], [0, 0, 5]]


LAYOUT = Layout(
    (
        TensorSpec("a.running_mean", (3,), "float32", 0),
        TensorSpec("b.weight", (4,), "float32", 3),
        TensorSpec("c.count", (2,), "int64", 7),
        TensorSpec("d.none", (0,), "int64", 9),
        TensorSpec("e.weight", (5,), "float32", 9),
        TensorSpec("f.mask", (2,), "bool", 14),
    )
)
PLACES = ExactPlaces(LAYOUT)
EXACT = [0, 1, 2, 7, 8, 14, 15]
VALUES = torch.arange(1.0, 17.0)


@given(st.integers(1, 16))
def test_what_is_taken_out_of_any_pieces_is_all_that_is_exact(size: int) -> None:
    values, taken = VALUES.clone(), b""
    for first in range(0, 16, size):
        taken += PLACES.taken_out(values[first : first + size], first)
    assert PLACES.n_values == len(EXACT)
    assert taken == VALUES[EXACT].numpy().tobytes()
    rounded = [i for i in range(16) if i not in EXACT]
    assert not values[EXACT].any()
    assert torch.equal(values[rounded], VALUES[rounded])


@given(st.integers(1, 16), st.sampled_from([torch.int64, torch.float32]))
def test_put_back_it_stands_where_it_stood_and_nothing_given_is_changed(size: int, dtype: torch.dtype) -> None:
    zeros, exact = torch.zeros(16, dtype=torch.int32 if dtype == torch.int64 else dtype), VALUES[EXACT].to(dtype)
    whole = [PLACES.put_back(zeros[first : first + size], first, exact) for first in range(0, 16, size)]
    assert torch.equal(torch.cat(whole).nonzero().view(-1), torch.tensor(EXACT))
    assert torch.equal(torch.cat(whole)[EXACT], exact)
    assert not zeros.any()


def test_where_there_are_none_nothing_is_copied() -> None:
    levels = torch.ones(4, dtype=torch.int32)
    assert PLACES.put_back(levels, 3, torch.ones(7, dtype=torch.int64)) is levels
