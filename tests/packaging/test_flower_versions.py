"""The tests of Flower apps, with the oldest and the newest Flower that pyproject.toml allows."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.repository import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def allowed() -> tuple[str, str]:
    """The oldest version that is allowed, and the first that is not."""
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"][:1]
    found = re.fullmatch(r"flwr>=([\d.]+),<([\d.]+)", wanted)
    assert found is not None, wanted
    return found[1], found[2]


def flower_tests() -> list[str]:
    """As `make test` runs them."""
    (line,) = re.findall(r"^FLOWER_TESTS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(line).split()


def environment(folder: Path, wanted: str) -> Path:
    """The interpreter of an environment with all of this one, and this Flower over it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    purelib = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    Path(purelib, "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    # Newer versions of click warn of what typer 0.20 calls, and a warning fails a test.
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted, "click<8.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_flower_apps_run_with_it(tmp_path: Path, which: str) -> None:
    oldest, too_new = allowed()
    wanted = f"flwr=={oldest}.*" if which == "oldest" else f"flwr>={oldest},<{too_new}"
    python = environment(tmp_path / "env", wanted)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "-m", "not nightly", *flower_tests()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-500:]
    assert "skipped" not in done.stdout.splitlines()[-1], "every test has its Flower"
