"""What an experiment's file may say of devices, and how it is told what it may not."""

import json
import tomllib
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from umbel.sim.fleet import section
from umbel.sim.fleet.section import FleetSection

_SECTION = TypeAdapter(FleetSection)


def read(text: str) -> FleetSection:
    return _SECTION.validate_json(json.dumps(tomllib.loads(text).get("fleet", {})), strict=True)


def shown() -> dict[str, Any]:
    """The file in the module's docstring, with every hour that it leaves out."""
    text = (section.__doc__ or "").split("```toml")[1].split("```")[0]
    section_shown: dict[str, Any] = tomllib.loads(text.replace("[...]", str([0.5] * 24)))["fleet"]
    return section_shown


def test_the_file_in_the_docstring_shows_every_key_with_its_default_or_one_that_is_allowed() -> None:
    file = shown()
    types = {name: _section_of(hint) for name, hint in get_type_hints(FleetSection).items()}
    for name, kind in types.items():
        if kind is None:
            continue
        keys = {key.name for key in fields(kind)}
        assert set(file[name]) == keys - {"samples_per_s"}, name
        for key, value in file[name].items():
            alone = {key: value} if key in ("share", "file") else {key: value, **_needed(name)}
            TypeAdapter(kind).validate_json(json.dumps(alone), strict=True)
    assert {name for name, kind in types.items() if kind is None} - {"recorded"} == {
        key for key, value in file.items() if not isinstance(value, dict)
    }


def _needed(name: str) -> dict[str, Any]:
    needed: dict[str, dict[str, Any]] = {
        "corrupt": {"share": 0.1},
        "malicious": {"share": 0.1},
        "stragglers": {"share": 0.1},
        "presence": {"file": "a.csv"},
    }
    return needed.get(name, {})


def _section_of(hint: Any) -> type[Any] | None:
    return next((one for one in (hint, *get_args(hint)) if is_dataclass(one) and isinstance(one, type)), None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[fleet]\nfast = true", "fast"),
        ("[fleet.speed]\nstep_s = 0", "step_s must lie between"),
        ("[fleet.speed]\nstep_s = nan", "step_s"),
        ("[fleet.speed]\nstep_s = 1\nsamples_per_s = 1", "either step_s or samples_per_s"),
        ("[fleet.speed]\nspread = 1\ntail = 1", "either `spread`"),
        ("[fleet.network]\nphones = 'x'\nup_bytes_per_s = 1", "leave out up_bytes_per_s"),
        ("[fleet.network]\njitter = -1", "jitter must lie between"),
        ("[fleet.hours]\nby_hour = [0.5]", "24 numbers"),
        ("[fleet.hours]\nnight = 1.5", "night must lie between"),
        ("[fleet.hours]\nday = -0.1", "day must lie between"),
        ("[fleet.hours]\nhabit = 1.5", "habit must lie between"),
        ("[fleet.hours]\nhabit = -0.1", "habit must lie between"),
        ("[fleet.hours]\nquiet_hour = 24.5", "quiet_hour must lie between"),
        ("[fleet.hours]\n[fleet.charging]", "keep one of hours and charging"),
        ("[fleet.presence]\ncycle_s = 5", "file"),
        ("[fleet.dropouts]\ndownload = 0\ntraining = 0\nupload = 0", "at least one"),
        ("[fleet.dropouts]\nper_round = true", "valid number"),
        ("[fleet.corrupt]\nshare = 0.1\nkinds = []", "at least one kind"),
        ("[fleet.corrupt]\nshare = 0.1\nkinds = ['nan', 'nan']", "no kind twice"),
        ("[fleet.corrupt]\nshare = 0.1\nkinds = ['scaled']", "nan"),
        ("[fleet.corrupt]\nshare = 0.6\n[fleet.malicious]\nshare = 0.6", "add up to more than 1"),
        ("[fleet]\nrecorded = 'a.json'\n[fleet.speed]\nstep_s = 1", "leave out speed"),
        ("[fleet.stragglers]\nwork = [0.1, 0.2]", "share"),
        ("[fleet.stragglers]\nshare = 1.1", "share must lie between"),
        ("[fleet.stragglers]\nshare = 0.5\nwork = [0.6, 0.5]", "the first number of `work`"),
        ("[fleet]\nzones = []", "1 to 48 time zones"),
        ("[fleet]\nwaiting = 0.5", "waiting must lie between"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        read(text)
