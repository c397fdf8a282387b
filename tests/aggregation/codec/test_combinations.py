"""Which codecs may be added up unread: each that may not is refused with why, and what to use."""

import pytest
import torch

from tests.aggregation.codec.cases import context_of, decoded, gaussian, payload_of
from umbel.aggregation.codec.combinations import Adding, require_summable
from umbel.aggregation.codec.vectors.registry import CODECS, vector_codec
from umbel.aggregation.plans.codec import Codec, CodecPlan

PLANS = [
    CodecPlan(),
    CodecPlan(Codec.INTEGER, 1.0),
    *(CodecPlan(codec) for codec in CODECS),
    CodecPlan(Codec.MASK, parameters={"precision": "bfloat16"}),
    CodecPlan(Codec.LOWRANK, parameters={"mode": "sketched"}),
]
SUMMABLE = [plan for plan in PLANS if plan.codec in CODECS and vector_codec(plan.codec, plan.parameters).is_linear]
REASONS = {
    Codec.FLOAT32: "depend on their order",
    Codec.INTEGER: "sent entropy coded",
    Codec.EDEN: "its own rotation",
    Codec.SIGN: "its own scales for the two sides",
    Codec.TERNARY: "levels of different scales",
    Codec.QSGD: "its own norms",
    Codec.TOPK: "its own coordinates",
    Codec.MASK: "with bfloat16 each client rounds for itself",
    Codec.PLANES: "compressed bytes do not add up",
}


@pytest.mark.parametrize("adding", Adding)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.codec.name} {dict(plan.parameters)}")
def test_a_codec_passes_if_it_is_linear_and_is_refused_with_why_if_not(plan: CodecPlan, adding: Adding) -> None:
    if plan in SUMMABLE:
        require_summable(plan, adding)
        return
    with pytest.raises(
        ValueError, match=f"^{plan.codec.name.lower()} does not work with {adding}: .*; use .+"
    ) as refused:
        require_summable(plan, adding)
    assert refused.match(REASONS[plan.codec])


def test_every_codec_has_been_thought_of() -> None:
    assert {plan.codec for plan in PLANS} == set(Codec) - {Codec.MASKED}, "what is masked is planned as integers"
    assert {plan.codec for plan in SUMMABLE} == {Codec.MASK, Codec.LOWRANK}


def test_instead_of_others_there_are_the_rotated_integers() -> None:
    with pytest.raises(ValueError, match=r"use the integer codec rotated, modulo 2\^m$"):
        require_summable(CodecPlan(Codec.TOPK), Adding.SECURE)
    with pytest.raises(ValueError, match=r"use the integer codec rotated, in bytes or lanes$"):
        require_summable(CodecPlan(Codec.TOPK), Adding.ALL_REDUCE)


def test_a_mask_of_bfloat16_is_sent_to_what_goes_in_its_place() -> None:
    """Masked rounds add up integers alone, so they would refuse the mask with float32, too."""
    halves = CodecPlan(Codec.MASK, parameters={"precision": "bfloat16"})
    with pytest.raises(ValueError, match=r"use the mask with float32$"):
        require_summable(halves, Adding.ALL_REDUCE)
    with pytest.raises(ValueError, match=r"use the integer codec rotated, modulo 2\^m$"):
        require_summable(halves, Adding.SECURE)


@pytest.mark.parametrize("plan", SUMMABLE, ids=lambda plan: f"{plan.codec.name} {dict(plan.parameters)}")
def test_sums_of_what_may_be_added_up_decode_to_the_sum(plan: CodecPlan) -> None:
    """What is let through is linear indeed: payloads are float32 vectors, added position by position."""
    n_values, codec = 3000, vector_codec(plan.codec, plan.parameters)
    contexts = [context_of(n_values, cohort_index=rank) for rank in range(3)]
    payloads = [payload_of(codec, gaussian(n_values, rank), contexts[rank]) for rank in range(3)]
    added = torch.stack([torch.frombuffer(bytearray(payload), dtype=torch.float32) for payload in payloads]).sum(0)
    each = torch.stack([decoded(codec, [payload], contexts[0]) for payload in payloads])
    found = decoded(codec, [added.numpy().tobytes()], contexts[0])
    torch.testing.assert_close(found, each.sum(0), rtol=1e-4, atol=1e-4)
