"""Virtual time is said in the unit that a person would choose."""

import pytest

from umbel.sim.results.shown import in_unit, unit_of


@pytest.mark.parametrize(
    ("span_s", "said"),
    [
        (0.0, "0.00 s"),
        (4.75, "4.75 s"),
        (119.0, "119 s"),
        (120.0, "2.00 min"),
        (7199.0, "120 min"),
        (40_000.0, "11.1 h"),
        (172_800.0, "2.00 days"),
        (1e9, "11,574 days"),
    ],
)
def test_a_span_is_said_in_its_unit(span_s: float, said: str) -> None:
    assert in_unit(span_s, unit_of([span_s])) == said


def test_of_several_the_longest_chooses() -> None:
    assert unit_of([5.0, 10_000.0]).name == "hours"
    assert unit_of([]).name == "seconds"
