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


def test_a_truth_value_is_not_a_number(tmp_path: Path) -> None:
    config = tmp_path / "umbel.toml"
    for line in ("port = true", "check_ins_per_s_max = false"):
        config.write_text(f"{line}\n")
        with pytest.raises(ValidationError, match=r"must be a number, not (true|false)"):
            load_settings(config, {})
    config.write_text("s3_allow_http = true\n")
    assert load_settings(config, {}).s3_allow_http
