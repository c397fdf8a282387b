"""What identifies a Flower app's code."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import project
from umbel.sim.flower.project import digest_of


def test_the_digest_follows_the_code_and_reads_only_files(tmp_path: Path) -> None:
    app = project(tmp_path / "app")
    before = digest_of(app)
    (app / "folder.py").mkdir()
    (app / "dangling.py").symlink_to(app / "nothing")
    (app / ".venv").mkdir()
    (app / ".venv" / "other.py").write_text("1")
    assert digest_of(app) == before
    (app / "small" / "more.py").write_text("1")
    assert digest_of(app) != before
