"""One update, decoded alone, is the change of its client, within the codec's error; any other bytes are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.aggregation.codec.cases import gaussian, relative_error
from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.errors import LyingLength, UpdateRefused, WrongCodec
from umbel.aggregation.model.layout import INTEGER_UNIT, Layout
from umbel.aggregation.plans.codec import Grid

LAYOUT = Layout.of_state(
    {
        "bn.num_batches_tracked": torch.zeros((), dtype=torch.int64),
        "bn.running_mean": torch.zeros(3),
        "w.bias": torch.zeros(40),
        "w.weight": torch.zeros(40, 50),
    }
)
EXACT = 4  # values before the weights
GRID = Grid.finest(max_abs=64.0, total_weight_max=1)
SECTIONS = {
    "float32": CodecSection("float32"),
    "integer": CodecSection("integer", step=0.25, first_norm=45.0),
    "eden": CodecSection("eden", bits=6),
    "qsgd": CodecSection("qsgd", levels=64),
    "planes": CodecSection("planes"),
}
ERRORS = {"float32": 1e-12, "integer": 0.25**2 / 6, "eden": 2e-3, "qsgd": 0.13, "planes": 1e-12}


def codec_of(name: str, key: int = 7) -> UpdateCodec:
    return codec_for(SECTIONS[name].first(LAYOUT.n_values, key), GRID, LAYOUT)


def change() -> Tensor:
    """Eight batches, a running mean that moved far, and weights."""
    return torch.cat([torch.tensor([8 * INTEGER_UNIT, 3.0, -40.0, 0.5]), gaussian(LAYOUT.n_values - EXACT)])


def written(codec: UpdateCodec, values: Tensor, rank: int = 0) -> bytes:
    return b"".join(bytes(piece) for piece in codec.encode(lambda: iter([values.clone()]), rank))


def read(codec: UpdateCodec, update: bytes, rank: int = 0) -> Tensor:
    return read_one(codec, update, rank).change.mean_slice(0, LAYOUT.n_values)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("rank", [0, 5])
def test_it_is_the_change_within_the_codecs_error(name: str, rank: int) -> None:
    codec, values = codec_of(name), change()
    found = read(codec, written(codec, values, rank), rank)
    assert torch.equal(found[:EXACT], values[:EXACT].double()), "exact tensors are not rounded"
    assert relative_error(found[EXACT:], values[EXACT:]) <= ERRORS[name]


@pytest.mark.parametrize("name", ["integer", "eden", "qsgd"])
def test_it_is_right_on_average_over_keys(name: str) -> None:
    """The mean of n independent readings is n times nearer, in squares; a bias would stay."""
    values, n_keys = change(), 16
    codecs = [codec_of(name, key) for key in range(n_keys)]
    found = torch.stack([read(codec, written(codec, values)) for codec in codecs])
    one = relative_error(found[0, EXACT:], values[EXACT:])
    assert 0 < relative_error(found.mean(0)[EXACT:], values[EXACT:]) < 2 * one / n_keys


def test_the_root_mean_square_is_told_by_the_codec_that_measures_it() -> None:
    for name in SECTIONS:
        rms = read_one(codec_of(name), written(codec_of(name), change()), 0).rms
        if name == "integer":
            assert rms == pytest.approx(float(change()[EXACT:].square().mean().sqrt()), rel=1e-2)
        else:
            assert rms is None


@pytest.mark.parametrize("name", SECTIONS)
def test_a_wrong_length_is_refused_before_anything_is_read(name: str) -> None:
    codec = codec_of(name)
    for update in (b"", bytes(codec.update_bytes[0] - 1), bytes(codec.update_bytes[-1] + 1)):
        with pytest.raises(
            LyingLength, match=rf"the update has {len(update)} bytes; an update of this model takes \d+"
        ):
            read_one(codec, update, 0)


def test_the_update_of_another_rank_is_refused() -> None:
    codec = codec_of("integer")
    with pytest.raises(WrongCodec, match="this client's rank is 1, but the update states 0"):
        read_one(codec, written(codec, change(), 0), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
@given(data=st.data())
def test_whatever_bytes_arrive_are_read_or_refused(name: str, data: st.DataObject) -> None:
    codec = codec_of(name)
    update = bytearray(written(codec, change()))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(update) - 1))
        match data.draw(st.sampled_from(["byte", "cut", "noise"])):
            case "byte":
                update[place] = data.draw(st.integers(0, 255))
            case "cut":
                del update[max(1, place) :]
            case _:
                update[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8))
    try:
        found = read(codec, bytes(update))
    except UpdateRefused:
        return
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) <= GRID.max_abs + 1
