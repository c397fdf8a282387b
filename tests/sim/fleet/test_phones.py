"""The file of measured phones, and devices that are such phones."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.fleet.build import phone_traits
from umbel.sim.fleet.files import NotPhones, Phone, read_phones

PHONE = {"down_u": 7491.4, "down_sigma": 3369.3, "up_u": 4935.2, "up_sigma": 2767.3}


def written(path: Path, content: object) -> Path:
    (path / "phones.json").write_text(json.dumps(content))
    return path / "phones.json"


def test_phones_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = read_phones(written(tmp_path, {"b": PHONE, "a": {**PHONE, "up_u": 1}}))
    assert found == (Phone(**PHONE), Phone(7491.4, 3369.3, 1.0, 2767.3))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({}, "at least 1"),
        ([], "object"),
        ({"a": {**PHONE, "down_u": 0}}, "a.down_u.*greater than 0"),
        ({"a": {**PHONE, "up_sigma": -1}}, "a.up_sigma"),
        ({"a": {**PHONE, "up_u": float("nan")}}, "a.up_u"),
        ({"a": {**PHONE, "name": "x"}}, "a.name"),
        ({"a": {"down_u": 1}}, "a.down_sigma"),
    ],
)
def test_what_are_no_phones_is_refused_with_the_place(tmp_path: Path, content: object, why: str) -> None:
    with pytest.raises(NotPhones, match=f"phones.json is not a file of phones: .*{why}"):
        read_phones(written(tmp_path, content))


json_like: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(PHONE)), inner, max_size=4),
)


@given(st.binary(max_size=60) | st.dictionaries(st.text(max_size=3), json_like).map(lambda v: json.dumps(v).encode()))
def test_no_bytes_lead_to_another_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("phones") / "phones.json"
    path.write_bytes(data)
    with suppress(NotPhones):
        assert read_phones(path)


def test_rates_have_the_mean_and_deviation_that_were_measured() -> None:
    down, up = phone_traits((Phone(**PHONE),), seed=1)
    n = 200_000
    for trait, mean, deviation in ((down, 7491.4e3, 3369.3e3), (up, 4935.2e3, 2767.3e3)):
        rates = trait.today(np.arange(n), 1, 1)
        assert rates.min() > 0
        assert rates.mean() == pytest.approx(mean, rel=0.01)  # seven standard errors
        assert rates.std() == pytest.approx(deviation, rel=0.03)
