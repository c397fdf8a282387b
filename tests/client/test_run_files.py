"""Mistakes in a run file: the file, the section and the key are named, and what was meant if that can be told."""

from pathlib import Path

import pytest

from umbel.client.run_files import read_run_file

GOOD = 'name = "ward"\n[rounds]\ncount = 1\ntarget = 2\n'


def test_a_good_file_is_read_with_its_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(GOOD)
    text, run = read_run_file(file)
    assert (text, run.name, run.rounds.target) == (GOOD, "ward", 2)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            GOOD.replace("target", "targett"),
            ": [rounds] unknown key 'targett' (did you mean 'target'?); [rounds] 'target' is missing",
        ),
        (GOOD + "learning_rate = 0.1\n", ": [rounds] unknown key 'learning_rate' (it belongs in [training])"),
        ("target = 2\n" + GOOD, ": unknown key 'target' (it belongs in [rounds])"),
        (GOOD + "seed = 7\n", "unknown key 'seed' (it belongs at the top, before the first section)"),
        (GOOD + "zzz = 7\n", "unknown key 'zzz'"),
        (GOOD + "[trainig]\n", ": unknown key 'trainig' (did you mean 'training'?)"),
        (GOOD.replace("= 2", "= true"), ": rounds.target: Input should be a valid integer"),
        (GOOD.replace("ward", "No Slug"), ": name must be 1 to 63 of a-z"),
        (GOOD.replace("= 2", "="), " is not valid TOML: Invalid value (at line 4"),
        (GOOD + "window_s = 2020-01-01\n", " does not parse: "),
        ("\udcff", " does not parse: "),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"run\.toml") as caught:
        read_run_file(file)
    assert sentence in str(caught.value)
    assert "Value error" not in str(caught.value)
