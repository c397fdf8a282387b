"""Pictures take twenty times as long as the small experiments of most tests. `tests/sim/results` draws them."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture of matplotlib that this process writes is an empty file."""

    def save(_: object, path: Path, **__: Any) -> None:
        path.write_bytes(b"")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
