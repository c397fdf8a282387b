"""What `umbel simulate` prints at its end."""

from pathlib import Path

import pytest

from umbel.sim.console import run

TWO_CODECS = """
name = "small"
data = { name = "digits" }
partition = { scheme = "iid", clients = 4 }
model = { name = "logistic" }
rounds = { count = 1, target = 4, over_selection = 1.0 }
training = { local_steps = 1 }
sweep = { "codec.name" = ["float32", "sign"] }
"""


def test_bytes_of_a_small_model_show_what_a_codec_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text(TWO_CODECS)
    results = run(file, tmp_path / "out", None, {}, quiet=False)
    up = [point.bytes_up.mean / 1e6 for point in results.points if point.bytes_up is not None]
    assert up[1] < up[0] / 10
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in told[2:4]] == ["codec=float32", "codec=sign"]
    assert [f"{megabytes:.3g}," in line for megabytes, line in zip(up, told[2:4], strict=True)] == [True, True]
