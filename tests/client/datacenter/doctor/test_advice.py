"""What limits a job, by the times of its steps, and how often to add up in how many bits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.collective.cost_models import LinkModel, ring
from umbel.client.datacenter.doctor.advice import (
    CODECS,
    RARE,
    TARGET,
    Advice,
    RefutedAdvice,
    StepTimes,
    advised,
    advised_again,
    cost_of_sum,
    falls_short,
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


@given(SECONDS, SUMS, st.floats(0.01, 1.0))
def test_after_a_trial_the_advice_reaches_the_target_with_the_sum_that_the_trial_has_shown(
    alone_s: float, sums: dict[CodecName, float], measured: float
) -> None:
    first = advised(alone_s, sums)
    shown_s = cost_of_sum(first.every, alone_s, measured)
    assert utilisation(first.every, alone_s, shown_s) == pytest.approx(measured)
    again = advised_again(RefutedAdvice(first, measured), alone_s, sums)
    longer_s = max(0.0, shown_s - sums[first.codec])
    assert utilisation(again.every, alone_s, sums[again.codec] + longer_s) >= TARGET - 1e-6
    if falls_short(measured, first.utilisation):
        assert again.every >= first.every


def test_a_trial_refutes_what_it_misses_clearly() -> None:
    assert not falls_short(0.82, 0.9)
    assert falls_short(0.55, 0.9)


BITS: dict[CodecName, int] = {"float32": 32, "8bit": 8, "4bit": 4, "2bit": 2}


def sums_over(link: LinkModel, n_values: float, n_ranks: int, encode_s: float) -> dict[CodecName, float]:
    """Seconds of a mean by each codec: a ring of its bytes, and for all but float32 the time to encode and decode."""
    return {
        codec: ring(n_values * bits / 8, n_ranks, link) + (encode_s if codec != "float32" else 0.0)
        for codec, bits in BITS.items()
    }


def steps_of(codec: CodecName, alone_s: float, sum_s: float) -> int:
    """The fewest steps with which this codec may be advised."""
    return max(least_every(alone_s, sum_s), RARE if codec == "2bit" else 1)


LINKS = st.builds(LinkModel, st.floats(0.0, 0.2), st.floats(1e5, 1e11))
JOBS = st.tuples(st.floats(1e3, 1e10), st.integers(2, 64), st.floats(0.0, 1.0))


@given(SECONDS, LINKS, JOBS)
def test_advice_on_a_link_reaches_the_target_and_saves_no_bits_without_saving_steps(
    alone_s: float, link: LinkModel, job: tuple[float, int, float]
) -> None:
    sums = sums_over(link, *job)
    found = advised(alone_s, sums)
    assert found.utilisation == utilisation(found.every, alone_s, sums[found.codec])
    assert found.utilisation >= TARGET - 1e-6
    assert found.every == steps_of(found.codec, alone_s, sums[found.codec]), "no step more than this codec needs"
    for codec, bits in BITS.items():
        if bits > BITS[found.codec]:
            assert steps_of(codec, alone_s, sums[codec]) > found.every, "more bits would do as well"


@given(SECONDS, LINKS, JOBS, st.floats(1.0, 100.0), st.floats(0.0, 0.1))
def test_a_worse_link_needs_as_many_steps_with_every_codec(
    alone_s: float, link: LinkModel, job: tuple[float, int, float], factor: float, more_s: float
) -> None:
    worse = LinkModel(link.latency_s + more_s, link.bytes_per_s / factor)
    before, after = advised(alone_s, sums_over(link, *job)), advised(alone_s, sums_over(worse, *job))
    if before.codec == after.codec:
        assert after.every >= before.every
    for codec, sum_s in sums_over(link, *job).items():
        only: dict[CodecName, float] = {codec: sum_s}
        only_worse: dict[CodecName, float] = {codec: sums_over(worse, *job)[codec]}
        assert advised(alone_s, only_worse).every >= advised(alone_s, only).every


@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 0.04])
@pytest.mark.parametrize("alone_s", [0.01, 0.1, 1.0])
def test_slower_and_slower_links_need_more_steps_with_the_same_codec(latency_s: float, alone_s: float) -> None:
    links = [LinkModel(latency_s, 1e10 / 2 ** (k / 8)) for k in range(185)]  # 80 Gbit/s to 10 kbit/s
    found = [advised(alone_s, sums_over(link, 2e6, 4, 0.02)) for link in links]
    assert found[0].codec == "float32"
    assert found[-1].codec == "2bit"
    for codec in CODECS:
        steps = [one.every for one in found if one.codec == codec]
        assert steps == sorted(steps)
        assert len(steps) > 1, "each codec suits some of these links"
