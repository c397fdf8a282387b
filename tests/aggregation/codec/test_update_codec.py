"""The plain updates of float32 values: what a canary round reads of them."""

import pytest
import torch

from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.update.wire import HEADER_BYTES

LAYOUT = Layout.of_state({"w": torch.zeros(4)})
CODEC = codec_for(CodecPlan(), Grid.finest(max_abs=8.0, total_weight_max=1000), LAYOUT)


def written(*values: float) -> bytes:
    return b"".join(bytes(piece) for piece in CODEC.encode(lambda: iter([torch.tensor(values)]), 0))


@pytest.mark.parametrize("values", [(0.5, -6.25, 1.0, 0.0), (0.5, 6.25, -1.0, 0.0)])
def test_the_largest_change_is_large_in_either_direction(values: tuple[float, ...]) -> None:
    update = written(*values)
    largest = CODEC.largest_change(update[:HEADER_BYTES], [update[HEADER_BYTES:]], 0)
    assert largest == pytest.approx(6.25, abs=1e-3)


def test_the_largest_of_several_pieces_counts() -> None:
    update = written(-3.0, 0.0, 1.0, 2.0)
    pieces = [update[HEADER_BYTES : HEADER_BYTES + 8], update[HEADER_BYTES + 8 :]]
    assert CODEC.largest_change(update[:HEADER_BYTES], pieces, 0) == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    ("cut", "words"), [(4, "has 3 values, but the model's layout has 4"), (2, "ends in the middle of a value")]
)
def test_an_update_that_is_short_is_refused(cut: int, words: str) -> None:
    update = written(1.0, 1.0, 1.0, 1.0)
    with pytest.raises(LyingLength, match=words):
        list(CODEC.integers(update[:HEADER_BYTES], [update[HEADER_BYTES:-cut]], 0))
