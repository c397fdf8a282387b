"""The head of codec 1: what is written is read, and what could not have been written is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.codec.entropy.coded_levels import LEVELS_HEAD_BYTES, Coding, Knowledge, LevelsHead
from umbel.aggregation.codec.entropy.entropy_kernels import N_CLASSES, WIDTHS
from umbel.aggregation.errors import MalformedUpdate

FLOATS = st.floats(allow_nan=False, width=32)


@given(
    st.builds(
        LevelsHead,
        FLOATS,
        FLOATS,
        st.integers(0, (1 << 32) - 1),
        st.builds(Coding, st.sampled_from(Knowledge), st.tuples(*[st.sampled_from(WIDTHS)] * N_CLASSES)),
    )
)
def test_what_is_written_is_read(head: LevelsHead) -> None:
    assert LevelsHead.decode(head.encode()) == head


@given(st.binary(min_size=LEVELS_HEAD_BYTES, max_size=LEVELS_HEAD_BYTES))
def test_any_head_is_the_only_way_to_write_it_or_refused(data: bytes) -> None:
    if data[12] <= 3 and not any(data[13:16]):
        assert LevelsHead.decode(data).encode()[8:] == data[8:]
        return
    with pytest.raises(MalformedUpdate):
        LevelsHead.decode(data)
