"""Flags before the environment before the file."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from umbel.server.settings import load_settings


def test_flags_come_before_the_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "umbel.toml"
    config.write_text('host = "file"\nport = 1\nchunk_bytes_max = 2048\n')
    monkeypatch.setenv("UMBEL_PORT", "2")
    monkeypatch.setenv("UMBEL_HOST", "environment")
    settings = load_settings(config, {"host": "flag", "port": None})
    assert (settings.host, settings.port, settings.chunk_bytes_max) == ("flag", 2, 2048)


def test_an_unknown_key_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "umbel.toml"
    config.write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        load_settings(config, {})
    with pytest.raises(FileNotFoundError, match="no configuration file"):
        load_settings(tmp_path / "absent.toml", {})
