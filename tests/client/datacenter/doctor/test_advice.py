"""What limits a job, by the times of its steps, and how often to add up in how many bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.client.datacenter.doctor.advice import (
    CODECS,
    RARE,
    TARGET,
    Advice,
    StepTimes,
    advised,
    least_every,
    utilisation,
)
from umbel.client.datacenter.loops.attach import CodecName

SECONDS = st.floats(1e-6, 1e3)
SUMS: st.SearchStrategy[dict[CodecName, float]] = st.dictionaries(st.sampled_from(CODECS[:3]), SECONDS, min_size=1)


def test_shares_are_those_of_the_three_ways() -> None:
    times = StepTimes(normal_s=1.0, alone_s=0.4, synthetic_s=0.1)
    assert times.communication_share == pytest.approx(0.6)
    assert times.input_share == pytest.approx(0.75)
    assert times.parts == pytest.approx({"communication": 0.6, "input": 0.3, "compute": 0.1})
    assert times.bound == "communication"
    assert StepTimes(1.0, 0.9, 0.1).bound == "input"
    assert StepTimes(1.0, 0.9, 0.8).bound == "compute"
    assert StepTimes(1.0, 0.9, None).parts == pytest.approx({"communication": 0.1, "input": 0.0, "compute": 0.9})


@given(SECONDS, SECONDS, SECONDS | st.none())
def test_parts_add_up_also_if_noise_makes_the_whole_shorter(
    normal_s: float, alone_s: float, synthetic_s: float | None
) -> None:
    parts = StepTimes(normal_s, alone_s, synthetic_s).parts
    assert sum(parts.values()) == pytest.approx(1.0)
    assert min(parts.values()) >= 0


@given(SECONDS, SECONDS)
def test_the_fewest_steps_that_reach_the_target_are_found(alone_s: float, sum_s: float) -> None:
    every = least_every(alone_s, sum_s)
    assert utilisation(every, alone_s, sum_s) >= TARGET - 1e-6
    assert every == 1 or utilisation(every - 1, alone_s, sum_s) < TARGET


@given(SECONDS, SUMS)
def test_advice_reaches_the_target_with_nearly_the_fewest_steps(alone_s: float, sums: dict[CodecName, float]) -> None:
    found = advised(alone_s, sums)
    assert found.utilisation >= TARGET - 1e-6
    assert found.every <= 1.25 * min(least_every(alone_s, one) for one in sums.values())


def test_of_codecs_that_are_about_as_fast_the_one_with_most_bits_is_advised() -> None:
    assert advised(1.0, {"float32": 0.01, "8bit": 0.005, "4bit": 0.002}) == Advice(1, "float32", 1 / 1.01)
    assert (advised(1.0, {"float32": 8.0, "8bit": 2.1, "4bit": 2.0})).codec == "8bit"
    assert (advised(1.0, {"float32": 8.0, "8bit": 2.1, "4bit": 1.0})).codec == "4bit"


def test_two_bits_are_for_rare_means_alone() -> None:
    assert advised(1.0, {"4bit": 2.0, "2bit": 1e-9}).codec == "4bit"
    rare = advised(1.0, {"4bit": 20.0, "2bit": 10.0})
    assert (rare.codec, rare.every) == ("2bit", 90)
    assert advised(1.0, {"2bit": 1e-9}).every == RARE
