"""The published data sets, for tests that hold against their real files: in the folder that UMBEL_DATA names."""

import os
from pathlib import Path

import pytest

from umbel.sim.data.sets.fetch import DataSource


def real_files(source: DataSource) -> Path:
    """The folder of data sets, if all files of `source` are there; else the test is skipped."""
    named = os.environ.get("UMBEL_DATA")
    if not named:
        pytest.skip("UMBEL_DATA names no folder of data sets")
    for file in source.files:
        if not (path := Path(named) / source.folder / file.name).exists():
            pytest.skip(f"the data sets of UMBEL_DATA lack {path}")
    return Path(named)
