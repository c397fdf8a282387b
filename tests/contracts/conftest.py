from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A coordinator, killed at the end."""
    house = House(tmp_path / "coordinator")
    yield house
    house.kill()
