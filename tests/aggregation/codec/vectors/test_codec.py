"""What holds for every codec: lengths, chunks, unbiasedness where it is claimed, and refusals of strangers' bytes."""

import re
import sys
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aggregation.codec.cases import (
    CASES,
    context_of,
    decoded,
    gaussian,
    heavy,
    layout_of,
    passed,
    payload_of,
    standard_errors,
)
from tests.suite.nights import at_night
from umbel.aggregation.codec.vectors.buckets import Sign
from umbel.aggregation.codec.vectors.codec import CHUNK_VALUES, VectorCodec
from umbel.aggregation.codec.vectors.eden import Eden
from umbel.aggregation.codec.vectors.registry import CODECS
from umbel.aggregation.errors import MalformedUpdate, UpdateRefused
from umbel.aggregation.kernels.packing import GROUP, packed_bytes

ANY = st.sampled_from(sorted(CASES)).map(CASES.__getitem__)
SIZES = st.one_of(st.integers(0, 40), st.integers(41, 6000))
KEYS = st.integers(0, (1 << 63) - 1)
EVERY = pytest.mark.parametrize("codec", CASES.values(), ids=CASES)


def read_or_refused(codec: VectorCodec, data: bytes, n_values: int) -> None:
    """Either finite values, as many as the plan says, or a refusal of the peers' kind."""
    with suppress(UpdateRefused):
        found = decoded(codec, [data], context_of(n_values))
        assert found.shape == (n_values,)
        assert bool(found.isfinite().all())


@given(ANY, SIZES, KEYS, st.integers(0, 1000))
def test_what_is_encoded_is_decoded_and_no_longer_than_said(
    codec: VectorCodec, n_values: int, key: int, index: int
) -> None:
    values, context = heavy(n_values), context_of(n_values, key, index)
    before = values.clone()
    payload = payload_of(codec, values, context)
    assert len(payload) in codec.payload_bytes(layout_of(n_values))
    found = decoded(codec, [payload], context)
    assert (found.dtype, found.shape) == (torch.float32, (n_values,))
    assert bool(found.isfinite().all())
    assert torch.equal(values, before)


@EVERY
@pytest.mark.parametrize("n_values", [CHUNK_VALUES, CHUNK_VALUES + 1])
def test_chunks_are_consecutive(codec: VectorCodec, n_values: int) -> None:
    values, context = gaussian(n_values), context_of(n_values)
    payload = payload_of(codec, values, context)
    assert len(payload) in codec.payload_bytes(layout_of(n_values))
    parts = list(codec.decode([payload], context))
    assert len(parts) > 1 or n_values == CHUNK_VALUES
    found = torch.cat(parts)
    assert found.shape == (n_values,)
    assert float(found.double() @ values.double()) > 0  # what came is what was sent, in its order


@given(ANY, st.integers(0, 3000), st.lists(st.integers(0, 5000), max_size=5))
def test_how_a_payload_is_cut_into_pieces_makes_no_difference(
    codec: VectorCodec, n_values: int, cuts: list[int]
) -> None:
    context = context_of(n_values)
    payload = payload_of(codec, gaussian(n_values), context)
    places = [0, *sorted(cut % (len(payload) + 1) for cut in cuts), len(payload)]
    pieces = [payload[a:b] for a, b in pairwise(places)]
    assert torch.equal(decoded(codec, pieces, context), decoded(codec, [payload], context))


@given(ANY, SIZES)
def test_no_change_is_decoded_as_no_change(codec: VectorCodec, n_values: int) -> None:
    assert not bool(passed(codec, torch.zeros(n_values), context_of(n_values)).any())


@EVERY
def test_a_payload_that_breaks_off_is_refused_wherever_it_does(codec: VectorCodec) -> None:
    payload = payload_of(codec, gaussian(51), context_of(51))
    for n_bytes in range(len(payload)):
        with pytest.raises(UpdateRefused):
            decoded(codec, [payload[:n_bytes]], context_of(51))


@given(ANY, SIZES, st.binary(min_size=1, max_size=9))
def test_a_payload_that_goes_on_is_refused(codec: VectorCodec, n_values: int, more: bytes) -> None:
    payload = payload_of(codec, gaussian(n_values), context_of(n_values))
    with pytest.raises(UpdateRefused):
        decoded(codec, [payload, more], context_of(n_values))


@EVERY
def test_a_payload_is_never_longer_than_said_whatever_its_form(codec: VectorCodec) -> None:
    """A Zstandard frame may begin with any number of empty blocks (three zero bytes each)."""
    n_zeros = codec.payload_bytes(layout_of(51))[-1] // 3 * 3 + 3
    payload = payload_of(codec, gaussian(51), context_of(51))
    for place in (0, 6, len(payload)):  # a short frame has a header of six bytes
        with pytest.raises(UpdateRefused):
            decoded(codec, [payload[:place], bytes(n_zeros), payload[place:]], context_of(51))


@EVERY
def test_a_flipped_bit_is_read_or_refused_wherever_it_is(codec: VectorCodec) -> None:
    payload = payload_of(codec, gaussian(51), context_of(51))
    for place in range(len(payload)):
        for bit in range(8) if place < 20 else [place % 8]:  # what a payload begins with decides most
            flipped = bytearray(payload)
            flipped[place] ^= 1 << bit
            read_or_refused(codec, bytes(flipped), 51)


@pytest.mark.parametrize("codec", [Sign(), Eden(1), Eden(3)])
def test_packed_values_are_written_in_one_way(codec: VectorCodec) -> None:
    """A bit that stands for no value is refused, and any other means something else."""
    payload = payload_of(codec, gaussian(51), context_of(51))
    before, n_refused = decoded(codec, [payload], context_of(51)), 0
    for bit in range(8 * (len(payload) - packed_bytes(64, getattr(codec, "bits", 1))), 8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert not torch.equal(decoded(codec, [bytes(flipped)], context_of(51)), before)
        except MalformedUpdate:
            n_refused += 1
    n_packed = 51 if isinstance(codec, Sign) else 64  # blocks of 16 hold 51 values
    assert n_refused == (GROUP - n_packed) * getattr(codec, "bits", 1)


@given(ANY, st.integers(0, 100), st.binary(max_size=400))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(codec: VectorCodec, n_values: int, data: bytes) -> None:
    read_or_refused(codec, data, n_values)


@EVERY
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_encoded(codec: VectorCodec, value: float) -> None:
    values = gaussian(100)
    values[7] = value
    with pytest.raises(ValueError, match="NaN or an infinity"):
        payload_of(codec, values, context_of(100))


@EVERY
def test_what_is_no_change_of_the_layout_is_not_encoded(codec: VectorCodec) -> None:
    for values in (gaussian(99), gaussian(100).double(), gaussian(100).view(10, 10)):
        with pytest.raises(ValueError, match=r"shape \[100\] and type torch\.float32, but has"):
            payload_of(codec, values, context_of(100))


@EVERY
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e37, 3e38])
def test_the_smallest_and_the_largest_numbers_are_encoded_or_named_too_large(codec: VectorCodec, size: float) -> None:
    too_large = ""
    try:
        payload = payload_of(codec, torch.full((300,), size), context_of(300))
    except ValueError as error:
        payload, too_large = b"", str(error)
    read_or_refused(codec, payload, 300)
    assert not too_large or (size > 1e36 and "too large" in too_large)


@EVERY
def test_the_same_plan_makes_the_same_bytes(codec: VectorCodec) -> None:
    assert payload_of(codec, heavy(5000), context_of(5000)) == payload_of(codec, heavy(5000), context_of(5000))


BY_CHANCE = [
    "eden, 1 bit", "eden, 5 bits", "ternary", "qsgd", "qsgd, two planes", "mask", "lowrank, sketched",
]  # fmt: skip


@pytest.mark.parametrize("name", ["qsgd", "lowrank, sketched", *at_night("ternary", "qsgd, two planes", "mask")])
def test_the_mean_over_many_keys_is_the_change_itself(name: str) -> None:
    """EDEN has a test of its own: it takes larger blocks."""
    values, n_keys = heavy(500, 5), 1000  # what is rare needs many
    found = torch.stack([passed(CASES[name], values, context_of(500, key)) for key in range(n_keys)])
    deviations = standard_errors(found, values)
    assert float(deviations.max()) < 5
    assert float(deviations.square().mean()) < 1.15


@pytest.mark.parametrize("name", [name for name in BY_CHANCE if not CASES[name].is_linear])
def test_each_client_has_chances_of_its_own(name: str) -> None:
    first, second = (passed(CASES[name], heavy(5000), context_of(5000, cohort_index=index)) for index in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name, codec in CASES.items() if codec.is_linear])
def test_the_sum_of_payloads_is_the_payload_of_the_sum(name: str) -> None:
    """As vectors of float32, between clients of one cohort."""
    codec, changes = CASES[name], (heavy(5000), gaussian(5000, 8))
    payloads = [payload_of(codec, change, context_of(5000, 3, index)) for index, change in enumerate(changes)]
    total = sum(torch.frombuffer(bytearray(payload), dtype=torch.float32) for payload in payloads)
    assert isinstance(total, torch.Tensor)
    found = decoded(codec, [total.numpy().tobytes()], context_of(5000, 3))
    torch.testing.assert_close(found, sum(passed(codec, change, context_of(5000, 3)) for change in changes))


@pytest.mark.parametrize("make", CODECS.values())
def test_a_codec_says_of_itself_what_it_is_and_costs(make: type[VectorCodec]) -> None:
    says = f"{sys.modules[make.__module__].__doc__} {make.__doc__}"
    assert ("**Linear**" in says, "**Not linear**" in says) == (make().is_linear, not make().is_linear)
    assert re.search(r"\*\*(un)?biased\*\*", says, re.IGNORECASE)
    assert "Stateless." in says
    assert "**Cost**" in says


def test_every_registered_codec_is_tried_here_and_can_be_made_by_its_name() -> None:
    assert {type(codec) for codec in CASES.values()} == set(CODECS.values())
    for make in CODECS.values():
        assert make() == make()
        assert hash(make()) == hash(make())
