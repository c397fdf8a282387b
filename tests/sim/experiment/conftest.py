"""No test of this folder looks at a picture."""

import pytest


@pytest.fixture(autouse=True)
def _no_pictures(blank_pictures: None) -> None:
    """`blank_pictures` for all tests."""
