"""A model in pieces: every value once, in order, however it is cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.model.layout import PIECE_VALUES, Layout
from umbel.aggregation.model.state import InMemory, Piece, pieces, segments


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
