"""The commands that an agent prints work where they are typed, whatever its state directory is called."""

import shlex
from pathlib import Path

import pytest

from umbel.client.agent.site_commands import SiteCommands


def test_the_directory_is_named_in_full_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for default in ("~/.umbel", ".umbel", str(tmp_path / ".umbel")):
        assert SiteCommands.of(Path(default)).text("allow", "ward-0") == "umbel site allow ward-0"
    assert SiteCommands.of(Path("s1")).text("runs") == f"umbel site runs --state {tmp_path / 's1'}"


@pytest.mark.parametrize("name", ["ward 1", "it's", "$(id)", "-x"])
def test_a_shell_reads_the_directory_as_it_is(tmp_path: Path, name: str) -> None:
    words = shlex.split(SiteCommands.of(tmp_path / name).text("deny", "ward-0"))
    assert words == ["umbel", "site", "deny", "ward-0", "--state", str(tmp_path / name)]
