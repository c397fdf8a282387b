"""Masked updates that are not as they should be, and sums at their very edge."""

from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.aggregation.secagg.attacks.adversary import heard
from tests.aggregation.secagg.federation import Federation
from tests.aggregation.secagg.transcript import COMPOSITION, Given
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.errors import LyingLength, UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.plans.masks import NoisePlan
from umbel.aggregation.privacy.section import noisy_bits
from umbel.aggregation.secagg.crypto.signing import Label
from umbel.aggregation.secagg.errors import ForgedMessage
from umbel.aggregation.secagg.masked_input import MaskedReader, masked_input, unmasked
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.session import check_signature
from umbel.aggregation.types import LEVEL_MAX
from umbel.aggregation.update.wire import HEADER_BYTES, header_for

READER = MaskedReader(COMPOSITION)
N_BYTES = READER.update_bytes.start


def sent(federation: Federation, index: int, levels: Tensor, words: Tensor, composition: Composition) -> bytes:
    """A client's update, signed as it is sent."""
    contribution = Given(composition, words, torch.zeros(0), bytes(32), given=levels)
    update = b"".join(bytes(piece) for piece in masked_input(contribution, federation.clients[index]))
    federation.clients[index].sign_input(bytes(32))
    return update


def zeros_of(composition: Composition) -> tuple[Tensor, Tensor]:
    return (
        torch.zeros(composition.n_levels, dtype=torch.int32),
        torch.zeros(composition.n_words, dtype=torch.int64),
    )


def read(update: bytes, size: int = 100) -> list[Tensor]:
    pieces = (update[at : at + size] for at in range(HEADER_BYTES, len(update), size))
    return list(READER.integers(update[:HEADER_BYTES], pieces, 0))


def joined(parts: list[Tensor]) -> list[int]:
    return [int(number) for part in parts for number in part]


UPDATE = sent(heard(4), 0, *zeros_of(COMPOSITION), COMPOSITION)


@pytest.mark.parametrize("size", [1, 7, 64, 703, 704, 705, 10_000])
def test_an_update_may_come_in_pieces_of_any_length(size: int) -> None:
    assert joined(read(UPDATE, size)) == joined(read(UPDATE))


@pytest.mark.parametrize("n_bytes", [0, 1, 87, 88, N_BYTES - HEADER_BYTES - 1])
def test_an_update_that_ends_too_early_is_refused(n_bytes: int) -> None:
    with pytest.raises(LyingLength, match="the payload ends too early"):
        read(UPDATE[: HEADER_BYTES + n_bytes])


@pytest.mark.parametrize("n_bytes", [1, 8, 4096])
def test_an_update_that_goes_on_is_refused(n_bytes: int) -> None:
    with pytest.raises(LyingLength, match="bytes after the end of the payload"):
        read(UPDATE + bytes(n_bytes))


def test_an_update_that_never_ends_is_refused_where_it_should_have() -> None:
    """Nothing is expanded: a masked update has no compression that could be a bomb."""
    endless = chain([UPDATE[HEADER_BYTES:]], repeat(bytes(1 << 16)))
    with pytest.raises(LyingLength):
        list(READER.integers(UPDATE[:HEADER_BYTES], endless, 0))


HEADERS = {
    "another codec": header_for(COMPOSITION.layout, Codec.FLOAT32, N_BYTES - HEADER_BYTES).encode(),
    "another model": header_for(Layout.of_state({"x": torch.zeros(24)}), Codec.MASKED, N_BYTES - HEADER_BYTES).encode(),
    "another length": header_for(COMPOSITION.layout, Codec.MASKED, N_BYTES).encode(),
    "no header": bytes(HEADER_BYTES),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_an_update_with_another_header_is_refused(header: bytes) -> None:
    with pytest.raises(UpdateRefused):
        read(header + UPDATE[HEADER_BYTES:])


def test_a_client_signs_its_vector_and_with_whom_it_is_masked() -> None:
    """Not another body, not other companions, not another's, and not as another kind of message."""
    federation = heard(5)
    session, body = federation.session, bytes(range(32))
    signature = federation.clients[1].sign_input(body)
    payload = session.input_payload(federation.shared, body)

    def check(index: int, label: Label, payload: bytes) -> None:
        check_signature(federation.context, index, label, session.digest, payload, signature)

    check(1, Label.MASKED_INPUT, payload)
    for refused in (
        (1, Label.MASKED_INPUT, session.input_payload(federation.shared, bytes(32))),
        (1, Label.MASKED_INPUT, session.input_payload(federation.shared[:4], body)),
        (2, Label.MASKED_INPUT, payload),
        (1, Label.CONSISTENCY, payload),
        (1, Label.SHARE_KEYS, payload),
    ):
        with pytest.raises(ForgedMessage):
            check(*refused)


# --- sums at the edge -------------------------------------------------------------------------------------------------


def summed(
    composition: Composition, levels: list[Tensor], words: list[Tensor], n_gone: int = 0
) -> tuple[Tensor, Tensor]:
    """What comes out of a round in which these are masked and sent as bytes; others have shared keys, and gone."""
    federation = heard(len(levels) + n_gone)
    reader = MaskedReader(composition)
    total = reader.new_sum()
    for index, (own_levels, own_words) in enumerate(zip(levels, words, strict=True)):
        update = sent(federation, index, own_levels, own_words, composition)
        total.add(reader.integers(update[:HEADER_BYTES], [update[HEADER_BYTES:]], index), 1)
    federation.inputs = tuple(range(len(levels)))
    federation.agree()
    found, found_words = unmasked(total, composition, federation.reveal())
    return lift(found, composition.secure.bits), found_words


@pytest.mark.parametrize("sign", [1, -1])
def test_when_everybody_is_at_the_edge_the_sum_is_exact(sign: int) -> None:
    """All levels at their greatest, in as many bits as a round without experience takes; words at half of 2^63."""
    composition = replace(COMPOSITION, secure=COMPOSITION.secure.unwrapping())
    levels = torch.full((composition.n_levels,), sign * LEVEL_MAX, dtype=torch.int32)
    words = torch.full((composition.n_words,), sign * (1 << 60), dtype=torch.int64)
    found, found_words = summed(composition, [levels] * 4, [words] * 4)
    assert found.tolist() == (4 * levels).tolist()
    assert found_words.tolist() == (4 * words).tolist()


def test_with_one_bit_less_it_would_wrap() -> None:
    secure = COMPOSITION.secure.unwrapping()
    composition = replace(COMPOSITION, secure=replace(secure, bits=secure.bits - 1))
    levels = torch.full((composition.n_levels,), LEVEL_MAX, dtype=torch.int32)
    found, _ = summed(composition, [levels] * 4, [torch.zeros(composition.n_words, dtype=torch.int64)] * 4)
    assert found.tolist() != (4 * levels).tolist()


def test_a_cohort_whose_sum_no_32_bits_hold_is_refused_before_it_begins() -> None:
    noise = NoisePlan(2.0**34, 1 << 20, 4096, 3)
    with pytest.raises(ValueError, match="take a larger step"):
        noisy_bits(noise, inverse_step=1.0, sigma_sum=0.0, n_clients=60_000_000)
    with pytest.raises(ValueError, match="bits must lie between"):
        replace(COMPOSITION.secure, bits=33)


@settings(max_examples=20)
@given(data=st.data(), bits=st.integers(1, 32), n=st.integers(3, 6), n_values=st.integers(1, 700))
def test_a_masked_sum_is_right_modulo_its_bits(data: st.DataObject, bits: int, n: int, n_values: int) -> None:
    """As bytes, in every width, whatever the vectors are."""
    layout = Layout.of_state({"weight": torch.zeros(n_values)})
    secure = replace(COMPOSITION.secure, bits=bits, clients_max=n)
    composition = replace(COMPOSITION, layout=layout, secure=secure)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    n_gone = data.draw(st.integers(0, n - (2 * n // 3 + 1)))
    shape = (n - n_gone,)
    levels = torch.randint(-(2**31), 2**31, (*shape, composition.n_levels), dtype=torch.int32, generator=draw)
    words = torch.randint(-(2**63), 2**63 - 1, (*shape, composition.n_words), dtype=torch.int64, generator=draw)
    found, found_words = summed(composition, list(levels), list(words), n_gone)
    assert torch.equal(found, lift(levels.sum(0, dtype=torch.int32), bits))
    assert torch.equal(found_words, words.sum(0))
