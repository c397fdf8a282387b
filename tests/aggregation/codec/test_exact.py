"""Values that no codec rounds, taken out of a vector and put back, however it is cut into pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.exact import ExactPlaces
from umbel.aggregation.model.layout import Layout, TensorSpec

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
