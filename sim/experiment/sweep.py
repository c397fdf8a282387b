"""The sweep of an experiment's file: every combination of values, or of settings that go together."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

LABEL = "label"
LABEL_CHARACTERS_MAX = 100


def point_label(point: Mapping[str, object]) -> str:
    """A point in words: `proximal_mu=0.1`, `codec=eden` for a name, the label for settings that go together."""
    return ", ".join(f"{_short(key)}={value}" if "." in key else f"{value}" for key, value in point.items())


def _short(key: str) -> str:
    *_, section, last = key.split(".")
    return section if last == "name" else last


def check_values(name: str, values: Sequence[Any]) -> None:
    """Raise `ValueError` unless there are different values, either all or none of them tables with a label."""
    if not values:
        raise ValueError(f"sweep: {name} has no value to try")
    if twice := [one for i, one in enumerate(values) if one in values[:i] and not goes_together(one)]:
        raise ValueError(f"sweep: {name} has the value {twice[0]} twice")
    labels = [one[LABEL] for one in values if goes_together(one)]
    if not labels:
        return
    if "." in name:
        raise ValueError(f"sweep: {name} is one key; give the tables of what goes together a name without a dot")
    if len(labels) < len(values) or not all(isinstance(label, str) and label for label in labels):
        raise ValueError(f'sweep: each of {name} needs a label = "..." beside the keys that it sets')
    if len(set(labels)) < len(labels):
        raise ValueError(f"sweep: two of {name} have one label")
    if longest := [label for label in labels if len(label) > LABEL_CHARACTERS_MAX]:
        raise ValueError(
            f"sweep: a label names a folder and a line, so it has at most {LABEL_CHARACTERS_MAX} characters, "
            f"not {len(longest[0])}"
        )


def points(sweep: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def goes_together(value: Any) -> bool:
    """Whether a value of the sweep is a table of settings that go together."""
    return isinstance(value, dict) and LABEL in value


def settings(name: str, value: Any) -> dict[str, Any]:
    """The settings of one value of the sweep, by dotted key."""
    return {key: one for key, one in value.items() if key != LABEL} if goes_together(value) else {name: value}
