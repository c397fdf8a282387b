"""Which codecs may be added up unread: each that may not is refused with why, and what to use."""

import pytest
import torch

from tests.aggregation.codec.cases import CASES, context_of, decoded, gaussian, payload_of
from umbel.aggregation.codec.codec import VectorCodec
from umbel.aggregation.codec.combinations import Adding, require_summable
from umbel.aggregation.codec.registry import CODECS
from umbel.aggregation.wire import Codec

ALL: dict[str, VectorCodec] = {**CASES, **{name: make() for name, make in CODECS.items()}}
REASONS = {
    "eden": "rotates with a key of its own",
    "planes": "compressed bytes do not add up",
    "qsgd": "norms of its own",
    "sign": "scale of each client's own",
    "ternary": "scales of its own",
    "topk": "coordinates of its own choosing",
}


@pytest.mark.parametrize("adding", Adding)
@pytest.mark.parametrize("name", ALL)
def test_a_codec_is_refused_unless_it_is_linear(name: str, adding: Adding) -> None:
    codec = ALL[name]
    if codec.is_linear:
        require_summable(codec, adding)
        return
    with pytest.raises(
        ValueError, match=rf"^{type(codec).__name__} does not work with {adding}: .+; use the .+"
    ) as refused:
        require_summable(codec, adding)
    assert "cannot be decoded" not in str(refused.value)  # the sentence of a codec that nobody has thought of


@pytest.mark.parametrize("name", CODECS)
def test_the_sentence_says_why(name: str) -> None:
    codec = CODECS[name]()
    if codec.is_linear:
        assert name in ("lowrank", "mask")
        return
    with pytest.raises(ValueError, match=REASONS[name]):
        require_summable(codec, Adding.SECURE)


@pytest.mark.parametrize("kind", Codec)
def test_what_has_a_number_on_the_wire_is_refused_too(kind: Codec) -> None:
    with pytest.raises(ValueError, match=r"modulo 2\^m"):
        require_summable(kind, Adding.SECURE)
    with pytest.raises(ValueError, match="bytes or lanes"):
        require_summable(kind, Adding.ALL_REDUCE)


@pytest.mark.parametrize("name", [name for name, codec in ALL.items() if codec.is_linear])
def test_sums_of_what_may_be_added_up_decode_to_the_sum(name: str) -> None:
    """What is let through is linear indeed: payloads are float32 vectors, added position by position."""
    n_values, codec = 3000, ALL[name]
    context = [context_of(n_values, cohort_index=rank) for rank in range(3)]
    payloads = [payload_of(codec, gaussian(n_values, rank), context[rank]) for rank in range(3)]
    added = torch.stack([torch.frombuffer(bytearray(payload), dtype=torch.float32) for payload in payloads]).sum(0)
    each = torch.stack([decoded(codec, [payload], context[0]) for payload in payloads])
    found = decoded(codec, [added.numpy().tobytes()], context[0])
    torch.testing.assert_close(found, each.sum(0), rtol=1e-4, atol=1e-4)
