"""Flower apps write files where they run."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
