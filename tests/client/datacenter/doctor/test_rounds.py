"""The number of local steps that rounds are found to need: what a trial refutes is given up for what it supports."""

from collections.abc import Callable

from umbel.client.datacenter.doctor.rounds import RefutedSteps, RoundAdvice, tried_steps


def rounds_of(cost_s: Callable[[int], float]) -> tuple[Callable[[int], float], list[int]]:
    """Rounds with steps of a second; the numbers of steps that were tried."""
    tried = list[int]()

    def round_s(steps: int) -> float:
        tried.append(steps)
        return steps + cost_s(steps)

    return round_s, tried


def test_a_cost_that_stays_needs_one_more_trial() -> None:
    round_s, tried = rounds_of(lambda _: 2.0)
    found = tried_steps(round_s, 3, 1.0, 1e9)
    assert (found, tried) == (RoundAdvice(2.0, 18, 0.9, 0.9), [3, 18])


def test_a_first_guess_that_is_right_is_tried_once() -> None:
    round_s, tried = rounds_of(lambda _: 2.0)
    assert tried_steps(round_s, 17, 1.0, 1e9).local_steps == 18
    assert tried == [17]


def test_a_cost_that_a_trial_shows_is_believed() -> None:
    round_s, tried = rounds_of(lambda steps: 2.0 if steps < 10 else 12.0)
    found = tried_steps(round_s, 3, 1.0, 1e9)
    assert tried == [3, 18, 108]
    assert found == RoundAdvice(12.0, 108, 0.9, 0.9, (RefutedSteps(18, 0.9, 18 / 30),))


def test_a_cost_that_grows_with_the_steps_ends_with_what_was_measured() -> None:
    round_s, tried = rounds_of(lambda steps: steps / 1.0)
    found = tried_steps(round_s, 3, 1.0, 1e9)
    assert tried == [3, 27, 243]
    assert (found.local_steps, found.measured, len(found.refuted)) == (243, 0.5, 1)


def test_rounds_that_are_too_long_are_not_tried() -> None:
    round_s, tried = rounds_of(lambda steps: 2.0 if steps < 10 else 12.0)
    found = tried_steps(round_s, 3, 1.0, 60.0)
    assert (tried, found.local_steps, found.measured, len(found.refuted)) == ([3, 18], 108, None, 1)
    assert tried_steps(round_s, 3, 1.0, 10.0) == RoundAdvice(2.0, 18, 0.9, None)
