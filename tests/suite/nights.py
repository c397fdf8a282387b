"""Parameters that a test has at night only: by day a few of them stand for all, so that `make test` stays short."""

from typing import Any

import pytest


def at_night(*values: Any) -> list[Any]:
    """Each of these values as a parameter with the mark `nightly`; a tuple is the values of several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in values
    ]
