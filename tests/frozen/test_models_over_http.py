"""What a coordinator makes of runs over HTTP: the versions, records and audit bundles that were frozen."""

import asyncio
from pathlib import Path

import pytest

from tests.frozen.kept import frozen
from tests.frozen.over_http import STAGES, played

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", STAGES)
def test_a_run_over_http_makes_the_frozen_models_records_and_bundles(name: str, tmp_path: Path) -> None:
    kept = frozen("updates.json").get(name, {})
    facts, whole, _ = asyncio.run(played(STAGES[name], tmp_path / "coordinator", kept))
    assert facts == frozen("models.json")["over_http"][name], whole


def test_every_kind_of_run_is_frozen() -> None:
    """A run that is taken away from the plays would take its promise with it."""
    assert set(frozen("models.json")["over_http"]) == set(STAGES)
