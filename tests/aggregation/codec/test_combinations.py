"""Which codecs may be added up unread: each that may not is refused with the reason."""

import pytest
import torch

from tests.aggregation.codec.cases import context_of, decoded, gaussian, payload_of
from umbel.aggregation.codec.section import why_not_summable
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
    Codec.SIGN: "its own scales for positive and negative values",
    Codec.TERNARY: "levels of different scales",
    Codec.QSGD: "its own norms",
    Codec.TOPK: "its own coordinates",
    Codec.MASK: "with bfloat16 each client rounds for itself",
    Codec.PLANES: "compressed bytes cannot be added",
}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.codec.name} {dict(plan.parameters)}")
def test_a_codec_passes_if_it_is_linear_and_is_refused_with_why_if_not(plan: CodecPlan) -> None:
    assert REASONS[plan.codec] in why_not_summable(plan) if plan not in SUMMABLE else not why_not_summable(plan)


def test_every_codec_has_been_thought_of() -> None:
    assert {plan.codec for plan in PLANS} == set(Codec) - {Codec.MASKED}, "what is masked is planned as integers"
    assert {plan.codec for plan in SUMMABLE} == {Codec.MASK, Codec.LOWRANK}


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
