"""A [data] section names a data set, and options that are not for it are refused with a sentence."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from umbel.sim.data.load import NAMES, DataSection
from umbel.sim.data.sets.synthetic import SyntheticLaw


@pytest.mark.parametrize("name", [*NAMES, "my_data:load"])
def test_a_name_is_enough(name: str) -> None:
    assert TypeAdapter(DataSection).validate_python({"name": name}) == DataSection(name)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"name": "cifar"}, "must be one of digits"),
        ({"name": "mnist", "train_limit": 0}, "train_limit must lie"),
        ({"name": "mnist", "test_limit": -3}, "test_limit must lie"),
        ({"name": "digits", "test_share": 1.0}, "test_share must lie"),
        ({"name": "mnist", "test_share": 0.2}, "mnist has a test part of its own"),
        ({"name": "mnist", "alpha": 1.0}, 'alpha is for name = "synthetic", not for mnist'),
        ({"name": "digits", "iid": False}, "iid is for name"),
        ({"name": "synthetic", "train_limit": 10}, "train_limit is not for synthetic"),
        ({"name": "synthetic", "clients": 0}, "clients must lie"),
        ({"name": "synthetic", "samples": 0}, "samples must lie"),
        ({"name": "mnist", "trian_limit": 10}, "trian_limit"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        TypeAdapter(DataSection).validate_python(section)


def test_what_is_not_said_of_synthetic_data_is_as_in_the_paper() -> None:
    assert DataSection("synthetic").law() == SyntheticLaw(30, 1.0, 1.0)
    said = DataSection("synthetic", clients=7, alpha=0.0, beta=0.5, iid=True, samples=20)
    assert said.law() == SyntheticLaw(7, 0.0, 0.5, True, 20)
